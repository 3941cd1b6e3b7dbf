/* Panels: 32 outputs side by side. */
#pragma once
#include "shared.h"

enum { TILE_COLUMNS = 32 };

static inline int64_t least(int64_t some, int64_t other) { return some < other ? some : other; }

/* Outputs of the panel whose first one is `first`. */
static inline int64_t width_of(int64_t outputs, int64_t first) { return least(TILE_COLUMNS, outputs - first); }

/* Write rows of sums [rows, 32] with a bias [width] or without, or add them to what is there. */
static inline void give(float *out, int64_t stride, const float *sums, const float *bias, int64_t rows, int64_t width, int64_t adds) {
    for (int64_t row = 0; row < rows; row++, sums += TILE_COLUMNS, out += stride)
        for (int64_t at = 0; at < width; at++) {
            const float sum = bias ? sums[at] + bias[at] : sums[at];
            out[at] = adds ? out[at] + sum : sum;
        }
}
