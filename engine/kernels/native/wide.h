/* A tile of a product of floats in AVX-512's registers, and e to a power of sixteen floats. */
#pragma once
#include "panels.h"

#define WIDER NARROW ",avx512f,avx512bw,avx512vl,avx512dq"
enum { TILE_ROWS = 12 };

/* sum += x [rows, inputs] times panel [inputs, 32]; `of_row`, `of_input`: from one to the next. In this order for any `rows`. */
INLINE(WIDER) void add_tile(
    __m512 (*sum)[2], const float *x, int64_t of_row, const float *panel, int64_t of_input, int64_t inputs, const int rows
) {
    for (int64_t k = 0; k < inputs; k++) {
        const __m512 first = _mm512_loadu_ps(panel + k * of_input), second = _mm512_loadu_ps(panel + k * of_input + 16);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            const __m512 own = _mm512_set1_ps(x[row * of_row + k]);
            sum[row][0] = _mm512_fmadd_ps(own, first, sum[row][0]);
            sum[row][1] = _mm512_fmadd_ps(own, second, sum[row][1]);
        }
    }
}

/* `work(..., rows)` for tiles of 12 rows, then of 8, 4, 2 and 1: each a loop of its own. */
#define IN_TILES(begin, end, work)                                      \
    do {                                                                \
        int64_t row = (begin);                                          \
        for (; row + 12 <= (end); row += 12) work(12);                  \
        for (; row + 8 <= (end); row += 8) work(8);                     \
        for (; row + 4 <= (end); row += 4) work(4);                     \
        for (; row + 2 <= (end); row += 2) work(2);                     \
        for (; row < (end); row++) work(1);                             \
    } while (0)

/* As `power_of_e`; 0 and infinity beyond. */
INLINE(WIDER) __m512 power_of_e_wide(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), _mm512_min_ps(_mm512_set1_ps(200.0f), x)); /* NaN is the second operand */
    const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.3981999507e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(8.3334519073e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(4.1665795894e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.6666665459e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.0000001201e-1f));
    sum = _mm512_fmadd_ps(sum, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(sum, whole);
}
