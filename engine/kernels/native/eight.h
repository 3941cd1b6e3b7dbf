/* Rows times tiles, 8 outputs at a time, in one variant: a file includes this once for each, after it has defined

       NAMED(name)   what the variant calls its functions
       PRODUCT       its product of tiles
       TARGET        its instructions
       NAMED(codes_of)(bytes), NAMED(dot)(codes, row, shift, form)

   The latter returns the eight sums of a group's codes times a row's, and `shift`: it takes back what unsigned codes have too much.
   Signed ones that `codes_of` leaves so have none. */

INLINE(TARGET) void NAMED(unpack)(Bytes *codes, const uint8_t *block, const int8_t *levels, const Form form) {
    const int vectors = form.group / 4, half = vectors / 2, more = form.bits - 4;
    for (int at = 0; form.bits == 8 && at < vectors; at++) codes[at] = NAMED(codes_of)(load_bytes(block + 32 * at));
    for (int at = 0; form.bits < 8 && at < half; at++) {
        const Bytes some = load_bytes(block + 32 * at);
        codes[at] = low_bits(some), codes[at + half] = high_bits(some);
    }
    for (int at = 0; (form.bits == 5 || form.bits == 6) && at < vectors; at++) {
        const Bytes some = load_bytes(block + 32 * (half + at * more / 8));
        codes[at] = or_bytes(codes[at], moved_bits(some, 4 - at * more % 8, (16 << more) - 16));
    }
    for (int at = 0; form.has_levels && at < vectors; at++) codes[at] = NAMED(codes_of)(looked_up(codes[at], levels));
}

INLINE(TARGET) void NAMED(rows)(const Product *p, int64_t tile, int64_t row, const int count, const Form form) {
    const int64_t num_groups = p->inputs / form.group, per_step = GROUP / form.group;
    const uint8_t *block = p->blocks + tile * num_groups * bytes_of_block(p, form);
    Floats total[4];
    for (int at = 0; at < count; at++) total[at] = zero8();
    for (int64_t g = 0; g < num_groups; g++) {
        Bytes codes[8];
        NAMED(unpack)(codes, block, p->levels, form);
        block += form.group * form.bits;
        const Floats scale = from_halves8(block);
        const Floats minimum = p->has_minimums ? from_halves8(block + 2 * TILE) : zero8();
        block += 2 * TILE * (1 + p->has_minimums);
        for (int at = 0; at < count; at++) {
            const int64_t place = (row + at) * num_groups + g;
            const Floats sum = from_words(NAMED(dot)(codes, p->rows + place * form.group, p->shifts[place], form));
            const Floats step = set8(p->steps[place / per_step]);
            total[at] = fma8(mul8(sum, scale), step, total[at]);
            if (p->has_minimums) total[at] = fma8(minimum, set8(p->sums[place]), total[at]);
        }
    }
    for (int at = 0; at < count; at++) {
        if (p->bias) total[at] = add8(total[at], load8(p->bias + tile * TILE));
        float *out = p->out + (row + at) * p->stride + tile * TILE;
        if (p->adds) total[at] = add8(load8(out), total[at]);
        store8(out, total[at]);
    }
}

INLINE(TARGET) void NAMED(tile)(const Product *p, int64_t tile, int64_t row, int64_t last, const Form form) {
    for (; row + 4 <= last; row += 4) NAMED(rows)(p, tile, row, 4, form);
    switch (last - row) {
        case 3: NAMED(rows)(p, tile, row, 3, form); break;
        case 2: NAMED(rows)(p, tile, row, 2, form); break;
        case 1: NAMED(rows)(p, tile, row, 1, form); break;
    }
}

INLINE(TARGET) void NAMED(tiles)(const Product *p, int64_t begin, int64_t end, const Form form) {
    for (int64_t row = 0; row < p->num_rows; row += ROWS_AT_ONCE) {
        const int64_t last = row + ROWS_AT_ONCE < p->num_rows ? row + ROWS_AT_ONCE : p->num_rows;
        for (int64_t tile = begin; tile < end; tile++) NAMED(tile)(p, tile, row, last, form);
    }
}

__attribute__((target(TARGET))) void PRODUCT(const void *job, int64_t begin, int64_t end) {
    IN_ITS_FORM(NAMED(tiles), (const Product *)job, begin, end)
}

#undef NAMED
#undef PRODUCT
#undef TARGET
