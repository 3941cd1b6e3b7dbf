/* Products of rows with matrices in tiles (see `product.h`): rows become codes, tiles are multiplied, gates follow. */
#include "product.h"

enum { SILU = 1, GELU = 2 };          /* a gate's activation; GELU by tanh */
static const float SMALLEST = 1e-30f; /* a group of smaller inputs is zero */

/* -- rows ---------------------------------------------------------------------------------------------------------- */

static __attribute__((target(NARROW))) void quantise(const void *job, int64_t begin, int64_t end) {
    const Product *p = job;
    const int64_t num_groups = p->inputs / GROUP, parts = GROUP / p->group;
    const int middle = p->bits == 8 || p->levels ? 128 : (int)p->middle;
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
            p->shifts[at * parts + part] = -middle * sum;
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

/* -- variants ------------------------------------------------------------------------------------------------------ */

#ifdef __x86_64__
enum { AVX2, AVX_VNNI, AVX512_VNNI_OF_8, AVX512_VNNI }; /* `Variant` of `tiles.py` */
enum { FEWEST = 3, FEW = 8, OF_FEW = 6144 }; /* rows, and codes of rows */

/* Fewer rows wait for memory, which one stream of blocks reads faster than two. So do some whose codes stay beside them in the first cache. */
static int are_few(const Product *p) {
    return p->num_rows < FEWEST || (p->num_rows <= FEW && p->num_rows * p->inputs <= OF_FEW);
}

static Work variant_of(const Product *p) {
    switch (p->variant) {
    case AVX_VNNI: return baton_tiles_vex;
    case AVX512_VNNI_OF_8: return baton_tiles_evex;
    case AVX512_VNNI: return are_few(p) ? baton_tiles_evex : baton_tiles_wide;
    }
    return baton_tiles_avx2;
}
#else
enum { NEON = 4, NEON_DOTPROD = 5 }; /* `Variant` of `tiles.py` */

static Work variant_of(const Product *p) { return p->variant == NEON_DOTPROD ? baton_tiles_dotted : baton_tiles_neon; }
#endif

/* -- all of it ----------------------------------------------------------------------------------------------------- */

void baton_tiles_product(const Product *p) {
    const int64_t tiles = p->outputs / TILE, part = tiles / (4 * p->threads);
    baton_in_parallel(quantise, p, p->num_rows, ROWS_AT_ONCE / 4, p->threads);
    baton_in_parallel(variant_of(p), p, tiles, part < 2 ? 2 : part - part % 2, p->threads);
    if (p->gate) baton_in_parallel(gate, p, p->num_rows, ROWS_AT_ONCE / 4, p->threads);
}
