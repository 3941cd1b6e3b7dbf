/* Attention of one query of each sequence to its context in a paged pool. Hq query heads, Hkv key and value heads, D head size.

   A piece of work is one sequence's queries of a key head. Positions are taken from the first on, SOME at a time, so a row depends
   neither on its batch nor on the number of threads. */
#include "shared.h"
#include <math.h>

enum { SOME = 64, AT_ONCE = 8, MOST_QUERIES = 16, MOST_DIM = 256 };

typedef struct {
    const float *q;         /* [T, stride]: heads side by side */
    const void *pool;       /* blocks of keys and values in float32, or float16, with the distances below */
    const int32_t *tables;  /* [T, of_table]: blocks of each sequence */
    const int32_t *lengths; /* [T]: positions */
    const float *sinks;     /* [Hq], or NULL */
    float *out;             /* [T, Hq, D] */
    int64_t num_rows, stride, num_heads, num_kv_heads, dim, block_size, of_table, of_block, of_plane, of_slot, of_head;
    int64_t window;         /* positions attended to; negative: those of the own chunk of so many; 0: all */
    int64_t in_half;        /* float16 */
    int64_t threads;
    double scale;
} Attention;

/* Sums of eight vectors, side by side. */
INLINE(NARROW) __m256 sums_of(const __m256 *x) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

INLINE(NARROW) __m256 eight(const char *from, int64_t at, const int in_half) {
    if (in_half) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * at)));
    return _mm256_loadu_ps((const float *)(from + 4 * at));
}

INLINE(NARROW) void add_values(
    float *sum, const float *weights, const char *const *values, int number, int64_t at, const int vectors, const int in_half
) {
    __m256 total[8];
    for (int v = 0; v < vectors; v++) total[v] = _mm256_loadu_ps(sum + at + 8 * v);
    for (int i = 0; i < number; i++) {
        const __m256 weight = _mm256_set1_ps(weights[i]);
        for (int v = 0; v < vectors; v++) total[v] = _mm256_fmadd_ps(weight, eight(values[i], at + 8 * v, in_half), total[v]);
    }
    for (int v = 0; v < vectors; v++) _mm256_storeu_ps(sum + at + 8 * v, total[v]);
}

INLINE(NARROW) void attend_some(const Attention *p, int64_t row, int64_t kv_head, int64_t first, const int count, const int in_half) {
    const int64_t length = p->lengths[row], last = length - 1, dim = p->dim;
    int64_t begin = 0;
    if (p->window > 0 && length > p->window) begin = length - p->window;
    if (p->window < 0) begin = last - last % -p->window;
    const float *q = p->q + row * p->stride + first * dim;
    const int size = in_half ? 2 : 4;
    const char *pool = (const char *)p->pool + kv_head * p->of_head * size;
    float sums[MOST_QUERIES * MOST_DIM], scores[MOST_QUERIES][SOME], most[MOST_QUERIES], total[MOST_QUERIES];
    for (int g = 0; g < count; g++) {
        most[g] = p->sinks ? p->sinks[first + g] : -INFINITY;
        total[g] = p->sinks ? 1.0f : 0.0f;
        for (int64_t at = 0; at < dim; at += 8) _mm256_storeu_ps(sums + g * dim + at, _mm256_setzero_ps());
    }
    const __m256 scale = _mm256_set1_ps((float)p->scale);
    for (int64_t position = begin; position < length; position += SOME) {
        const int number = length - position < SOME ? (int)(length - position) : SOME;
        const char *keys[SOME], *values[SOME];
        for (int i = 0; i < SOME; i++) { /* behind the last one: that one again */
            const uint32_t place = (uint32_t)position + (i < number ? i : number - 1), block_size = (uint32_t)p->block_size;
            const int64_t block = p->tables[row * p->of_table + place / block_size];
            keys[i] = pool + (block * p->of_block + place % block_size * p->of_slot) * size;
            values[i] = keys[i] + p->of_plane * size;
            for (int64_t at = 0; at < dim * size; at += 64) _mm_prefetch(values[i] + at, _MM_HINT_T0);
        }
        for (int i = 0; i < number; i += AT_ONCE)
            for (int g = 0; g < count; g++) {
                __m256 products[AT_ONCE];
                for (int j = 0; j < AT_ONCE; j++) products[j] = _mm256_setzero_ps();
                for (int64_t at = 0; at < dim; at += 8) {
                    const __m256 own = _mm256_loadu_ps(q + g * dim + at);
                    for (int j = 0; j < AT_ONCE; j++) products[j] = _mm256_fmadd_ps(own, eight(keys[i + j], at, in_half), products[j]);
                }
                _mm256_storeu_ps(scores[g] + i, _mm256_mul_ps(sums_of(products), scale));
            }
        for (int g = 0; g < count; g++) {
            __m256 largest = _mm256_set1_ps(most[g]);
            for (int i = 0; i < number; i += 8) largest = _mm256_max_ps(largest, _mm256_loadu_ps(scores[g] + i));
            const float now = largest_of_eight(largest);
            const __m256 before = power_of_e(_mm256_set1_ps(most[g] - now));
            __m256 sum = _mm256_setzero_ps();
            for (int i = 0; i < number; i += 8) {
                const __m256 power = power_of_e(_mm256_sub_ps(_mm256_loadu_ps(scores[g] + i), _mm256_set1_ps(now)));
                const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                const __m256i is_one = _mm256_cmpgt_epi32(_mm256_set1_epi32(number - i), lanes);
                const __m256 own = _mm256_and_ps(power, _mm256_castsi256_ps(is_one));
                _mm256_storeu_ps(scores[g] + i, own);
                sum = _mm256_add_ps(sum, own);
            }
            total[g] = total[g] * _mm256_cvtss_f32(before) + sum_of_eight(sum);
            most[g] = now;
            for (int64_t at = 0; at < dim; at += 8)
                _mm256_storeu_ps(sums + g * dim + at, _mm256_mul_ps(_mm256_loadu_ps(sums + g * dim + at), before));
            int64_t at = 0;
            for (; at + 64 <= dim; at += 64) add_values(sums + g * dim, scores[g], values, number, at, 8, in_half);
            for (; at + 32 <= dim; at += 32) add_values(sums + g * dim, scores[g], values, number, at, 4, in_half);
            for (; at < dim; at += 8) add_values(sums + g * dim, scores[g], values, number, at, 1, in_half);
        }
    }
    for (int g = 0; g < count; g++) {
        const __m256 divisor = _mm256_set1_ps(total[g]);
        float *out = p->out + (row * p->num_heads + first + g) * dim;
        for (int64_t at = 0; at < dim; at += 8) _mm256_storeu_ps(out + at, _mm256_div_ps(_mm256_loadu_ps(sums + g * dim + at), divisor));
    }
}

static __attribute__((target(NARROW))) void attend(const void *job, int64_t begin, int64_t end) {
    const Attention *p = job;
    const int64_t shared = p->num_heads / p->num_kv_heads;
    for (int64_t piece = begin; piece < end; piece++)
        for (int64_t done = 0; done < shared; done += MOST_QUERIES) {
            const int64_t kv_head = piece % p->num_kv_heads, left = shared - done;
            const int count = (int)(left < MOST_QUERIES ? left : MOST_QUERIES);
            if (p->in_half) attend_some(p, piece / p->num_kv_heads, kv_head, kv_head * shared + done, count, 1);
            else attend_some(p, piece / p->num_kv_heads, kv_head, kv_head * shared + done, count, 0);
        }
}

void baton_attend(const Attention *p) { baton_in_parallel(attend, p, p->num_rows * p->num_kv_heads, 1, p->threads); }
