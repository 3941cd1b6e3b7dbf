/* Rows into tiles (see `product.h`): a GGUF file's blocks, with codes of as many bits as there, and floats, rounded to 4 bits.

   Scales and minimums are float16. What `engine/kernels/quantised/gguf_blocks.py` says of each kind holds here, and a product of float32 is rounded to float16
   once, as there: the bytes are the same. Plain C: no instruction of one processor. */
#include "tile.h"
#include <stdint.h>
#include <string.h>

enum { MOST_INPUTS = 256, MOST_GROUPS = 16, SCALES_OF_K = 12 };
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS };

typedef struct {
    const uint8_t *rows;  /* [outputs, length] */
    uint8_t *tiles;       /* [outputs / TILE, inputs / group, bytes of a block] */
    int64_t *refused;     /* 1 if a factor is no number in float16, else 0 */
    int64_t length, outputs, kind;
} Packing;

typedef struct {
    int bytes, inputs, bits, group, has_minimums; /* of a block of the file; bits and group of a tile */
} Kind;

static const Kind KINDS[] = {
    [Q4_0] = {18, 32, 4, 32, 0},    [Q4_1] = {20, 32, 4, 32, 1},     [Q5_0] = {22, 32, 5, 32, 0},    [Q5_1] = {24, 32, 5, 32, 1},
    [Q8_0] = {34, 32, 8, 32, 0},    [Q2_K] = {84, 256, 4, 16, 1},    [Q3_K] = {110, 256, 4, 16, 0},  [Q4_K] = {144, 256, 4, 32, 1},
    [Q5_K] = {176, 256, 5, 32, 1},  [Q6_K] = {210, 256, 6, 16, 0},   [IQ4_NL] = {18, 32, 4, 32, 0},  [IQ4_XS] = {136, 256, 4, 32, 0},
};

typedef struct {
    uint8_t codes[MOST_INPUTS];
    float scales[MOST_GROUPS], minimums[MOST_GROUPS];
} Block;

#define ALWAYS static inline __attribute__((always_inline))

ALWAYS float from_half(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, 2);
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits = (rest << 13) + (112u << 23);
    if (rest >= 0x7c00) bits = (rest << 13) | 0x7f800000;
    float value;
    memcpy(&value, &bits, 4);
    if (rest < 0x400) value = (float)rest * 0x1p-24f;
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

