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

INLINE(NARROW) Floats eight(const char *from, int64_t at, const int in_half) {
    if (in_half) return from_halves8(from + 2 * at);
    return load8((const float *)(from + 4 * at));
}

INLINE(NARROW) void add_values(
    float *sum, const float *weights, const char *const *values, int number, int64_t at, const int vectors, const int in_half
) {
    Floats total[8];
    for (int v = 0; v < vectors; v++) total[v] = load8(sum + at + 8 * v);
    for (int i = 0; i < number; i++) {
        const Floats weight = set8(weights[i]);
        for (int v = 0; v < vectors; v++) total[v] = fma8(weight, eight(values[i], at + 8 * v, in_half), total[v]);
    }
    for (int v = 0; v < vectors; v++) store8(sum + at + 8 * v, total[v]);
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
        for (int64_t at = 0; at < dim; at += 8) store8(sums + g * dim + at, zero8());
    }
    const Floats scale = set8((float)p->scale);
    for (int64_t position = begin; position < length; position += SOME) {
        const int number = length - position < SOME ? (int)(length - position) : SOME;
        const char *keys[SOME], *values[SOME];
        for (int i = 0; i < SOME; i++) { /* behind the last one: that one again */
            const uint32_t place = (uint32_t)position + (i < number ? i : number - 1), block_size = (uint32_t)p->block_size;
            const int64_t block = p->tables[row * p->of_table + place / block_size];
            keys[i] = pool + (block * p->of_block + place % block_size * p->of_slot) * size;
            values[i] = keys[i] + p->of_plane * size;
            for (int64_t at = 0; at < dim * size; at += 64) __builtin_prefetch(values[i] + at);
        }
        for (int i = 0; i < number; i += AT_ONCE)
            for (int g = 0; g < count; g++) {
                Floats products[AT_ONCE];
                for (int j = 0; j < AT_ONCE; j++) products[j] = zero8();
                for (int64_t at = 0; at < dim; at += 8) {
                    const Floats own = load8(q + g * dim + at);
                    for (int j = 0; j < AT_ONCE; j++) products[j] = fma8(own, eight(keys[i + j], at, in_half), products[j]);
                }
                store8(scores[g] + i, mul8(sums_of_eight(products), scale));
            }
        for (int g = 0; g < count; g++) {
            Floats largest = set8(most[g]);
            for (int i = 0; i < number; i += 8) largest = max8(largest, load8(scores[g] + i));
            const float now = largest_of_eight(largest);
            const Floats before = power_of_e(set8(most[g] - now));
            Floats sum = zero8();
            for (int i = 0; i < number; i += 8) {
                const Floats own = only8(power_of_e(sub8(load8(scores[g] + i), set8(now))), number - i);
                store8(scores[g] + i, own);
                sum = add8(sum, own);
            }
            total[g] = total[g] * first8(before) + sum_of_eight(sum);
            most[g] = now;
            for (int64_t at = 0; at < dim; at += 8)
                store8(sums + g * dim + at, mul8(load8(sums + g * dim + at), before));
            int64_t at = 0;
            for (; at + 64 <= dim; at += 64) add_values(sums + g * dim, scores[g], values, number, at, 8, in_half);
            for (; at + 32 <= dim; at += 32) add_values(sums + g * dim, scores[g], values, number, at, 4, in_half);
            for (; at < dim; at += 8) add_values(sums + g * dim, scores[g], values, number, at, 1, in_half);
        }
    }
    for (int g = 0; g < count; g++) {
        const Floats divisor = set8(total[g]);
        float *out = p->out + (row * p->num_heads + first + g) * dim;
        for (int64_t at = 0; at < dim; at += 8) store8(out + at, div8(load8(sums + g * dim + at), divisor));
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
