/* What the kernels share: threads, and functions of eight floats at a time that every processor computes alike. */
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define NARROW "avx2,fma,f16c"
#define INLINE(target_) static inline __attribute__((always_inline, target(target_)))

/* `work(job, begin, end)` over runs of `chunk` until `end`, by so many threads. */
typedef void (*Work)(const void *job, int64_t begin, int64_t end);
void baton_in_parallel(Work work, const void *job, int64_t end, int64_t chunk, int64_t threads);

INLINE(NARROW) float sum_of_eight(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

INLINE(NARROW) float largest_of_eight(__m256 x) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

/* e to the power of x, within 2 units in the last place between 2^-126 and 2^127, beyond them one of these; NaN stays. */
INLINE(NARROW) __m256 power_of_e(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(-87.3f), _mm256_min_ps(_mm256_set1_ps(88.0f), x)); /* NaN is the second operand */
    const __m256 whole = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 rest = _mm256_fnmadd_ps(whole, _mm256_set1_ps(0.693359375f), x);
    rest = _mm256_fnmadd_ps(whole, _mm256_set1_ps(-2.12194440e-4f), rest);
    __m256 sum = _mm256_set1_ps(1.9875691500e-4f);
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(1.3981999507e-3f));
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(8.3334519073e-3f));
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(4.1665795894e-2f));
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(1.6666665459e-1f));
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(5.0000001201e-1f));
    sum = _mm256_fmadd_ps(sum, _mm256_mul_ps(rest, rest), _mm256_add_ps(rest, _mm256_set1_ps(1.0f)));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), exponent));
}
