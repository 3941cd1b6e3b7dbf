/* Products of rows with matrices of 4 or 8 bits in groups of inputs.

   Rows are quantised to 8 bits in groups of 32. With x = step * row and w = scale * code + minimum, a group adds

       step * scale * sum(code * row) + minimum * step * sum(row).

   A tile is 8 outputs. Its block has the codes of a group of 16 or 32 inputs (`engine/kernels/quantised/tiles.py` packs it), 8
   scales in float16, and 8 minimums in float16 if there are any. Byte 4 r + i of vector v of 32 bytes belongs to output r:

       4 bits: input 4 v + i in the low half, 4 v + i + group / 2 in the high one, unsigned
       8 bits: input 4 v + i, signed

   Sums of products of codes are whole numbers, and floats are added group by group, in every variant alike. So a row depends
   neither on its batch, nor on the number of threads, nor on the processor. */
#include "shared.h"
#include "tile.h"

enum { ROWS_AT_ONCE = 64 };           /* their codes stay in a core's cache while tiles pass */
enum { SILU = 1, GELU = 2 };          /* a gate's activation; GELU by tanh */
static const float SMALLEST = 1e-30f; /* a group of smaller inputs is zero */

typedef struct {
    const float *x;        /* [T, K] */
    const uint8_t *blocks; /* [N / TILE, K / group, bytes of a block] */
    const float *bias;     /* [N], or NULL */
    float *out;            /* [T, stride]: N of them are written, or added to */
    float *gated;          /* [T, N / 2]: act(first half) * second half of them, if there is a gate */
    int8_t *rows;          /* [T, K] */
    float *steps;          /* [T, K / GROUP] */
    float *sums;           /* [T, K / group]: step * sum(row) */
    int32_t *shifts;       /* [T, K / group]: -128 * sum(row) */
    int64_t num_rows, inputs, outputs, stride, bits, group, middle, has_minimums, variant, threads, gate, adds;
} Product;

INLINE(NARROW) int32_t four(const int8_t *row) {
    int32_t bytes;
    memcpy(&bytes, row, 4);
    return bytes;
}

INLINE(NARROW) int64_t bytes_of_block(const Product *p, int bits, int group) {
    return TILE * group * bits / 8 + 2 * TILE * (1 + p->has_minimums);
}

#ifdef __x86_64__
#include "tiles_x86.h"
#else
#include "tiles_arm.h"
#endif

/* -- rows ---------------------------------------------------------------------------------------------------------- */

static __attribute__((target(NARROW))) void quantise(const void *job, int64_t begin, int64_t end) {
    const Product *p = job;
    const int64_t num_groups = p->inputs / GROUP, parts = GROUP / p->group;
    for (int64_t at = begin * num_groups; at < end * num_groups; at++) {
        Floats some[4];
        Words words[4], most = zero_words();
        for (int i = 0; i < 4; i++) {
            some[i] = load8(p->x + at * GROUP + 8 * i);
            most = max_sizes(most, some[i]);
        }
        const float size = largest_size(most);
        const float step = size < SMALLEST ? 0.0f : size / 127.0f;
        const Floats inverse = set8(size < SMALLEST ? 0.0f : 127.0f / size);
        for (int i = 0; i < 4; i++) words[i] = to_words(mul8(some[i], inverse));
        store_as_bytes(p->rows + at * GROUP, words);
        p->steps[at] = step;
        const int lower = sum_of_words(add_words(words[0], words[1])), upper = sum_of_words(add_words(words[2], words[3]));
        for (int64_t part = 0; part < parts; part++) {
            const int sum = parts == 1 ? lower + upper : part ? upper : lower;
            p->sums[at * parts + part] = step * (float)sum;
            p->shifts[at * parts + part] = -128 * sum;
        }
    }
}

/* -- gates --------------------------------------------------------------------------------------------------------- */

INLINE(NARROW) Floats silu(Floats x) {
    const Floats one = set8(1.0f), power = power_of_e(neg8(x));
    return div8(x, add8(one, power));
}

/* 0.5 x (1 + tanh(y)) is x / (1 + exp(-2 y)). */
INLINE(NARROW) Floats gelu(Floats x) {
    const Floats cube = mul8(mul8(x, x), x);
    const Floats inner = fma8(cube, set8(0.044715f), x);
    const Floats power = power_of_e(mul8(inner, set8(-1.5957691216f)));
    return div8(x, add8(set8(1.0f), power));
}

static __attribute__((target(NARROW))) void gate(const void *job, int64_t begin, int64_t end) {
    const Product *p = job;
    const int64_t half = p->outputs / 2;
    for (int64_t row = begin; row < end; row++)
        for (int64_t at = 0; at < half; at += 8) {
            const float *from = p->out + row * p->stride + at;
            const Floats x = load8(from), up = load8(from + half);
            store8(p->gated + row * half + at, mul8(p->gate == SILU ? silu(x) : gelu(x), up));
        }
}

/* -- all of it ----------------------------------------------------------------------------------------------------- */

void baton_tiles_product(const Product *p) {
    const int64_t tiles = p->outputs / TILE, part = tiles / (4 * p->threads);
    baton_in_parallel(quantise, p, p->num_rows, ROWS_AT_ONCE / 4, p->threads);
    baton_in_parallel(variant_of(p), p, tiles, part < 2 ? 2 : part - part % 2, p->threads);
    if (p->gate) baton_in_parallel(gate, p, p->num_rows, ROWS_AT_ONCE / 4, p->threads);
}