/* Rounded to the nearest, of two to the even one; what is larger, infinite or no number has all bits of the exponent. */
ALWAYS uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint16_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x47800000) return sign | 0x7c00;
    if (bits < 0x38800000) { /* a multiple of 2^-24: the addition rounds */
        float small;
        memcpy(&small, &bits, 4);
        small += 0.5f;
        memcpy(&bits, &small, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    return sign | (uint16_t)((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

/* Codes of `bits` from `count` bytes: of each `width` all lowest bits, then the next; into the place behind `shift`. */
ALWAYS void planes(uint8_t *codes, const uint8_t *bytes, const int count, const int width, const int bits, const int shift) {
    for (int at = 0; at < count; at += width)
        for (int plane = 0; plane < 8 / bits; plane++, codes += width)
            for (int i = 0; i < width; i++) {
                const uint8_t code = (uint8_t)((bytes[at + i] >> (plane * bits) & ((1 << bits) - 1)) << shift);
                codes[i] = shift ? codes[i] | code : code;
            }
}

ALWAYS void scales_of_k(Block *block, const uint8_t *bytes) {
    const float scale = from_half(bytes), minimum = from_half(bytes + 2);
    const uint8_t *first = bytes + 4, *second = bytes + 8, *rest = bytes + SCALES_OF_K;
    for (int i = 0; i < 4; i++) {
        block->scales[i] = scale * (float)(first[i] & 63);
        block->minimums[i] = -(minimum * (float)(second[i] & 63));
        block->scales[4 + i] = scale * (float)((rest[i] & 15) | first[i] >> 6 << 4);
        block->minimums[4 + i] = -(minimum * (float)(rest[i] >> 4 | second[i] >> 6 << 4));
    }
}

ALWAYS void shifted(uint8_t *codes, int count, int by) {
    for (int i = 0; i < count; i++) codes[i] = (uint8_t)(codes[i] + by);
}

ALWAYS void decode(Block *block, const uint8_t *bytes, const int kind) {
    uint8_t some[MOST_GROUPS];
    if (kind <= Q8_0 || kind == IQ4_NL) {
        block->scales[0] = from_half(bytes);
        if (KINDS[kind].has_minimums) block->minimums[0] = from_half(bytes + 2);
    }
    switch (kind) {
        case Q4_0: planes(block->codes, bytes + 2, 16, 16, 4, 0); break;
        case Q4_1: planes(block->codes, bytes + 4, 16, 16, 4, 0); break;
        case Q5_0:
            planes(block->codes, bytes + 6, 16, 16, 4, 0);
            planes(block->codes, bytes + 2, 4, 1, 1, 4);
            break;
        case Q5_1:
            planes(block->codes, bytes + 8, 16, 16, 4, 0);
            planes(block->codes, bytes + 4, 4, 1, 1, 4);
            break;
        case Q8_0: memcpy(block->codes, bytes + 2, 32); break;
        case Q2_K: {
            const float scale = from_half(bytes + 80), minimum = from_half(bytes + 82);
            for (int i = 0; i < 16; i++) {
                block->scales[i] = scale * (float)(bytes[i] & 15);
                block->minimums[i] = -(minimum * (float)(bytes[i] >> 4));
            }
            planes(block->codes, bytes + 16, 64, 32, 2, 0);
            break;
        }
        case Q3_K: {
            const float scale = from_half(bytes + 108);
            planes(some, bytes + 96, 8, 8, 4, 0);
            planes(some, bytes + 104, 4, 4, 2, 4);
            for (int i = 0; i < 16; i++) block->scales[i] = scale * (float)(some[i] - 32);
            planes(block->codes, bytes + 32, 64, 32, 2, 0);
            planes(block->codes, bytes, 32, 32, 1, 2);
            shifted(block->codes, 256, 4);
            break;
        }
        case Q4_K:
            scales_of_k(block, bytes);
            planes(block->codes, bytes + 16, 128, 32, 4, 0);
            break;
        case Q5_K:
            scales_of_k(block, bytes);
            planes(block->codes, bytes + 48, 128, 32, 4, 0);
            planes(block->codes, bytes + 16, 32, 32, 1, 4);
            break;
        case Q6_K: {
            const float scale = from_half(bytes + 208);
            for (int i = 0; i < 16; i++) block->scales[i] = scale * (float)(int8_t)bytes[192 + i];
            planes(block->codes, bytes, 128, 64, 4, 0);
            planes(block->codes, bytes + 128, 64, 32, 2, 4);
            break;
        }
        case IQ4_NL: planes(block->codes, bytes + 2, 16, 16, 4, 0); break;
        case IQ4_XS: {
            const float scale = from_half(bytes);
            planes(some, bytes + 4, 4, 1, 4, 0);
            planes(some, bytes + 2, 2, 1, 2, 4);
            for (int i = 0; i < 8; i++) block->scales[i] = scale * (float)(some[i] - 32);
            planes(block->codes, bytes + 8, 128, 16, 4, 0);
            break;
        }
    }
}

/* Four inputs of each output side by side; in 4 bits those of the group's second half are the high ones, and what is above 4 bits follows. */
ALWAYS void put_codes(uint8_t *out, const uint8_t *codes, const int bits, const int group) {
    uint8_t packed[GROUP] = {0};
    const int more = bits - 4;
    if (bits < 8) {
        for (int i = 0; i < group / 2; i++) packed[i] = (uint8_t)((codes[i] & 15) | codes[i + group / 2] << 4);
        for (int i = 0; more > 0 && i < group; i++)
            packed[group / 2 + i / 4 * more / 8 * 4 + i % 4] |= (uint8_t)(codes[i] >> 4 << (i / 4 * more % 8));
        codes = packed;
    }
    for (int at = 0; at < group * bits / 32; at++) memcpy(out + 4 * TILE * at, codes + 4 * at, 4);
}

ALWAYS int put_factor(uint8_t *out, float value) {
    const uint16_t half = to_half(value);
    memcpy(out, &half, 2);
    return (half & 0x7c00) == 0x7c00;
}

ALWAYS void pack(const Packing *p, const int kind) {
    const Kind own = KINDS[kind];
    const int code_bytes = TILE * own.group * own.bits / 8, groups = own.inputs / own.group;
    const int block_bytes = code_bytes + 2 * TILE * (1 + own.has_minimums);
    const int64_t blocks = p->length / own.bytes;
    int refused = 0;
    for (int64_t tile = 0; tile < p->outputs / TILE; tile++)
        for (int64_t at = 0; at < blocks; at++)
            for (int output = 0; output < TILE; output++) {
                Block block;
                decode(&block, p->rows + (tile * TILE + output) * p->length + at * own.bytes, kind);
                uint8_t *out = p->tiles + (tile * blocks + at) * groups * block_bytes;
                for (int g = 0; g < groups; g++, out += block_bytes) {
                    put_codes(out + 4 * output, block.codes + g * own.group, own.bits, own.group);
                    refused |= put_factor(out + code_bytes + 2 * output, block.scales[g]);
                    if (own.has_minimums) refused |= put_factor(out + code_bytes + 2 * (TILE + output), block.minimums[g]);
                }
            }
    *p->refused = refused;
}

void baton_tiles_pack(const Packing *p) {
    switch (p->kind) {
#define OF(kind) case kind: pack(p, kind); break;
        OF(Q4_0) OF(Q4_1) OF(Q5_0) OF(Q5_1) OF(Q8_0) OF(Q2_K) OF(Q3_K) OF(Q4_K) OF(Q5_K) OF(Q6_K) OF(IQ4_NL) OF(IQ4_XS)
    }
}

/* -- floats, rounded to 4 bits in groups of 32 --------------------------------------------------------------------- */

enum { LANES = 8, MIDDLE = 8, OF_A_TILE = TILE * GROUP / 2 + 2 * TILE };

typedef struct {
    const float *rows;     /* [outputs, inputs] */
    uint8_t *tiles;        /* [outputs / TILE, inputs / GROUP, OF_A_TILE] */
    int64_t *refused;      /* as in `Packing` */
    int64_t inputs, outputs, num_factors;
    const float *factors;  /* [num_factors]: scales that are tried, of the number that is furthest from 0 */
} Rounding;

/* Codes of a group: whole numbers nearest to x / scale, of two the even one. What is no number becomes some code. */
ALWAYS void codes_of(int32_t *codes, const float *x, float scale) {
    const float divisor = scale == 0.0f ? 1.0f : scale, whole = 12582912.0f; /* 1.5 * 2^23: its last bit is 1 */
    for (int i = 0; i < GROUP; i++) {
        const float moved = x[i] / divisor + whole;
        memcpy(codes + i, &moved, 4);
    }
    for (int i = 0; i < GROUP; i++) {
        const int32_t code = codes[i] - 0x4b400000, below = code < MIDDLE - 1 ? code : MIDDLE - 1;
        codes[i] = below > -MIDDLE ? below : -MIDDLE;
    }
}

/* The sum of squares that is left with a scale. */
ALWAYS float left_by(const float *x, float scale) {
    int32_t codes[GROUP];
    float squares[GROUP], sums[LANES] = {0};
    codes_of(codes, x, scale);
    for (int i = 0; i < GROUP; i++) {
        const float rest = (float)codes[i] * scale - x[i];
        squares[i] = rest * rest;
    }
    for (int at = 0; at < GROUP; at += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += squares[at + lane];
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

/* Write a group's codes and scale; return 1 if the latter is no number in float16. */
ALWAYS int round_group(const Rounding *p, const float *x, uint8_t *out, int output) {
    float furthest, best = 0.0f, scale = 0.0f;
    uint32_t sizes[GROUP], largest = 0; /* in the order of their bits; what is no number is the largest */
    for (int i = 0; i < GROUP; i++) {
        memcpy(sizes + i, x + i, 4);
        sizes[i] &= 0x7fffffff;
    }
    for (int i = 0; i < GROUP; i++) largest = sizes[i] > largest ? sizes[i] : largest;
    int first = 0;
    while (sizes[first] != largest) first++;
    furthest = x[first];
    for (int64_t at = 0; at < p->num_factors; at++) {
        uint8_t half[2];
        put_factor(half, furthest * p->factors[at]);
        const float tried = from_half(half), left = left_by(x, tried);
        if (at == 0 || left < best) best = left, scale = tried;
    }
    int32_t codes[GROUP];
    uint8_t bytes[GROUP];
    codes_of(codes, x, scale);
    for (int i = 0; i < GROUP; i++) bytes[i] = (uint8_t)(codes[i] + MIDDLE);
    put_codes(out + 4 * output, bytes, 4, GROUP);
    return put_factor(out + TILE * GROUP / 2 + 2 * output, scale);
}

void baton_tiles_round(const Rounding *p) {
    const int64_t groups = p->inputs / GROUP;
    int refused = 0;
    for (int64_t output = 0; output < p->outputs; output++)
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *out = p->tiles + (output / TILE * groups + g) * OF_A_TILE;
            refused |= round_group(p, p->rows + output * p->inputs + g * GROUP, out, (int)(output % TILE));
        }
    *p->refused = refused;
}
