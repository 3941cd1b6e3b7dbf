/* Products of codes by NEON, and by its instruction that adds four products of bytes to a sum. */

INLINE(NARROW) int8x16_t four_times(const int8_t *row) { return vreinterpretq_s8_s32(vdupq_n_s32(four(row))); }

/* -- NEON ---------------------------------------------------------------------------------------------------------- */

INLINE(NARROW) Bytes neon_codes_of(Bytes bytes) { return bytes; }

/* Eight products of at most 15 * 127 in each lane fit 16 bits, and so do two of any bytes. */
INLINE(NARROW) int32x4_t dot_of_four(const int8x16_t *codes, int stride, const int8_t *row, int bits, int group) {
    int16x8_t low = vdupq_n_s16(0), high = low;
    int32x4_t sum = vdupq_n_s32(0);
    for (int at = 0; at < group / 4; at++) {
        const int8x16_t own = codes[at * stride], some = four_times(row + 4 * at);
        if (bits == 4) {
            low = vmlal_s8(low, vget_low_s8(own), vget_low_s8(some));
            high = vmlal_high_s8(high, own, some);
        } else
            sum = vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(own), vget_low_s8(some)), vmull_high_s8(own, some)));
    }
    return bits == 4 ? vpaddlq_s16(vpaddq_s16(low, high)) : sum;
}

INLINE(NARROW) Words neon_dot(const Bytes *codes, const int8_t *row, const int32_t *shift, int bits, int group) {
    return (Words){dot_of_four(&codes->low, 2, row, bits, group), dot_of_four(&codes->high, 2, row, bits, group)};
}

#define NAMED(name) neon_##name
#define TARGET NARROW
#include "eight.h"

/* -- four products at once ----------------------------------------------------------------------------------------- */

#if (defined(__clang__) && __clang_major__ >= 16) || (!defined(__clang__) && __GNUC__ >= 8)
#define DOTTED "arch=armv8.2-a+dotprod"

INLINE(DOTTED) Bytes dotted_codes_of(Bytes bytes) { return bytes; }

INLINE(DOTTED) Words dotted_dot(const Bytes *codes, const int8_t *row, const int32_t *shift, int bits, int group) {
    Words sum = zero_words();
    for (int at = 0; at < group / 4; at++) {
        const int8x16_t some = four_times(row + 4 * at);
        sum.low = vdotq_s32(sum.low, codes[at].low, some);
        sum.high = vdotq_s32(sum.high, codes[at].high, some);
    }
    return sum;
}

#define NAMED(name) dotted_##name
#define TARGET DOTTED
#include "eight.h"
#else
#define dotted_product neon_product
#endif

enum { NEON = 4, NEON_DOTPROD = 5 }; /* `Variant` of `tiles.py` */

static Work variant_of(const Product *p) { return p->variant == NEON_DOTPROD ? dotted_product : neon_product; }
