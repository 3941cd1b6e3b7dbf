/* Steps between products, on rows of floats: RMSNorm, and the rotation of heads on their way to the pool. */
#include "shared.h"

typedef struct {
    const float *x;      /* [T, K] */
    const float *weight; /* [K] */
    float *out;          /* [T, K] */
    int64_t num_rows, inputs, plus_one, threads;
    double eps;
} Norm;

static __attribute__((target(NARROW))) void norm(const void *job, int64_t begin, int64_t end) {
    const Norm *p = job;
    const Floats one = set8(1.0f);
    for (int64_t row = begin; row < end; row++) {
        const float *x = p->x + row * p->inputs;
        float *out = p->out + row * p->inputs;
        Floats squares[2] = {zero8(), zero8()};
        for (int64_t at = 0; at < p->inputs; at += 8) {
            const Floats some = load8(x + at);
            squares[at / 8 % 2] = fma8(some, some, squares[at / 8 % 2]);
        }
        const float mean = sum_of_eight(add8(squares[0], squares[1])) / (float)p->inputs;
        const Floats inverse = set8(1.0f / root(mean + (float)p->eps));
        for (int64_t at = 0; at < p->inputs; at += 8) {
            Floats weight = load8(p->weight + at);
            if (p->plus_one) weight = add8(one, weight);
            store8(out + at, mul8(mul8(load8(x + at), inverse), weight));
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
                const Floats c = load8(cos + at), s = load8(sin + at);
                const Floats x = load8(first), y = load8(second);
                store8(first, sub8(mul8(x, c), mul8(y, s)));
                store8(second, add8(mul8(y, c), mul8(x, s)));
            }
        if (p->slots[row] < 0) continue;
        const int64_t slot = p->slots[row] / p->block_size * p->of_block + p->slots[row] % p->block_size * p->of_slot;
        for (int64_t at = 0; at < 2 * p->num_kv_heads; at++) {
            const int64_t to = slot + at / p->num_kv_heads * p->of_plane + at % p->num_kv_heads * p->of_head;
            const float *from = heads + (p->num_heads + at) * p->dim;
            if (!p->in_half) memcpy((float *)p->pool + to, from, p->dim * sizeof(float));
            else
                for (int64_t i = 0; i < p->dim; i += 8) {
                    const Floats most = set8(65504.0f), some = min8(most, load8(from + i));
                    const Floats within = max8(sub8(zero8(), most), some); /* NaN stays */
                    to_halves8((uint16_t *)p->pool + to + i, within);
                }
        }
    }
}

void baton_rows_rotate(const Rotation *p) { baton_in_parallel(rotate, p, p->num_rows, 16, p->threads); }
