/* Every kernel of `engine/kernels/native` on made-up numbers, its results to stdout: what two processors write can be compared.

       native_bits VARIANT IS_WIDE     variants of `tiles.py`; 1 where products of halves use AVX-512 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t Arguments[24];
#define AT(pointer) ((int64_t)(intptr_t)(pointer))

void baton_tiles_product(const void *);
void baton_halves_product(void *);
int baton_halves_rows(const void *);
void baton_halves_order(const void *);
void baton_rows_norm(const void *);
void baton_rows_rotate(const void *);
void baton_attend(const void *);

static uint64_t state;

static uint32_t drawn(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

/* Between -4 and 4, some of them tiny. */
static float number(void) { return ((float)drawn() / 268435456.0f - 4.0f) * (drawn() % 8 ? 1.0f : 1e-6f); }

static float *numbers(int64_t count) {
    float *found = malloc(count * sizeof(float));
    for (int64_t at = 0; at < count; at++) found[at] = number();
    return found;
}

/* float16, or bfloat16, from a 16th to 16, of both signs, and subnormal ones of float16. */
static uint16_t half(int is_float16) {
    const uint16_t sign = drawn() % 2 << 15;
    if (!is_float16) return sign | (123 + drawn() % 8) << 7 | drawn() % 128;
    return sign | (drawn() % 16 ? 11 + drawn() % 8 : 0) << 10 | drawn() % 1024;
}

static uint16_t *halves(int64_t count, int is_float16) {
    uint16_t *found = malloc(count * 2);
    for (int64_t at = 0; at < count; at++) found[at] = half(is_float16);
    return found;
}

static int64_t bits_of(double x) {
    int64_t same;
    memcpy(&same, &x, sizeof same);
    return same;
}

static void tell(const void *some, int64_t bytes) { fwrite(some, 1, bytes, stdout); }

static const int8_t LEVELS[16] = {-128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127};

typedef struct {
    int64_t bits, group, has_minimums, has_levels;
} Kind;

static const Kind KINDS[] = {
    {4, 16, 0, 0}, {8, 16, 0, 0}, {4, 32, 0, 0}, {8, 32, 0, 0}, {4, 16, 1, 0}, {8, 16, 1, 0}, {4, 32, 1, 0}, {8, 32, 1, 0},
    {5, 32, 0, 0}, {5, 32, 1, 0}, {6, 16, 0, 0}, {6, 16, 1, 0}, {4, 32, 0, 1},
};

static void multiply_tiles(int64_t variant, Kind kind, int64_t rows, int64_t gate, int64_t adds) {
    const int64_t bits = kind.bits, group = kind.group, has_minimums = kind.has_minimums;
    const int64_t inputs = 96, outputs = 8 * 14, groups = inputs / group;
    const int64_t codes = 8 * group * bits / 8, bytes = codes + 16 * (1 + has_minimums);
    uint8_t *blocks = malloc(outputs / 8 * groups * bytes);
    for (int64_t at = 0; at < outputs / 8 * groups; at++) {
        for (int64_t i = 0; i < codes; i++) blocks[at * bytes + i] = (uint8_t)drawn();
        for (int64_t i = codes; i < bytes; i += 2) {
            const uint16_t factor = half(1);
            memcpy(blocks + at * bytes + i, &factor, 2);
        }
    }
    float *x = numbers(rows * inputs), *bias = numbers(outputs), *out = numbers(rows * outputs), *gated = numbers(rows * outputs / 2);
    for (int64_t at = 0; at < 32; at++) x[at] = 0.0f;
    int8_t *codes_of_rows = malloc(rows * inputs);
    float *steps = numbers(rows * inputs / 32), *sums = numbers(rows * groups), *shifts = numbers(rows * groups);
    Arguments all = {
        AT(x), AT(blocks), AT(bias), AT(out), gate ? AT(gated) : 0, AT(codes_of_rows), AT(steps), AT(sums), AT(shifts),
        kind.has_levels ? AT(LEVELS) : 0, rows, inputs, outputs, outputs, bits, group, bits < 8 && !has_minimums ? 1 << (bits - 1) : 0,
        has_minimums, variant, rows % 3 + 1, gate, adds,
    };
    baton_tiles_product(all);
    tell(out, rows * outputs * 4), tell(gated, rows * outputs / 2 * 4);
}

