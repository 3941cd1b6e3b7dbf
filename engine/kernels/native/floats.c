/* Products of rows of floats with packed matrices, with what follows them: a bias, an activation, a gate, a sum; LayerNorm. AVX-512.

   A panel is 32 outputs [K, 32], the last one of a matrix with zeros behind them. Of a gated product it has 16 outputs of the gate,
   and beside them those of up. A row's sums are taken input by input: it depends neither on its batch nor on the number of threads. */
#include "wide.h"

enum { ROWS_AT_ONCE = 96, PANELS_AT_ONCE = 4 };
enum { NONE, GELU, GELU_TANH, SILU, RELU, TANH };

typedef struct {
    const float *x;      /* [T, of_row], K of each */
    const float *panels; /* [panels, K, 32] */
    const float *bias;   /* [panels, 32], or NULL */
    const float *added;  /* [T, N], or NULL */
    float *out;          /* [T, N] */
    int64_t num_rows, inputs, outputs, of_row, activation, is_gated, threads;
} Product;

/* 1 / (1 + e^-x) */
INLINE(WIDER) __m512 sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, power_of_e_wide(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

/* The error function, within 3e-7 (Abramowitz and Stegun, 7.1.26). */
INLINE(WIDER) __m512 error_function(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), size = _mm512_abs_ps(x);
    const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(size, _mm512_set1_ps(0.3275911f), one));
    __m512 sum = _mm512_set1_ps(1.061405429f);
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(-1.453152027f));
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(1.421413741f));
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(-0.284496736f));
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(0.254829592f));
    const __m512 power = power_of_e_wide(_mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), size), size));
    const __m512 found = _mm512_fnmadd_ps(_mm512_mul_ps(sum, t), power, one);
    return _mm512_mask_sub_ps(found, _mm512_movepi32_mask(_mm512_castps_si512(x)), _mm512_setzero_ps(), found);
}

INLINE(WIDER) __m512 activated(__m512 x, int64_t activation) {
    const __m512 half = _mm512_set1_ps(0.5f), one = _mm512_set1_ps(1.0f);
    switch (activation) {
    case GELU:
        return _mm512_mul_ps(_mm512_mul_ps(half, x), _mm512_add_ps(one, error_function(_mm512_mul_ps(x, _mm512_set1_ps(0.70710678f)))));
    case GELU_TANH: {
        const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), one);
        return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.59576912f))));
    }
    case SILU: return _mm512_mul_ps(x, sigmoid(x));
    case RELU: return _mm512_max_ps(_mm512_setzero_ps(), x); /* NaN is the second operand */
    case TANH: return _mm512_fmsub_ps(_mm512_set1_ps(2.0f), sigmoid(_mm512_add_ps(x, x)), one);
    }
    return x;
}

INLINE(WIDER) __mmask16 lanes(int64_t number) { return number >= 16 ? 0xffff : number <= 0 ? 0 : (__mmask16)((1u << number) - 1); }

INLINE(WIDER) void put(const Product *p, int64_t row, int64_t column, __m512 some) {
    const __mmask16 own = lanes(p->outputs - column);
    float *out = p->out + row * p->outputs + column;
    if (p->added) some = _mm512_add_ps(some, _mm512_maskz_loadu_ps(own, p->added + row * p->outputs + column));
    _mm512_mask_storeu_ps(out, own, some);
}

INLINE(WIDER) void multiply_tile(const Product *p, int64_t row, int64_t panel, const int rows) {
    __m512 sum[TILE_ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++)
            sum[i][half] = p->bias ? _mm512_loadu_ps(p->bias + panel * TILE_COLUMNS + 16 * half) : _mm512_setzero_ps();
    add_tile(sum, p->x + row * p->of_row, p->of_row, p->panels + panel * p->inputs * TILE_COLUMNS, TILE_COLUMNS, p->inputs, rows);
    float found[TILE_ROWS][TILE_COLUMNS];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(found[i] + 16 * half, sum[i][half]);
    for (int i = 0; i < rows; i++) {
        const __m512 first = activated(_mm512_loadu_ps(found[i]), p->activation), second = _mm512_loadu_ps(found[i] + 16);
        if (p->is_gated) put(p, row + i, panel * 16, _mm512_mul_ps(first, second));
        else {
            put(p, row + i, panel * TILE_COLUMNS, first);
            put(p, row + i, panel * TILE_COLUMNS + 16, activated(second, p->activation));
        }
    }
}

static int64_t panels_of(const Product *p) { return (p->outputs * (1 + p->is_gated) + TILE_COLUMNS - 1) / TILE_COLUMNS; }

static int64_t runs_of(const Product *p) { return (panels_of(p) + PANELS_AT_ONCE - 1) / PANELS_AT_ONCE; }

static __attribute__((target(WIDER))) void multiply(const void *job, int64_t begin, int64_t end) {
    const Product *p = job;
    const int64_t panels = panels_of(p), runs = runs_of(p);
    for (int64_t piece = begin; piece < end; piece++) {
        const int64_t first_row = piece / runs * ROWS_AT_ONCE, first = piece % runs * PANELS_AT_ONCE;
        const int64_t last_row = first_row + ROWS_AT_ONCE < p->num_rows ? first_row + ROWS_AT_ONCE : p->num_rows;
        for (int64_t panel = first; panel < panels && panel < first + PANELS_AT_ONCE; panel++) {
#define MULTIPLY(rows) multiply_tile(p, row, panel, rows)
            IN_TILES(first_row, last_row, MULTIPLY);
        }
    }
}

void baton_floats_product(const Product *p) {
    const int64_t blocks = (p->num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    baton_in_parallel(multiply, p, blocks * runs_of(p), 1, p->threads);
}

typedef struct {
    const float *x;      /* [T, K] */
    const float *weight; /* [K] */
    const float *bias;   /* [K], or NULL */
    float *out;          /* [T, K]; may be x */
    int64_t num_rows, inputs, threads;
    double eps;
} Norm;

static __attribute__((target(WIDER))) void norm(const void *job, int64_t begin, int64_t end) {
    const Norm *p = job;
    for (int64_t row = begin; row < end; row++) {
        const float *x = p->x + row * p->inputs;
        float *out = p->out + row * p->inputs;
        __m512 total = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
        for (int64_t at = 0; at < p->inputs; at += 16) total = _mm512_add_ps(total, _mm512_maskz_loadu_ps(lanes(p->inputs - at), x + at));
        const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(total) / (float)p->inputs);
        for (int64_t at = 0; at < p->inputs; at += 16) {
            const __mmask16 own = lanes(p->inputs - at);
            const __m512 some = _mm512_maskz_sub_ps(own, _mm512_maskz_loadu_ps(own, x + at), mean);
            squares = _mm512_fmadd_ps(some, some, squares);
        }
        const float variance = _mm512_reduce_add_ps(squares) / (float)p->inputs;
        const __m512 inverse = _mm512_set1_ps(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(variance + (float)p->eps))));
        for (int64_t at = 0; at < p->inputs; at += 16) {
            const __mmask16 own = lanes(p->inputs - at);
            const __m512 some = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(own, x + at), mean), inverse);
            const __m512 bias = p->bias ? _mm512_maskz_loadu_ps(own, p->bias + at) : _mm512_setzero_ps();
            _mm512_mask_storeu_ps(out + at, own, _mm512_fmadd_ps(some, _mm512_maskz_loadu_ps(own, p->weight + at), bias));
        }
    }
}

void baton_floats_norm(const Norm *p) { baton_in_parallel(norm, p, p->num_rows, 32, p->threads); }
