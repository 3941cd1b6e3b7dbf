/* Products of rows of floats with matrices of 16-bit floats, and rows of these, by eight or sixteen floats at a time.

   A panel is 32 outputs [K, 32]; the last one of a matrix has as many as are left, [K, N % 32]. Weights are widened exactly. Sums are
   taken input by input, 128 of them, and these sums are added, in both variants alike: a row depends neither on its batch, nor on
   the number of threads, nor on the processor. */
#include "panels.h"

enum { ROWS_AT_ONCE = 96, PANELS_AT_ONCE = 4, INPUTS_AT_ONCE = 128 };
enum { FEW = 16, FEWEST = 3 }; /* for so many rows weights are widened in registers; so few lie in the cache anyhow */
enum { AHEAD = 1024 };         /* weights of the same panel that are fetched before they are needed */

typedef struct {
    const float *x;         /* [T, of_row], K of each */
    const uint16_t *panels; /* of [N, K] */
    const float *bias;      /* [N], or NULL */
    float *out;             /* [T, stride]: N of them are written, or added to */
    int64_t num_rows, inputs, outputs, of_row, stride, is_float16, is_wide, adds, threads;
    int64_t panels_at_once; /* of a piece of work */
} Product;

/* Some inputs of a panel, and of rows. */
typedef struct {
    float *sums;           /* [rows, 32], which are added to */
    const float *x;        /* [rows, of_row] */
    const uint16_t *panel; /* [inputs, width] */
    float *widened;        /* room for [inputs, 32] */
    int64_t of_row, inputs, width, rows;
} Part;

typedef struct {
    float x[ROWS_AT_ONCE * INPUTS_AT_ONCE];
    float panel[INPUTS_AT_ONCE * TILE_COLUMNS];
    float sums[PANELS_AT_ONCE * ROWS_AT_ONCE * TILE_COLUMNS];
} Room;

INLINE(NARROW) Floats eight(const uint16_t *from, const int is_float16) { return is_float16 ? from_halves8(from) : from_bfloats8(from); }

INLINE(NARROW) float one(uint16_t from, const int is_float16) {
    if (is_float16) return from_half(from);
    const uint32_t bits = (uint32_t)from << 16;
    float same;
    memcpy(&same, &bits, sizeof same);
    return same;
}

INLINE(NARROW) void fetch(const uint16_t *panel) { __builtin_prefetch(panel + AHEAD); }

INLINE(NARROW) void add_eight(float *to, Floats some) { store8(to, add8(load8(to), some)); }

/* -- 8 outputs at a time ------------------------------------------------------------------------------------------- */

/* Outputs `begin` to `end` of a part's panel, or of `widened`: at most 12 sums of eight. */
INLINE(NARROW) void narrow_rows(
    const Part *p, int64_t row, const int rows, const int begin, const int end, const int is_widened, const int is_float16
) {
    const float *x = p->x + row * p->of_row;
    const int64_t of_row = p->of_row, inputs = p->inputs;
    Floats sum[6][4];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
        for (int at = begin; at < end; at += 8) sum[i][(at - begin) / 8] = zero8();
    for (int64_t k = 0; k < inputs; k++) {
        const uint16_t *panel = p->panel + k * TILE_COLUMNS;
        const float *widened = p->widened + k * TILE_COLUMNS;
        if (!is_widened) fetch(panel);
#pragma GCC unroll 2
        for (int at = begin; at < end; at += 16) {
            const Floats first = is_widened ? load8(widened + at) : eight(panel + at, is_float16);
            const Floats second = is_widened ? load8(widened + at + 8) : eight(panel + at + 8, is_float16);
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++) {
                Floats *own = sum[i] + (at - begin) / 8;
                const Floats input = set8(x[i * of_row + k]);
                own[0] = fma8(input, first, own[0]);
                own[1] = fma8(input, second, own[1]);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
        for (int at = begin; at < end; at += 8) add_eight(p->sums + (row + i) * TILE_COLUMNS + at, sum[i][(at - begin) / 8]);
}

INLINE(NARROW) void narrow_halves(const Part *p, int64_t row, const int rows, const int is_widened, const int is_float16) {
    narrow_rows(p, row, rows, 0, 16, is_widened, is_float16);
    narrow_rows(p, row, rows, 16, 32, is_widened, is_float16);
}

INLINE(NARROW) void narrow_tiles(const Part *p, const int is_widened, const int is_float16) {
    int64_t row = 0;
    for (; row + 6 <= p->rows; row += 6) narrow_halves(p, row, 6, is_widened, is_float16);
    switch (p->rows - row) {
    case 5: narrow_halves(p, row, 5, is_widened, is_float16); break;
    case 4: narrow_halves(p, row, 4, is_widened, is_float16); break;
    case 3: narrow_rows(p, row, 3, 0, 32, is_widened, is_float16); break;
    case 2: narrow_rows(p, row, 2, 0, 32, is_widened, is_float16); break;
    case 1: narrow_rows(p, row, 1, 0, 32, is_widened, is_float16); break;
    }
}

/* -- parts, widened or not ------------------------------------------------------------------------------------------- */

/* Zeros behind the last output. */
INLINE(NARROW) void widen(const Part *p, const int is_float16) {
    if (p->width == TILE_COLUMNS)
        for (int64_t k = 0; k < p->inputs; k++) {
            const uint16_t *panel = p->panel + k * TILE_COLUMNS;
            float *to = p->widened + k * TILE_COLUMNS;
            fetch(panel);
            for (int at = 0; at < TILE_COLUMNS; at += 8) store8(to + at, eight(panel + at, is_float16));
        }
    else
        for (int64_t at = 0; at < p->inputs * TILE_COLUMNS; at++) {
            const int64_t k = at / TILE_COLUMNS, column = at % TILE_COLUMNS;
            p->widened[at] = column < p->width ? one(p->panel[k * p->width + column], is_float16) : 0.0f;
        }
}

INLINE(NARROW) void narrow_part(const Part *p, const int is_float16) {
    if (p->rows <= FEW && p->width == TILE_COLUMNS) narrow_tiles(p, 0, is_float16);
    else widen(p, is_float16), narrow_tiles(p, 1, is_float16);
}

static __attribute__((target(NARROW))) void narrow(const Part *p, int64_t is_float16) {
    is_float16 ? narrow_part(p, 1) : narrow_part(p, 0);
}

/* -- 16 outputs at a time ------------------------------------------------------------------------------------------ */

#ifdef __x86_64__
#include "wide.h"

INLINE(WIDER) __m512 sixteen(const uint16_t *from, const int is_float16) {
    const __m256i some = _mm256_loadu_si256((const __m256i *)from);
    return is_float16 ? _mm512_cvtph_ps(some) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(some), 16));
}

