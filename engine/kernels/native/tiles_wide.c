/* Products of codes by AVX512-VNNI, 16 outputs at a time. */
#include "product.h"

#ifdef __x86_64__
INLINE(WIDE) __m128i eight_halves(const uint8_t *block) { return _mm_loadu_si128((const __m128i *)block); }

INLINE(WIDE) __m512i both(const uint8_t *one, const uint8_t *other) {
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)one));
    return _mm512_inserti64x4(first, _mm256_loadu_si256((const __m256i *)other), 1);
}

INLINE(WIDE) __m512 both_halves(const uint8_t *one, const uint8_t *other) {
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(eight_halves(one)), eight_halves(other), 1));
}

INLINE(WIDE) __m512i wide_moved(__m512i x, const int up, const int mask) {
    x = up < 0 ? _mm512_srli_epi16(x, up < 0 ? -up : 0) : _mm512_slli_epi16(x, up < 0 ? 0 : up);
    return _mm512_and_si512(x, _mm512_set1_epi8((char)mask));
}

INLINE(WIDE) void wide_unpack(__m512i *codes, const uint8_t *block, const uint8_t *other, const int8_t *levels, const Form form) {
    const __m512i offset = _mm512_set1_epi8((char)128); /* makes signed codes unsigned */
    const int vectors = form.group / 4, half = vectors / 2, more = form.bits - 4;
    for (int at = 0; form.bits == 8 && at < vectors; at++)
        codes[at] = _mm512_xor_si512(both(block + 32 * at, other + 32 * at), offset);
    for (int at = 0; form.bits < 8 && at < half; at++) {
        const __m512i some = both(block + 32 * at, other + 32 * at);
        codes[at] = wide_moved(some, 0, 15), codes[at + half] = wide_moved(some, -4, 15);
    }
    for (int at = 0; (form.bits == 5 || form.bits == 6) && at < vectors; at++) {
        const int64_t place = 32 * (half + at * more / 8);
        codes[at] = _mm512_or_si512(codes[at], wide_moved(both(block + place, other + place), 4 - at * more % 8, (16 << more) - 16));
    }
    if (form.has_levels) {
        const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)levels));
        for (int at = 0; at < vectors; at++) codes[at] = _mm512_xor_si512(_mm512_shuffle_epi8(table, codes[at]), offset);
    }
}

INLINE(WIDE) void wide_rows(const Product *p, int64_t tile, int64_t row, const int count, const Form form) {
    const int64_t num_groups = p->inputs / form.group, per_step = GROUP / form.group;
    const uint8_t *block = p->blocks + tile * num_groups * bytes_of_block(p, form);
    const uint8_t *other = block + num_groups * bytes_of_block(p, form);
    __m512 total[8];
    for (int at = 0; at < count; at++) total[at] = _mm512_setzero_ps();
    for (int64_t g = 0; g < num_groups; g++) {
        __m512i codes[8];
        wide_unpack(codes, block, other, p->levels, form);
        block += form.group * form.bits, other += form.group * form.bits;
        const __m512 scale = both_halves(block, other);
        const __m512 minimum = p->has_minimums ? both_halves(block + 2 * TILE, other + 2 * TILE) : _mm512_setzero_ps();
        block += 2 * TILE * (1 + p->has_minimums), other += 2 * TILE * (1 + p->has_minimums);
        for (int at = 0; at < count; at++) {
            const int64_t place = (row + at) * num_groups + g;
            __m512i whole = form.has_shifts ? _mm512_set1_epi32(p->shifts[place]) : _mm512_setzero_si512();
            for (int i = 0; i < form.group / 4; i++)
                whole = _mm512_dpbusd_epi32(whole, codes[i], _mm512_set1_epi32(four(p->rows + place * form.group + 4 * i)));
            const __m512 sum = _mm512_cvtepi32_ps(whole), step = _mm512_set1_ps(p->steps[place / per_step]);
            total[at] = _mm512_fmadd_ps(_mm512_mul_ps(sum, scale), step, total[at]);
            if (p->has_minimums) total[at] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(p->sums[place]), total[at]);
        }
    }
    for (int at = 0; at < count; at++) {
        if (p->bias) total[at] = _mm512_add_ps(total[at], _mm512_loadu_ps(p->bias + tile * TILE));
        float *out = p->out + (row + at) * p->stride + tile * TILE;
        if (p->adds) total[at] = _mm512_add_ps(_mm512_loadu_ps(out), total[at]);
        _mm512_storeu_ps(out, total[at]);
    }
}

INLINE(WIDE) void wide_tiles(const Product *p, int64_t tile, int64_t row, int64_t last, const Form form) {
    for (; row + 8 <= last; row += 8) wide_rows(p, tile, row, 8, form);
    if (row + 4 <= last) wide_rows(p, tile, row, 4, form), row += 4;
    switch (last - row) {
        case 3: wide_rows(p, tile, row, 3, form); break;
        case 2: wide_rows(p, tile, row, 2, form); break;
        case 1: wide_rows(p, tile, row, 1, form); break;
    }
}

INLINE(WIDE) void wide_kind(const Product *p, int64_t begin, int64_t end, const Form form) {
    for (int64_t row = 0; row < p->num_rows; row += ROWS_AT_ONCE) {
        const int64_t last = row + ROWS_AT_ONCE < p->num_rows ? row + ROWS_AT_ONCE : p->num_rows;
        for (int64_t tile = begin; tile < end; tile += 2) wide_tiles(p, tile, row, last, form);
    }
}

__attribute__((target(WIDE))) void baton_tiles_wide(const void *job, int64_t begin, int64_t end) {
    const int64_t pairs = end - (end - begin) % 2;
    IN_ITS_FORM(wide_kind, (const Product *)job, begin, pairs)
    if (pairs < end) baton_tiles_evex(job, pairs, end);
}
#endif
