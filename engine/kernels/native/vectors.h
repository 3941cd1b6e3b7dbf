/* Operations on eight floats, eight whole numbers and 32 bytes, by AVX2 and by NEON, which has them in halves. Each gives the same bits by both. */
#pragma once
#include <stdint.h>
#include <string.h>

#define INLINE(target_) static inline __attribute__((always_inline, target(target_)))

#ifdef __x86_64__
#include <immintrin.h>
#include <x86intrin.h>

#define NARROW "avx2,fma,f16c"
typedef __m256 Floats;
typedef __m256i Words; /* 32 bits each */
typedef __m256i Bytes;

INLINE(NARROW) Floats load8(const float *from) { return _mm256_loadu_ps(from); }
INLINE(NARROW) void store8(float *to, Floats x) { _mm256_storeu_ps(to, x); }
INLINE(NARROW) Floats set8(float x) { return _mm256_set1_ps(x); }
INLINE(NARROW) Floats zero8(void) { return _mm256_setzero_ps(); }
INLINE(NARROW) Floats add8(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE(NARROW) Floats sub8(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
INLINE(NARROW) Floats mul8(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE(NARROW) Floats div8(Floats a, Floats b) { return _mm256_div_ps(a, b); }
INLINE(NARROW) Floats neg8(Floats x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }
INLINE(NARROW) Floats fma8(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }   /* a b + c */
INLINE(NARROW) Floats fnma8(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); } /* c - a b */
INLINE(NARROW) Floats max8(Floats a, Floats b) { return _mm256_max_ps(a, b); } /* b where one is NaN, or both are zeros */
INLINE(NARROW) Floats min8(Floats a, Floats b) { return _mm256_min_ps(a, b); } /* likewise */
INLINE(NARROW) float first8(Floats x) { return _mm256_cvtss_f32(x); }

INLINE(NARROW) Floats round8(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* x times 2 to the power of whole numbers, where both and the result are normal. */
INLINE(NARROW) Floats times_power8(Floats x, Floats whole) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23)));
}

/* The first `number` floats, then zeros. */
INLINE(NARROW) Floats only8(Floats x, int number) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(number), lanes)));
}

INLINE(NARROW) Floats from_halves8(const void *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
INLINE(NARROW) void to_halves8(void *to, Floats x) { _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
INLINE(NARROW) float from_half(uint16_t half) { return _cvtsh_ss(half); }

INLINE(NARROW) Floats from_bfloats8(const void *from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
}

INLINE(NARROW) float sum_of_eight(Floats x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

INLINE(NARROW) float largest_of_eight(Floats x) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

/* Sums of eight vectors, side by side. */
INLINE(NARROW) Floats sums_of_eight(const Floats *x) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

INLINE(NARROW) float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

INLINE(NARROW) Words zero_words(void) { return _mm256_setzero_si256(); }
INLINE(NARROW) Words add_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
INLINE(NARROW) Words to_words(Floats x) { return _mm256_cvtps_epi32(x); } /* to the nearest one, NaN to the least one */
INLINE(NARROW) Floats from_words(Words x) { return _mm256_cvtepi32_ps(x); }

INLINE(NARROW) int sum_of_words(Words x) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

/* The larger sizes: these are in the order of their bits, and NaN is the largest. */
INLINE(NARROW) Words max_sizes(Words most, Floats x) {
    return _mm256_max_epi32(most, _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x)));
}

INLINE(NARROW) float largest_size(Words sizes) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1))));
}

/* 32 whole numbers as bytes, in their order. */
INLINE(NARROW) void store_as_bytes(int8_t *to, const Words *x) {
    const __m256i first = _mm256_packs_epi32(x[0], x[1]), second = _mm256_packs_epi32(x[2], x[3]);
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), in_order));
}

INLINE(NARROW) Bytes load_bytes(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE(NARROW) Bytes low_bits(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE(NARROW) Bytes high_bits(Bytes x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
INLINE(NARROW) Bytes or_bytes(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }

/* The bits of `mask` in each byte, once it is moved up by so many places, or down by as many below 0. */
INLINE(NARROW) Bytes moved_bits(Bytes x, const int up, const int mask) {
    x = up < 0 ? _mm256_srli_epi16(x, up < 0 ? -up : 0) : _mm256_slli_epi16(x, up < 0 ? 0 : up);
    return _mm256_and_si256(x, _mm256_set1_epi8((char)mask));
}

/* One of 16 bytes for each code. */
INLINE(NARROW) Bytes looked_up(Bytes codes, const int8_t *levels) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)levels)), codes);
}