INLINE(WIDER) void add_sixteen(float *to, __m512 some) { _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), some)); }

INLINE(WIDER) void wide_rows(const Part *p, int64_t row, const int rows, const int is_widened, const int is_float16) {
    const float *x = p->x + row * p->of_row;
    const int64_t of_row = p->of_row, inputs = p->inputs;
    __m512 sum[TILE_ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    if (is_widened) add_tile(sum, x, of_row, p->widened, TILE_COLUMNS, inputs, rows);
    else
        for (int64_t k = 0; k < inputs; k++) {
            const uint16_t *panel = p->panel + k * TILE_COLUMNS;
            fetch(panel);
            const __m512 first = sixteen(panel, is_float16), second = sixteen(panel + 16, is_float16);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                const __m512 input = _mm512_set1_ps(x[i * of_row + k]);
                sum[i][0] = _mm512_fmadd_ps(input, first, sum[i][0]);
                sum[i][1] = _mm512_fmadd_ps(input, second, sum[i][1]);
            }
        }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int at = 0; at < 2; at++) add_sixteen(p->sums + (row + i) * TILE_COLUMNS + 16 * at, sum[i][at]);
}

INLINE(WIDER) void wide_tiles(const Part *p, const int is_widened, const int is_float16) {
#define WIDE_ROWS(rows) wide_rows(p, row, rows, is_widened, is_float16)
    IN_TILES(0, p->rows, WIDE_ROWS);
}

INLINE(WIDER) void wide_part(const Part *p, const int is_float16) {
    if (p->rows <= FEW && p->width == TILE_COLUMNS) wide_tiles(p, 0, is_float16);
    else widen(p, is_float16), wide_tiles(p, 1, is_float16);
}

static __attribute__((target(WIDER))) void wide(const Part *p, int64_t is_float16) {
    is_float16 ? wide_part(p, 1) : wide_part(p, 0);
}
#else
#define wide narrow
#endif

/* -- pieces of work: some rows with some panels ------------------------------------------------------------------------ */

static int64_t panels_of(const Product *p) { return (p->outputs + TILE_COLUMNS - 1) / TILE_COLUMNS; }

static int64_t runs_of(const Product *p) { return (panels_of(p) + p->panels_at_once - 1) / p->panels_at_once; }

static void finish(const Product *p, const float *sums, int64_t first_row, int64_t rows, int64_t output) {
    float *out = p->out + first_row * p->stride + output;
    give(out, p->stride, sums, p->bias ? p->bias + output : NULL, rows, width_of(p->outputs, output), p->adds);
}

