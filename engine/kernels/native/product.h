/* Products of rows with matrices of 4, 5, 6 or 8 bits in groups of inputs.

   Rows are quantised to 8 bits in groups of 32. With x = step * row and w = scale * code + minimum, a group adds

       step * scale * sum(code * row) + minimum * step * sum(row).

   A tile is 8 outputs. Its block has the codes of a group of 16 or 32 inputs (`engine/kernels/quantised/tiles.py` packs it), 8
   scales in float16, and 8 minimums in float16 if there are any. Byte 4 r + i of vector v of 32 bytes belongs to output r:

       4 bits: input 4 v + i in the low half, 4 v + i + group / 2 in the high one, unsigned
       8 bits: input 4 v + i, signed
       5 and 6 bits: the lowest 4 as those of 4 bits; then vectors of the rest, the 8 or 4 codes of a byte from its lowest bits on:
           input 4 v + i has place v % 8 in vector 0, or v % 4 in vector v / 4
       levels: 4 bits, each the place of a signed byte among 16

   Sums of products of codes are whole numbers, and floats are added group by group, in every variant alike. So a row depends
   neither on its batch, nor on the number of threads, nor on the processor. */
#pragma once
#include "shared.h"
#include "tile.h"

enum { ROWS_AT_ONCE = 64 }; /* their codes stay in a core's cache while tiles pass */

typedef struct {
    const float *x;        /* [T, K] */
    const uint8_t *blocks; /* [N / TILE, K / group, bytes of a block] */
    const float *bias;     /* [N], or NULL */
    float *out;            /* [T, stride]: N of them are written, or added to */
    float *gated;          /* [T, N / 2]: act(first half) * second half of them, if there is a gate */
    int8_t *rows;          /* [T, K] */
    float *steps;          /* [T, K / GROUP] */
    float *sums;           /* [T, K / group]: step * sum(row) */
    int32_t *shifts;       /* [T, K / group]: -middle * sum(row), -128 * sum(row) of signed codes */
    const int8_t *levels;  /* [16]: what codes of 4 bits stand for, or NULL */
    int64_t num_rows, inputs, outputs, stride, bits, group, middle, has_minimums, variant, threads, gate, adds;
} Product;

/* How a group's codes are stored. Each has its own code: what depends on it is decided by the compiler. */
typedef struct {
    int bits, group, has_levels, has_shifts; /* the last is 0 where all shifts are */
} Form;

#define IN_ITS_FORM(multiply, p, begin, end)                                                                       \
    switch ((p)->levels ? 0 : (p)->bits * 100 + (p)->group) {                                                      \
        case 0: multiply(p, begin, end, (Form){4, 32, 1, 1}); break;                                               \
        case 416: multiply(p, begin, end, (Form){4, 16, 0, 1}); break;                                             \
        case 432:                                                                                                  \
            if ((p)->has_minimums) multiply(p, begin, end, (Form){4, 32, 0, 0});                                   \
            else multiply(p, begin, end, (Form){4, 32, 0, 1});                                                     \
            break;                                                                                                 \
        case 532:                                                                                                  \
            if ((p)->has_minimums) multiply(p, begin, end, (Form){5, 32, 0, 0});                                   \
            else multiply(p, begin, end, (Form){5, 32, 0, 1});                                                     \
            break;                                                                                                 \
        case 616: multiply(p, begin, end, (Form){6, 16, 0, 1}); break;                                             \
        case 816: multiply(p, begin, end, (Form){8, 16, 0, 1}); break;                                             \
        case 832: multiply(p, begin, end, (Form){8, 32, 0, 1}); break;                                             \
    }

#ifdef __x86_64__
#define WIDE NARROW ",avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
#endif

INLINE(NARROW) int32_t four(const int8_t *row) {
    int32_t bytes;
    memcpy(&bytes, row, 4);
    return bytes;
}

#ifdef __aarch64__
INLINE(NARROW) int8x16_t four_times(const int8_t *row) { return vreinterpretq_s8_s32(vdupq_n_s32(four(row))); }
#endif

INLINE(NARROW) int64_t bytes_of_block(const Product *p, Form form) {
    return TILE * form.group * form.bits / 8 + 2 * TILE * (1 + p->has_minimums);
}

/* True if codes are signed bytes; the others are whole numbers from 0 on. */
INLINE(NARROW) int is_signed(Form form) { return form.bits == 8 || form.has_levels; }

/* Tiles [begin, end) of a product, by the instructions of each variant. */
void baton_tiles_avx2(const void *job, int64_t begin, int64_t end);
void baton_tiles_vex(const void *job, int64_t begin, int64_t end);
void baton_tiles_evex(const void *job, int64_t begin, int64_t end);
void baton_tiles_wide(const void *job, int64_t begin, int64_t end);
void baton_tiles_neon(const void *job, int64_t begin, int64_t end);
void baton_tiles_dotted(const void *job, int64_t begin, int64_t end);
