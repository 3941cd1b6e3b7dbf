/* Products of codes by what every processor has that has kernels: AVX2 or NEON, 8 outputs at a time. */
#include "product.h"

#ifdef __x86_64__
INLINE(NARROW) __m256i avx2_codes_of(__m256i bytes) { return bytes; }

INLINE(NARROW) __m256i avx2_dot(const __m256i *codes, const int8_t *row, int32_t shift, const Form form) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int at_once = is_signed(form) ? 1 : 8 >> (form.bits - 4); /* 16 products of 15 * 127 fit 16 bits, 8 of 31, 4 of 63 */
    __m256i sum = is_signed(form) || !form.has_shifts ? _mm256_setzero_si256() : _mm256_set1_epi32(shift);
    for (int at = 0; at < form.group / 4;) {
        __m256i pairs = _mm256_setzero_si256();
        for (int i = 0; i < at_once && at < form.group / 4; i++, at++) {
            const __m256i some = _mm256_set1_epi32(four(row + 4 * at));
            if (is_signed(form)) pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes[at]), _mm256_sign_epi8(some, codes[at]));
            else pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes[at], some));
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    }
    return sum;
}

#define NAMED(name) avx2_##name
#define PRODUCT baton_tiles_avx2
#define TARGET NARROW
#include "eight.h"
#else
INLINE(NARROW) Bytes neon_codes_of(Bytes bytes) { return bytes; }

/* Eight products of at most 31 * 127 in each lane fit 16 bits, or four of 63 * 127, and so do two of any bytes. */
INLINE(NARROW) int32x4_t dot_of_four(const int8x16_t *codes, int stride, const int8_t *row, int32_t shift, const Form form) {
    int16x8_t low = vdupq_n_s16(0), high = low;
    int32x4_t sum = vdupq_n_s32(0);
    for (int at = 0; at < form.group / 4; at++) {
        const int8x16_t own = codes[at * stride], some = four_times(row + 4 * at);
        if (!is_signed(form)) {
            low = vmlal_s8(low, vget_low_s8(own), vget_low_s8(some));
            high = vmlal_high_s8(high, own, some);
        } else
            sum = vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(own), vget_low_s8(some)), vmull_high_s8(own, some)));
    }
    return is_signed(form) ? sum : vaddq_s32(vdupq_n_s32(shift), vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}

INLINE(NARROW) Words neon_dot(const Bytes *codes, const int8_t *row, int32_t shift, const Form form) {
    return (Words){dot_of_four(&codes->low, 2, row, shift, form), dot_of_four(&codes->high, 2, row, shift, form)};
}

#define NAMED(name) neon_##name
#define PRODUCT baton_tiles_neon
#define TARGET NARROW
#include "eight.h"
#endif