static void multiply(const void *job, int64_t begin, int64_t end) {
    const Product *p = job;
    const int64_t panels = panels_of(p), runs = runs_of(p);
    Room room;
    for (int64_t piece = begin; piece < end; piece++) {
        const int64_t first_row = piece / runs * ROWS_AT_ONCE, first = piece % runs * p->panels_at_once;
        const int64_t rows = least(ROWS_AT_ONCE, p->num_rows - first_row), count = least(p->panels_at_once, panels - first);
        memset(room.sums, 0, count * rows * TILE_COLUMNS * sizeof(float));
        for (int64_t k = 0; k < p->inputs; k += INPUTS_AT_ONCE) {
            Part part = {.x = p->x + first_row * p->of_row + k, .widened = room.panel, .of_row = p->of_row, .rows = rows};
            part.inputs = least(INPUTS_AT_ONCE, p->inputs - k);
            if (rows > FEWEST) { /* those that a power of two lies between would push each other out of the cache */
                for (int64_t row = 0; row < rows; row++)
                    memcpy(room.x + row * INPUTS_AT_ONCE, part.x + row * p->of_row, part.inputs * sizeof(float));
                part.x = room.x, part.of_row = INPUTS_AT_ONCE;
            }
            for (int64_t at = 0; at < count; at++) {
                const int64_t output = (first + at) * TILE_COLUMNS;
                part.sums = room.sums + at * rows * TILE_COLUMNS, part.width = width_of(p->outputs, output);
                part.panel = p->panels + output * p->inputs + k * part.width;
                (p->is_wide ? wide : narrow)(&part, p->is_float16);
            }
        }
        for (int64_t at = 0; at < count; at++)
            finish(p, room.sums + at * rows * TILE_COLUMNS, first_row, rows, (first + at) * TILE_COLUMNS);
    }
}

void baton_halves_product(Product *p) {
    const int64_t blocks = (p->num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, own = panels_of(p) / (4 * p->threads);
    p->panels_at_once = p->num_rows <= FEW || own < 1 ? 1 : least(own, PANELS_AT_ONCE);
    const int64_t pieces = blocks * runs_of(p), chunk = pieces / (8 * p->threads);
    baton_in_parallel(multiply, p, pieces, chunk < 1 ? 1 : chunk, p->threads);
}

/* -- rows of a matrix, and its order --------------------------------------------------------------------------------- */

typedef struct {
    const int64_t *numbers; /* [T], of rows of the matrix */
    const uint16_t *panels; /* of [N, K] */
    float *out;             /* [T, K] */
    int64_t num_rows, inputs, outputs, is_float16, in_pairs, threads;
} Lookup;

/* The place of an input of an output in a panel, see `pairs.c` for pairs. */
static inline __attribute__((always_inline)) int64_t place_of(int64_t k, int64_t output, int64_t width, int64_t inputs, int64_t in_pairs) {
    return in_pairs && (k | 1) < inputs ? (k & ~1) * width + 2 * output + (k & 1) : k * width + output;
}

static __attribute__((target(NARROW))) void look_up(const void *job, int64_t begin, int64_t end) {
    const Lookup *p = job;
    for (int64_t row = begin; row < end; row++) {
        const int64_t place = p->numbers[row] % TILE_COLUMNS, output = p->numbers[row] - place;
        const int64_t width = width_of(p->outputs, output);
        const uint16_t *from = p->panels + output * p->inputs;
        float *out = p->out + row * p->inputs;
        for (int64_t k = 0; k < p->inputs; k++) {
            const uint16_t own = from[place_of(k, place, width, p->inputs, p->in_pairs)];
            out[k] = p->is_float16 ? one(own, 1) : one(own, 0);
        }
    }
}

/* Returns 0 if there are such rows; writes nothing otherwise. */
int baton_halves_rows(const Lookup *p) {
    for (int64_t row = 0; row < p->num_rows; row++)
        if (p->numbers[row] < 0 || p->numbers[row] >= p->outputs) return -1;
    baton_in_parallel(look_up, p, p->num_rows, 4, p->threads);
    return 0;
}

typedef struct {
    const uint16_t *rows; /* [N, K] */
    uint16_t *panels;     /* of [N, K], another memory */
    int64_t inputs, outputs, in_pairs, threads;
} Order;

static void put_in_order(const void *job, int64_t begin, int64_t end) {
    const Order *p = job;
    const int64_t as_pairs = p->in_pairs && p->inputs % 2 == 0, inputs = as_pairs ? p->inputs / 2 : p->inputs;
    for (int64_t output = begin * TILE_COLUMNS; output < end * TILE_COLUMNS && output < p->outputs; output += TILE_COLUMNS) {
        const int64_t width = width_of(p->outputs, output);
        const uint16_t *rows = p->rows + output * p->inputs;
        uint16_t *panel = p->panels + output * p->inputs;
        for (int64_t first = 0; first < inputs; first += TILE_COLUMNS) {
            const int64_t last = least(first + TILE_COLUMNS, inputs);
            for (int64_t row = 0; row < width; row++)
                for (int64_t k = first; k < last; k++)
                    if (as_pairs) memcpy(panel + 2 * (k * width + row), rows + 2 * (row * inputs + k), sizeof(uint32_t));
                    else panel[place_of(k, row, width, inputs, p->in_pairs)] = rows[row * inputs + k];
        }
    }
}

void baton_halves_order(const Order *p) {
    baton_in_parallel(put_in_order, p, (p->outputs + TILE_COLUMNS - 1) / TILE_COLUMNS, 4, p->threads);
}
