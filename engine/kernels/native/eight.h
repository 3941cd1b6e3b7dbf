/* Rows times tiles, 8 outputs at a time, in one variant: `tiles.c` includes this once for each, after it has defined

       NAMED(name)   what the variant calls its functions
       TARGET        its instructions
       NAMED(codes_of)(bytes), NAMED(dot)(codes, row, shift, bits, group)

   The latter returns the eight sums of a group's codes times a row's; where `codes_of` makes signed codes unsigned, `shift` takes
   back what this adds. */

INLINE(TARGET) void NAMED(rows)(const Product *p, int64_t tile, int64_t row, const int count, const int bits, const int group) {
    const int64_t num_groups = p->inputs / group, vectors = group * bits / 32, per_step = GROUP / group;
    const uint8_t *block = p->blocks + tile * num_groups * bytes_of_block(p, bits, group);
    Floats total[4];
    for (int at = 0; at < count; at++) total[at] = zero8();
    for (int64_t g = 0; g < num_groups; g++) {
        Bytes codes[8];
        for (int at = 0; at < vectors; at++) {
            const Bytes some = load_bytes(block + 32 * at);
            if (bits == 4) codes[at] = low_bits(some), codes[at + vectors] = high_bits(some);
            else codes[at] = NAMED(codes_of)(some);
        }
        block += 32 * vectors;
        const Floats scale = from_halves8(block);
        Floats minimum = mul8(scale, set8((float)-p->middle));
        if (p->has_minimums) minimum = from_halves8(block + 2 * TILE);
        block += 2 * TILE * (1 + p->has_minimums);
        for (int at = 0; at < count; at++) {
            const int64_t place = (row + at) * num_groups + g;
            const Floats sum = from_words(NAMED(dot)(codes, p->rows + place * group, p->shifts + place, bits, group));
            const Floats step = set8(p->steps[place / per_step]);
            total[at] = fma8(mul8(sum, scale), step, total[at]);
            if (bits == 4 || p->has_minimums) total[at] = fma8(minimum, set8(p->sums[place]), total[at]);
        }
    }
    for (int at = 0; at < count; at++) {
        if (p->bias) total[at] = add8(total[at], load8(p->bias + tile * TILE));
        float *out = p->out + (row + at) * p->stride + tile * TILE;
        if (p->adds) total[at] = add8(load8(out), total[at]);
        store8(out, total[at]);
    }
}

INLINE(TARGET) void NAMED(tile)(const Product *p, int64_t tile, int64_t row, int64_t last, const int bits, const int group) {
    for (; row + 4 <= last; row += 4) NAMED(rows)(p, tile, row, 4, bits, group);
    switch (last - row) {
        case 3: NAMED(rows)(p, tile, row, 3, bits, group); break;
        case 2: NAMED(rows)(p, tile, row, 2, bits, group); break;
        case 1: NAMED(rows)(p, tile, row, 1, bits, group); break;
    }
}

INLINE(TARGET) void NAMED(tiles)(const Product *p, int64_t begin, int64_t end, const int bits, const int group) {
    for (int64_t row = 0; row < p->num_rows; row += ROWS_AT_ONCE) {
        const int64_t last = row + ROWS_AT_ONCE < p->num_rows ? row + ROWS_AT_ONCE : p->num_rows;
        for (int64_t tile = begin; tile < end; tile++) NAMED(tile)(p, tile, row, last, bits, group);
    }
}

static __attribute__((target(TARGET))) void NAMED(product)(const void *job, int64_t begin, int64_t end) {
    const Product *p = job;
    if (p->bits == 4) p->group == 32 ? NAMED(tiles)(p, begin, end, 4, 32) : NAMED(tiles)(p, begin, end, 4, 16);
    else p->group == 32 ? NAMED(tiles)(p, begin, end, 8, 32) : NAMED(tiles)(p, begin, end, 8, 16);
}

#undef NAMED
#undef TARGET
