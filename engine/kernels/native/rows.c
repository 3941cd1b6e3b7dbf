/* Steps between products, on rows of floats: RMSNorm, and the rotation of heads on their way to the pool. */
#include "shared.h"
#include <string.h>

typedef struct {
    const float *x;      /* [T, K] */
    const float *weight; /* [K] */
    float *out;          /* [T, K] */
    int64_t num_rows, inputs, plus_one, threads;
    double eps;
} Norm;

static __attribute__((target(NARROW))) void norm(const void *job, int64_t begin, int64_t end) {
    const Norm *p = job;
    const __m256 one = _mm256_set1_ps(1.0f);
    for (int64_t row = begin; row < end; row++) {
        const float *x = p->x + row * p->inputs;
        float *out = p->out + row * p->inputs;
        __m256 squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (int64_t at = 0; at < p->inputs; at += 8) {
            const __m256 some = _mm256_loadu_ps(x + at);
            squares[at / 8 % 2] = _mm256_fmadd_ps(some, some, squares[at / 8 % 2]);
        }
        const float mean = sum_of_eight(_mm256_add_ps(squares[0], squares[1])) / (float)p->inputs;
        const __m256 inverse = _mm256_set1_ps(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + (float)p->eps))));
        for (int64_t at = 0; at < p->inputs; at += 8) {
            __m256 weight = _mm256_loadu_ps(p->weight + at);
            if (p->plus_one) weight = _mm256_add_ps(one, weight);
            _mm256_storeu_ps(out + at, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + at), inverse), weight));
        }
    }
}

void baton_rows_norm(const Norm *p) { baton_in_parallel(norm, p, p->num_rows, 16, p->threads); }

typedef struct {
    float *heads;             /* [T, stride]: queries, keys and values side by side; queries and keys are rotated in place */
    const int32_t *positions; /* [T] */
    const int32_t *slots;     /* [T]; negative: not written */
    const float *angles;      /* [positions, D]: cos | sin */
    void *pool;               /* blocks of keys and values in float32, or float16, with the distances below */
    int64_t num_rows, stride, num_heads, num_kv_heads, dim, block_size, of_block, of_plane, of_slot, of_head, in_half, threads;
} Rotation;

static __attribute__((target(NARROW))) void rotate(const void *job, int64_t begin, int64_t end) {
    const Rotation *p = job;
    const int64_t half = p->dim / 2, rotated = p->num_heads + p->num_kv_heads;
    for (int64_t row = begin; row < end; row++) {
        float *heads = p->heads + row * p->stride;
        const float *cos = p->angles + p->positions[row] * p->dim, *sin = cos + half;
        for (int64_t head = 0; head < rotated; head++)
            for (int64_t at = 0; at < half; at += 8) {
                float *first = heads + head * p->dim + at, *second = first + half;
                const __m256 c = _mm256_loadu_ps(cos + at), s = _mm256_loadu_ps(sin + at);
                const __m256 x = _mm256_loadu_ps(first), y = _mm256_loadu_ps(second);
                _mm256_storeu_ps(first, _mm256_sub_ps(_mm256_mul_ps(x, c), _mm256_mul_ps(y, s)));
                _mm256_storeu_ps(second, _mm256_add_ps(_mm256_mul_ps(y, c), _mm256_mul_ps(x, s)));
            }
        if (p->slots[row] < 0) continue;
        const int64_t slot = p->slots[row] / p->block_size * p->of_block + p->slots[row] % p->block_size * p->of_slot;
        for (int64_t at = 0; at < 2 * p->num_kv_heads; at++) {
            const int64_t to = slot + at / p->num_kv_heads * p->of_plane + at % p->num_kv_heads * p->of_head;
            const float *from = heads + (p->num_heads + at) * p->dim;
            if (!p->in_half) memcpy((float *)p->pool + to, from, p->dim * sizeof(float));
            else
                for (int64_t i = 0; i < p->dim; i += 8) {
                    const __m256 most = _mm256_set1_ps(65504.0f), some = _mm256_min_ps(most, _mm256_loadu_ps(from + i));
                    const __m256 within = _mm256_max_ps(_mm256_sub_ps(_mm256_setzero_ps(), most), some); /* NaN stays */
                    _mm_storeu_si128((__m128i *)((uint16_t *)p->pool + to + i), _mm256_cvtps_ph(within, _MM_FROUND_TO_NEAREST_INT));
                }
        }
    }
}

void baton_rows_rotate(const Rotation *p) { baton_in_parallel(rotate, p, p->num_rows, 16, p->threads); }
