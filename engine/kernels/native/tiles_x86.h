/* Products of codes by AVX2, and by VNNI of 32 and of 64 bytes. */

#define WIDE NARROW ",avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"

/* -- 8 outputs at a time ------------------------------------------------------------------------------------------- */

INLINE(NARROW) __m256i narrow_codes_of(__m256i bytes) { return bytes; }

INLINE(NARROW) __m256i narrow_dot(const __m256i *codes, const int8_t *row, const int32_t *shift, int bits, int group) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum = _mm256_setzero_si256();
    for (int at = 0; at < group / 4; at++) {
        __m256i some = _mm256_set1_epi32(four(row + 4 * at));
        if (bits == 4) /* 16 products of at most 15 * 127 fit 16 bits */
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[at], some));
        else {
            __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes[at]), _mm256_sign_epi8(some, codes[at]));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
    }
    return bits == 4 ? _mm256_madd_epi16(sum, ones) : sum;
}

#define NAMED(name) narrow_##name
#define TARGET NARROW
#include "eight.h"

/* AVX-VNNI has AVX512-VNNI's instruction for 32 bytes, in another encoding: all but the name of it is the same here. */
#define DOT_OF_BYTES(multiplied)                                                                                            \
    INLINE(TARGET) __m256i NAMED(codes_of)(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8((char)128)); }  \
    INLINE(TARGET) __m256i NAMED(dot)(const __m256i *codes, const int8_t *row, const int32_t *shift, int bits, int group) { \
        __m256i sum = bits == 4 ? _mm256_setzero_si256() : _mm256_set1_epi32(*shift);                                       \
        for (int at = 0; at < group / 4; at++) sum = multiplied(sum, codes[at], _mm256_set1_epi32(four(row + 4 * at)));     \
        return sum;                                                                                                         \
    }

#define NAMED(name) evex_##name
#define TARGET WIDE
DOT_OF_BYTES(_mm256_dpbusd_epi32)
#include "eight.h"

#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define NAMED(name) vex_##name
#define TARGET NARROW ",avxvnni"
DOT_OF_BYTES(_mm256_dpbusd_avx_epi32)
#include "eight.h"
#else
#define vex_product narrow_product
#endif

INLINE(WIDE) __m128i eight_halves(const uint8_t *block) { return _mm_loadu_si128((const __m128i *)block); }

/* -- 16 outputs at a time ------------------------------------------------------------------------------------------ */

INLINE(WIDE) __m512i both(const uint8_t *one, const uint8_t *other) {
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)one));
    return _mm512_inserti64x4(first, _mm256_loadu_si256((const __m256i *)other), 1);
}

INLINE(WIDE) __m512 both_halves(const uint8_t *one, const uint8_t *other) {
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(eight_halves(one)), eight_halves(other), 1));
}