static void multiply_halves(int64_t is_wide, int64_t is_float16, int64_t rows, int64_t outputs, int64_t inputs, int64_t adds) {
    uint16_t *weight = halves(outputs * inputs, (int)is_float16), *panels = malloc(outputs * inputs * 2);
    float *x = numbers(rows * inputs), *bias = numbers(outputs), *out = numbers(rows * outputs), *looked_up = malloc(3 * inputs * 4);
    const int64_t own[3] = {outputs - 1, 0, outputs / 2};
    baton_halves_order((Arguments){AT(weight), AT(panels), inputs, outputs, 0, 2});
    baton_halves_product((Arguments){AT(x), AT(panels), AT(bias), AT(out), rows, inputs, outputs, inputs, outputs, is_float16, is_wide, adds, 2, 0});
    baton_halves_rows((Arguments){AT(own), AT(panels), AT(looked_up), 3, inputs, outputs, is_float16, 0, 1});
    tell(panels, outputs * inputs * 2), tell(out, rows * outputs * 4), tell(looked_up, 3 * inputs * 4);
}

static void norm(int64_t rows, int64_t inputs, int64_t plus_one) {
    float *x = numbers(rows * inputs), *weight = numbers(inputs), *out = malloc(rows * inputs * 4);
    baton_rows_norm((Arguments){AT(x), AT(weight), AT(out), rows, inputs, plus_one, 2, bits_of(1e-5)});
    tell(out, rows * inputs * 4);
}

enum { HEADS = 6, KV_HEADS = 2, BLOCK = 4, BLOCKS = 24, IN_TABLE = 20 };

static void *pool_of(int64_t dim, int64_t in_half) {
    const int64_t count = BLOCKS * 2 * BLOCK * KV_HEADS * dim;
    return in_half ? (void *)halves(count, 1) : (void *)numbers(count);
}

static void rotate(int64_t rows, int64_t dim, int64_t in_half) {
    const int64_t stride = (HEADS + 2 * KV_HEADS) * dim, of_plane = BLOCK * KV_HEADS * dim;
    float *heads = numbers(rows * stride), *angles = numbers(50 * dim);
    for (int64_t at = 0; at < rows; at++) heads[(at + 1) * stride - 1 - at] *= 1e5f; /* too large for float16 */
    int32_t positions[64], slots[64];
    for (int64_t at = 0; at < rows; at++) positions[at] = (int32_t)(drawn() % 50), slots[at] = (int32_t)(at == 3 ? -1 : 2 * at);
    void *pool = pool_of(dim, in_half);
    Arguments all = {
        AT(heads), AT(positions), AT(slots), AT(angles), AT(pool), rows, stride, HEADS, KV_HEADS, dim, BLOCK, 2 * of_plane, of_plane,
        KV_HEADS * dim, dim, in_half, 2,
    };
    baton_rows_rotate(all);
    tell(heads, rows * stride * 4), tell(pool, BLOCKS * 2 * of_plane * (in_half ? 2 : 4));
}

static void attend(int64_t dim, int64_t in_half, int64_t window, int has_sinks) {
    const int64_t rows = 5, of_plane = BLOCK * KV_HEADS * dim;
    const int32_t lengths[5] = {1, 8, 64, 65, 80};
    int32_t tables[5 * IN_TABLE];
    for (int at = 0; at < 5 * IN_TABLE; at++) tables[at] = (int32_t)(drawn() % BLOCKS);
    float *q = numbers(rows * HEADS * dim), *sinks = numbers(HEADS), *out = malloc(rows * HEADS * dim * 4);
    void *pool = pool_of(dim, in_half);
    Arguments all = {
        AT(q), AT(pool), AT(tables), AT(lengths), has_sinks ? AT(sinks) : 0, AT(out), rows, HEADS * dim, HEADS, KV_HEADS, dim, BLOCK,
        IN_TABLE, 2 * of_plane, of_plane, KV_HEADS * dim, dim, window, in_half, 2, bits_of(0.2),
    };
    baton_attend(all);
    tell(out, rows * HEADS * dim * 4);
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    const int64_t variant = atoll(arguments[1]), is_wide = atoll(arguments[2]);
    const int64_t rows[] = {1, 2, 3, 4, 5, 8, 70};
    state = 1;
    for (unsigned kind = 0; kind < sizeof KINDS / sizeof *KINDS; kind++)
        for (int at = 0; at < 7; at++)
            for (int64_t gate = 0; gate < 3; gate++)
                multiply_tiles(variant, KINDS[kind], rows[at], gate, gate == 2);
    for (int is_float16 = 0; is_float16 < 2; is_float16++)
        for (int at = 0; at < 7; at++) {
            multiply_halves(is_wide, is_float16, rows[at], 96, 300, 0);
            multiply_halves(is_wide, is_float16, rows[at], 45, 131, 1);
        }
    for (int64_t plus_one = 0; plus_one < 2; plus_one++) norm(20, 576, plus_one);
    for (int64_t in_half = 0; in_half < 2; in_half++)
        for (int64_t dim = 16; dim <= 256; dim *= 2) {
            rotate(40, dim, in_half);
            for (int64_t window = -16; window <= 16; window += 16) attend(dim, in_half, window, window == 0);
        }
    return 0;
}
