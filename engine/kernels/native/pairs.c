/* Products of rows with matrices of bfloat16, for x86-64 with AVX512-BF16, whose instruction adds two products to a sum.

   A panel is 32 outputs, [K / 2, 32, 2], a last odd input [32] behind them; the last panel of a matrix has as many outputs as are
   left. Rows are rounded to bfloat16. A sum takes pair after pair from the first to the last: a row depends neither on its batch nor
   on the number of threads. */
#include "panels.h"

enum { ROWS_AT_ONCE = 192, PANELS_AT_ONCE = 8, PAIRS_AT_ONCE = 128 };
enum { FEW = 16, FEWEST = 3 }; /* for so many rows a panel is read once; so few lie in the cache anyhow */
enum { AHEAD = 512 };          /* pairs of the same panel that are fetched before they are needed */

typedef struct {
    const float *x;         /* [T, of_row], K of each */
    uint32_t *rounded;      /* room for [T, (K + 1) / 2] */
    const uint16_t *panels; /* of [N, K] */
    const float *bias;      /* [N], or NULL */
    float *out;             /* [T, stride]: N of them are written, or added to */
    int64_t num_rows, inputs, outputs, of_row, stride, adds, threads;
    int64_t panels_at_once; /* of a piece of work */
} Product;

#if defined(__x86_64__) && ((defined(__clang__) && __clang_major__ >= 9) || (!defined(__clang__) && __GNUC__ >= 10))
#include "wide.h"

#define PAIRED WIDER ",avx512bf16"

/* Some pairs of a panel, and of rows. */
typedef struct {
    float *sums;           /* [rows, 32], which are added to */
    const uint32_t *x;     /* [rows, of_row] */
    const uint16_t *panel; /* [pairs, width, 2], then [width] where `is_odd` */
    int64_t of_row, pairs, width, rows, is_odd;
} Part;

typedef struct {
    uint32_t x[ROWS_AT_ONCE * (PAIRS_AT_ONCE + 1)];
    float sums[PANELS_AT_ONCE * ROWS_AT_ONCE * TILE_COLUMNS];
} Room;

static int64_t pairs_of(const Product *p) { return (p->inputs + 1) / 2; }

static int64_t panels_of(const Product *p) { return (p->outputs + TILE_COLUMNS - 1) / TILE_COLUMNS; }

static int64_t runs_of(const Product *p) { return (panels_of(p) + p->panels_at_once - 1) / p->panels_at_once; }

/* -- a tile -------------------------------------------------------------------------------------------------------- */

INLINE(PAIRED) void add_pair(__m512 (*sum)[2], const uint32_t *x, int64_t of_row, __m512i first, __m512i second, const int rows) {
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        const __m512bh own = (__m512bh)_mm512_set1_epi32((int)x[row * of_row]);
        sum[row][0] = _mm512_dpbf16_ps(sum[row][0], own, (__m512bh)first);
        sum[row][1] = _mm512_dpbf16_ps(sum[row][1], own, (__m512bh)second);
    }
}

INLINE(PAIRED) void fetch(const uint16_t *panel) {
    _mm_prefetch((const char *)(panel + 2 * AHEAD), _MM_HINT_T0);
    _mm_prefetch((const char *)(panel + 2 * AHEAD + TILE_COLUMNS), _MM_HINT_T0);
}

INLINE(PAIRED) void tile(const Part *p, int64_t row, const int rows, const int is_first, const int is_whole) {
    const int64_t of_row = p->of_row, pairs = p->pairs, width = is_whole ? TILE_COLUMNS : p->width;
    const uint32_t *x = p->x + row * of_row;
    const uint32_t columns = width == TILE_COLUMNS ? ~0u : (1u << width) - 1;
    const __mmask16 low = (__mmask16)columns, high = (__mmask16)(columns >> 16);
    float *sums = p->sums + row * TILE_COLUMNS;
    __m512 sum[TILE_ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int at = 0; at < 2; at++) sum[i][at] = _mm512_loadu_ps(sums + i * TILE_COLUMNS + 16 * at);
    for (int64_t k = 0; k < pairs; k++) {
        const uint16_t *panel = p->panel + 2 * k * width;
        if (is_first) fetch(panel);
        if (is_whole) add_pair(sum, x + k, of_row, _mm512_loadu_si512(panel), _mm512_loadu_si512(panel + 32), rows);
        else add_pair(sum, x + k, of_row, _mm512_maskz_loadu_epi32(low, panel), _mm512_maskz_loadu_epi32(high, panel + 32), rows);
    }
    if (p->is_odd) {
        const uint16_t *panel = p->panel + 2 * pairs * width;
        const __m512i both = _mm512_maskz_loadu_epi16(columns, panel);
        const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(both));
        add_pair(sum, x + pairs, of_row, first, _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), rows);
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int at = 0; at < 2; at++) _mm512_storeu_ps(sums + i * TILE_COLUMNS + 16 * at, sum[i][at]);
}