INLINE(WIDE) void wide_rows(const Product *p, int64_t tile, int64_t row, const int count, const int bits, const int group) {
    const int64_t num_groups = p->inputs / group, vectors = group * bits / 32, per_step = GROUP / group;
    const uint8_t *block = p->blocks + tile * num_groups * bytes_of_block(p, bits, group);
    const uint8_t *other = block + num_groups * bytes_of_block(p, bits, group);
    const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8((char)128);
    __m512 total[8];
    for (int at = 0; at < count; at++) total[at] = _mm512_setzero_ps();
    for (int64_t g = 0; g < num_groups; g++) {
        __m512i codes[8];
        for (int at = 0; at < vectors; at++) {
            codes[at] = both(block + 32 * at, other + 32 * at);
            if (bits == 4) {
                codes[at + vectors] = _mm512_and_si512(_mm512_srli_epi16(codes[at], 4), low);
                codes[at] = _mm512_and_si512(codes[at], low);
            } else
                codes[at] = _mm512_xor_si512(codes[at], offset); /* unsigned */
        }
        block += 32 * vectors, other += 32 * vectors;
        const __m512 scale = both_halves(block, other);
        __m512 minimum = _mm512_mul_ps(scale, _mm512_set1_ps((float)-p->middle));
        if (p->has_minimums) minimum = both_halves(block + 2 * TILE, other + 2 * TILE);
        block += 2 * TILE * (1 + p->has_minimums), other += 2 * TILE * (1 + p->has_minimums);
        for (int at = 0; at < count; at++) {
            const int64_t place = (row + at) * num_groups + g;
            __m512i whole = bits == 4 ? _mm512_setzero_si512() : _mm512_set1_epi32(p->shifts[place]);
            for (int i = 0; i < group / 4; i++)
                whole = _mm512_dpbusd_epi32(whole, codes[i], _mm512_set1_epi32(four(p->rows + place * group + 4 * i)));
            const __m512 sum = _mm512_cvtepi32_ps(whole), step = _mm512_set1_ps(p->steps[place / per_step]);
            total[at] = _mm512_fmadd_ps(_mm512_mul_ps(sum, scale), step, total[at]);
            if (bits == 4 || p->has_minimums) total[at] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(p->sums[place]), total[at]);
        }
    }
    for (int at = 0; at < count; at++) {
        if (p->bias) total[at] = _mm512_add_ps(total[at], _mm512_loadu_ps(p->bias + tile * TILE));
        float *out = p->out + (row + at) * p->stride + tile * TILE;
        if (p->adds) total[at] = _mm512_add_ps(_mm512_loadu_ps(out), total[at]);
        _mm512_storeu_ps(out, total[at]);
    }
}

INLINE(WIDE) void wide_tiles(const Product *p, int64_t tile, int64_t row, int64_t last, const int bits, const int group) {
    for (; row + 8 <= last; row += 8) wide_rows(p, tile, row, 8, bits, group);
    if (row + 4 <= last) wide_rows(p, tile, row, 4, bits, group), row += 4;
    if (row + 3 == last) wide_rows(p, tile, row, 3, bits, group), row += 3;
    evex_tile(p, tile, row, last, bits, group);
    evex_tile(p, tile + 1, row, last, bits, group);
}

INLINE(WIDE) void wide_kind(const Product *p, int64_t begin, int64_t end, const int bits, const int group) {
    for (int64_t row = 0; row < p->num_rows; row += ROWS_AT_ONCE) {
        const int64_t last = row + ROWS_AT_ONCE < p->num_rows ? row + ROWS_AT_ONCE : p->num_rows;
        int64_t tile = begin;
        for (; tile + 2 <= end; tile += 2) wide_tiles(p, tile, row, last, bits, group);
        if (tile < end) evex_tile(p, tile, row, last, bits, group);
    }
}

static __attribute__((target(WIDE))) void wide(const void *job, int64_t begin, int64_t end) {
    const Product *p = job;
    if (p->bits == 4) p->group == 32 ? wide_kind(p, begin, end, 4, 32) : wide_kind(p, begin, end, 4, 16);
    else p->group == 32 ? wide_kind(p, begin, end, 8, 32) : wide_kind(p, begin, end, 8, 16);
}

enum { AVX2, AVX_VNNI, AVX512_VNNI_OF_8, AVX512_VNNI }; /* `Variant` of `tiles.py` */
enum { FEWEST = 3, FEW = 8, OF_FEW = 6144 }; /* rows, and codes of rows */

/* Fewer rows wait for memory, which one stream of blocks reads faster than two. So do some whose codes stay beside them in the first cache. */
static int are_few(const Product *p) {
    return p->num_rows < FEWEST || (p->num_rows <= FEW && p->num_rows * p->inputs <= OF_FEW);
}

static Work variant_of(const Product *p) {
    switch (p->variant) {
    case AVX_VNNI: return vex_product;
    case AVX512_VNNI_OF_8: return evex_product;
    case AVX512_VNNI: return are_few(p) ? evex_product : wide;
    }
    return narrow_product;
}
