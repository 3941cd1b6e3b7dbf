/* Products of codes by instructions that add four products of bytes to a sum, 8 outputs at a time. */
#include "product.h"

#ifdef __x86_64__
/* AVX-VNNI has AVX512-VNNI's instruction for 32 bytes, in another encoding: all but the name of it is the same here. */
#define DOT_OF_BYTES(multiplied)                                                                                            \
    INLINE(TARGET) __m256i NAMED(codes_of)(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8((char)128)); }  \
    INLINE(TARGET) __m256i NAMED(dot)(const __m256i *codes, const int8_t *row, int32_t shift, const Form form) {            \
        __m256i sum = form.has_shifts ? _mm256_set1_epi32(shift) : _mm256_setzero_si256();                                  \
        for (int at = 0; at < form.group / 4; at++)                                                                         \
            sum = multiplied(sum, codes[at], _mm256_set1_epi32(four(row + 4 * at)));                                        \
        return sum;                                                                                                         \
    }

#define NAMED(name) evex_##name
#define PRODUCT baton_tiles_evex
#define TARGET WIDE
DOT_OF_BYTES(_mm256_dpbusd_epi32)
#include "eight.h"

#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define NAMED(name) vex_##name
#define PRODUCT baton_tiles_vex
#define TARGET NARROW ",avxvnni"
DOT_OF_BYTES(_mm256_dpbusd_avx_epi32)
#include "eight.h"
#else
void baton_tiles_vex(const void *job, int64_t begin, int64_t end) { baton_tiles_avx2(job, begin, end); }
#endif
#else
#if (defined(__clang__) && __clang_major__ >= 16) || (!defined(__clang__) && __GNUC__ >= 8)
#define DOTTED "arch=armv8.2-a+dotprod"

INLINE(DOTTED) Bytes dotted_codes_of(Bytes bytes) { return bytes; }

INLINE(DOTTED) Words dotted_dot(const Bytes *codes, const int8_t *row, int32_t shift, const Form form) {
    const int32x4_t begin = vdupq_n_s32(is_signed(form) ? 0 : shift);
    Words sum = {begin, begin};
    for (int at = 0; at < form.group / 4; at++) {
        const int8x16_t some = four_times(row + 4 * at);
        sum.low = vdotq_s32(sum.low, codes[at].low, some);
        sum.high = vdotq_s32(sum.high, codes[at].high, some);
    }
    return sum;
}

#define NAMED(name) dotted_##name
#define PRODUCT baton_tiles_dotted
#define TARGET DOTTED
#include "eight.h"
#else
void baton_tiles_dotted(const void *job, int64_t begin, int64_t end) { baton_tiles_neon(job, begin, end); }
#endif
#endif