/* The first rows read a panel from memory, the others from the cache. */
INLINE(PAIRED) void tiles(const Part *p, const int is_whole) {
#define FIRST_ROWS(rows) tile(p, row, rows, 1, is_whole)
#define OTHER_ROWS(rows) tile(p, row, rows, 0, is_whole)
    if (p->rows <= FEW) {
        IN_TILES(0, p->rows, FIRST_ROWS);
        return;
    }
    tile(p, 0, TILE_ROWS, 1, is_whole);
    IN_TILES(TILE_ROWS, p->rows, OTHER_ROWS);
}

static __attribute__((target(PAIRED))) void add_part(const Part *p) { p->width == TILE_COLUMNS ? tiles(p, 1) : tiles(p, 0); }

/* -- pieces of work: some rows with some panels -------------------------------------------------------------------- */

static __attribute__((target(PAIRED))) void round_rows(const void *job, int64_t begin, int64_t end) {
    const Product *p = job;
    for (int64_t row = begin; row < end; row++) {
        const float *x = p->x + row * p->of_row;
        uint16_t *to = (uint16_t *)(p->rounded + row * pairs_of(p));
        int64_t k = 0;
        for (; k + 16 <= p->inputs; k += 16) _mm256_storeu_si256((__m256i *)(to + k), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + k)));
        const __mmask16 left = (__mmask16)((1u << (p->inputs - k)) - 1), even = (__mmask16)(left | (p->inputs % 2 ? left << 1 : 0));
        _mm256_mask_storeu_epi16(to + k, even, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(left, x + k)));
    }
}

static void finish(const Product *p, const float *sums, int64_t first_row, int64_t rows, int64_t output) {
    float *out = p->out + first_row * p->stride + output;
    give(out, p->stride, sums, p->bias ? p->bias + output : NULL, rows, width_of(p->outputs, output), p->adds);
}

static void multiply(const void *job, int64_t begin, int64_t end) {
    const Product *p = job;
    const int64_t panels = panels_of(p), runs = runs_of(p), whole = pairs_of(p);
    Room room;
    for (int64_t piece = begin; piece < end; piece++) {
        const int64_t first_row = piece / runs * ROWS_AT_ONCE, first = piece % runs * p->panels_at_once;
        const int64_t rows = least(ROWS_AT_ONCE, p->num_rows - first_row), count = least(p->panels_at_once, panels - first);
        memset(room.sums, 0, count * rows * TILE_COLUMNS * sizeof(float));
        for (int64_t k = 0; k < whole; k += PAIRS_AT_ONCE) {
            const int64_t pairs = least(PAIRS_AT_ONCE, whole - k);
            Part part = {.x = p->rounded + first_row * whole + k, .of_row = whole, .rows = rows};
            part.is_odd = p->inputs % 2 && k + pairs == whole, part.pairs = pairs - part.is_odd;
            if (rows > FEWEST) { /* those that a power of two lies between would push each other out of the cache */
                for (int64_t row = 0; row < rows; row++) memcpy(room.x + row * pairs, part.x + row * whole, pairs * sizeof(uint32_t));
                part.x = room.x, part.of_row = pairs;
            }
            for (int64_t at = 0; at < count; at++) {
                const int64_t output = (first + at) * TILE_COLUMNS;
                part.sums = room.sums + at * rows * TILE_COLUMNS, part.width = width_of(p->outputs, output);
                part.panel = p->panels + output * p->inputs + 2 * k * part.width;
                add_part(&part);
            }
        }
        for (int64_t at = 0; at < count; at++)
            finish(p, room.sums + at * rows * TILE_COLUMNS, first_row, rows, (first + at) * TILE_COLUMNS);
    }
}

/* Returns 0, or -1 where the compiler lacks the instructions. No product: its `num_rows` are 0. */
int baton_pairs_product(Product *p) {
    const int64_t blocks = (p->num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, own = panels_of(p) / (4 * p->threads);
    p->panels_at_once = p->num_rows <= FEW || own < 1 ? 1 : least(own, PANELS_AT_ONCE);
    const int64_t pieces = blocks * runs_of(p), chunk = pieces / (8 * p->threads);
    baton_in_parallel(round_rows, p, p->num_rows, 16, p->threads);
    baton_in_parallel(multiply, p, pieces, chunk < 1 ? 1 : chunk, p->threads);
    return 0;
}
#else
int baton_pairs_product(Product *p) { return -1; }
#endif