static inline void relax(void) { _mm_pause(); }
static inline uint64_t ticks(void) { return __rdtsc(); }
static inline uint64_t ticks_of_40_us(void) { return 100000; } /* a clock counts 2.5 GHz or so */

#else
#include <arm_neon.h>

#if defined(__clang__) && __clang_major__ < 16
#define NARROW "neon"
#else
#define NARROW "+simd"
#endif
typedef struct { float32x4_t low, high; } Floats;
typedef struct { int32x4_t low, high; } Words;
typedef struct { int8x16_t low, high; } Bytes;

INLINE(NARROW) Floats load8(const float *from) { return (Floats){vld1q_f32(from), vld1q_f32(from + 4)}; }
INLINE(NARROW) void store8(float *to, Floats x) { vst1q_f32(to, x.low), vst1q_f32(to + 4, x.high); }
INLINE(NARROW) Floats set8(float x) { return (Floats){vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE(NARROW) Floats zero8(void) { return set8(0.0f); }
INLINE(NARROW) Floats add8(Floats a, Floats b) { return (Floats){vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
INLINE(NARROW) Floats sub8(Floats a, Floats b) { return (Floats){vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
INLINE(NARROW) Floats mul8(Floats a, Floats b) { return (Floats){vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
INLINE(NARROW) Floats div8(Floats a, Floats b) { return (Floats){vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
INLINE(NARROW) Floats neg8(Floats x) { return (Floats){vnegq_f32(x.low), vnegq_f32(x.high)}; }
INLINE(NARROW) Floats fma8(Floats a, Floats b, Floats c) { return (Floats){vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
INLINE(NARROW) Floats fnma8(Floats a, Floats b, Floats c) { return (Floats){vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)}; }
INLINE(NARROW) float32x4_t larger_of(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE(NARROW) float32x4_t smaller_of(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE(NARROW) Floats max8(Floats a, Floats b) { return (Floats){larger_of(a.low, b.low), larger_of(a.high, b.high)}; }
INLINE(NARROW) Floats min8(Floats a, Floats b) { return (Floats){smaller_of(a.low, b.low), smaller_of(a.high, b.high)}; }
INLINE(NARROW) float first8(Floats x) { return vgetq_lane_f32(x.low, 0); }
INLINE(NARROW) Floats round8(Floats x) { return (Floats){vrndnq_f32(x.low), vrndnq_f32(x.high)}; }

INLINE(NARROW) float32x4_t times_power_of_four(float32x4_t x, float32x4_t whole) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vcvtnq_s32_f32(whole), 23)));
}
INLINE(NARROW) Floats times_power8(Floats x, Floats whole) {
    return (Floats){times_power_of_four(x.low, whole.low), times_power_of_four(x.high, whole.high)};
}

INLINE(NARROW) float32x4_t only_four(float32x4_t x, int32x4_t lanes, int number) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vcgtq_s32(vdupq_n_s32(number), lanes)));
}
INLINE(NARROW) Floats only8(Floats x, int number) {
    const int32_t lanes[] = {0, 1, 2, 3, 4, 5, 6, 7};
    return (Floats){only_four(x.low, vld1q_s32(lanes), number), only_four(x.high, vld1q_s32(lanes + 4), number)};
}

INLINE(NARROW) Floats from_halves8(const void *from) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16((const uint16_t *)from));
    return (Floats){vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
INLINE(NARROW) void to_halves8(void *to, Floats x) {
    vst1q_u16((uint16_t *)to, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high)));
}
INLINE(NARROW) float from_half(uint16_t half) {
    __fp16 same;
    memcpy(&same, &half, sizeof same);
    return same;
}
INLINE(NARROW) Floats from_bfloats8(const void *from) {
    const uint16x8_t some = vld1q_u16((const uint16_t *)from);
    const uint32x4_t low = vshll_n_u16(vget_low_u16(some), 16), high = vshll_high_n_u16(some, 16);
    return (Floats){vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high)};
}

INLINE(NARROW) float sum_of_eight(Floats x) {
    const float32x4_t four = vaddq_f32(x.low, x.high);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
INLINE(NARROW) float largest_of_eight(Floats x) {
    float four[4];
    vst1q_f32(four, larger_of(x.low, x.high));
    const float first = four[0] > four[2] ? four[0] : four[2], second = four[1] > four[3] ? four[1] : four[3];
    return first > second ? first : second;
}
INLINE(NARROW) Floats sums_of_eight(const Floats *x) {
#define SUMS(half, i) vpaddq_f32(vpaddq_f32(x[i].half, x[i + 1].half), vpaddq_f32(x[i + 2].half, x[i + 3].half))
    return (Floats){vaddq_f32(SUMS(low, 0), SUMS(high, 0)), vaddq_f32(SUMS(low, 4), SUMS(high, 4))};
}
INLINE(NARROW) float root(float x) { return vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0); }

INLINE(NARROW) Words zero_words(void) { return (Words){vdupq_n_s32(0), vdupq_n_s32(0)}; }
INLINE(NARROW) Words add_words(Words a, Words b) { return (Words){vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
INLINE(NARROW) int32x4_t to_four_words(float32x4_t x) { return vbslq_s32(vceqq_f32(x, x), vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN)); }
INLINE(NARROW) Words to_words(Floats x) { return (Words){to_four_words(x.low), to_four_words(x.high)}; }
INLINE(NARROW) Floats from_words(Words x) { return (Floats){vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
INLINE(NARROW) int sum_of_words(Words x) { return vaddvq_s32(vaddq_s32(x.low, x.high)); }

INLINE(NARROW) int32x4_t size_of_four(float32x4_t x) { return vreinterpretq_s32_f32(vabsq_f32(x)); }
INLINE(NARROW) Words max_sizes(Words most, Floats x) {
    return (Words){vmaxq_s32(most.low, size_of_four(x.low)), vmaxq_s32(most.high, size_of_four(x.high))};
}
INLINE(NARROW) float largest_size(Words sizes) {
    const int32_t most = vmaxvq_s32(vmaxq_s32(sizes.low, sizes.high));
    float same;
    memcpy(&same, &most, sizeof same);
    return same;
}

INLINE(NARROW) int8x8_t as_eight_bytes(Words x) { return vqmovn_s16(vcombine_s16(vqmovn_s32(x.low), vqmovn_s32(x.high))); }
INLINE(NARROW) void store_as_bytes(int8_t *to, const Words *x) {
    for (int at = 0; at < 4; at++) vst1_s8(to + 8 * at, as_eight_bytes(x[at]));
}

INLINE(NARROW) Bytes load_bytes(const uint8_t *from) { return (Bytes){vld1q_s8((const int8_t *)from), vld1q_s8((const int8_t *)from + 16)}; }
INLINE(NARROW) Bytes low_bits(Bytes x) { return (Bytes){vandq_s8(x.low, vdupq_n_s8(15)), vandq_s8(x.high, vdupq_n_s8(15))}; }
INLINE(NARROW) int8x16_t high_bits_of_half(int8x16_t x) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x), 4)); }
INLINE(NARROW) Bytes high_bits(Bytes x) { return (Bytes){high_bits_of_half(x.low), high_bits_of_half(x.high)}; }
INLINE(NARROW) Bytes or_bytes(Bytes a, Bytes b) { return (Bytes){vorrq_s8(a.low, b.low), vorrq_s8(a.high, b.high)}; }

INLINE(NARROW) int8x16_t moved_bits_of_half(int8x16_t x, const int up, const int mask) {
    const uint8x16_t moved = vshlq_u8(vreinterpretq_u8_s8(x), vdupq_n_s8((int8_t)up)); /* down where `up` is negative */
    return vreinterpretq_s8_u8(vandq_u8(moved, vdupq_n_u8((uint8_t)mask)));
}
INLINE(NARROW) Bytes moved_bits(Bytes x, const int up, const int mask) {
    return (Bytes){moved_bits_of_half(x.low, up, mask), moved_bits_of_half(x.high, up, mask)};
}

INLINE(NARROW) Bytes looked_up(Bytes codes, const int8_t *levels) {
    const int8x16_t table = vld1q_s8(levels);
    return (Bytes){vqtbl1q_s8(table, vreinterpretq_u8_s8(codes.low)), vqtbl1q_s8(table, vreinterpretq_u8_s8(codes.high))};
}

static inline void relax(void) { __asm__ volatile("yield"); }
static inline uint64_t ticks(void) {
    uint64_t now;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(now));
    return now;
}
static inline uint64_t ticks_of_40_us(void) {
    uint64_t in_a_second;
    __asm__ volatile("mrs %0, cntfrq_el0" : "=r"(in_a_second));
    return in_a_second / 25000;
}
#endif
