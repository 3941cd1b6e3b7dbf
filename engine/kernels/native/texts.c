/* Attention of whole texts of any lengths, one behind the other, in floats. AVX-512. Hq query heads, Hkv key and value heads, D head size.

   A piece of work is some queries of one head of a text, which may have keys without queries before them. It meets keys SOME at a time, from the first on, so a row depends neither on
   the other texts nor on the number of threads. */
#ifdef __x86_64__
#include "wide.h"
#include <string.h>

enum { QUERIES = 192, SOME = 128, MOST_DIM = 256 };
#define LEAST -3e38f /* below every score: a query that has seen no key yet */

typedef struct {
    const float *q;        /* [T, of_q], Hq heads of each row side by side */
    const float *k, *v;    /* [S, of_k] and [S, of_v], Hkv heads; S > T where first tokens have no queries */
    const int32_t *pieces; /* [P, 4]: the row of a text's first key, its length, the first of QUERIES queries, the row of query 0 */
    float *out;            /* [T, Hq, D] */
    int64_t num_pieces, of_q, of_k, of_v, num_heads, num_kv_heads, dim;
    int64_t before, after; /* positions that a query sees on each side; negative: all */
    int64_t threads;
    double scale;
} Attention;

typedef struct {
    float keys[SOME / TILE_COLUMNS * MOST_DIM * TILE_COLUMNS]; /* [SOME / 32, D, 32] */
    float values[SOME * MOST_DIM];                             /* [SOME, D in 32s] */
    float sums[QUERIES * MOST_DIM];                            /* [QUERIES, D in 32s] */
    float most[QUERIES], total[QUERIES];
} Room;

/* Columns of 16 keys' 16 numbers. */
INLINE(WIDER) void turn(const float *from, int64_t of_row, float *to, int64_t of_column) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * of_row);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#define PAIRS(low, x, y) _mm512_castpd_ps(_mm512_unpack##low##_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)))
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = PAIRS(lo, b[i], b[i + 2]);
        a[i + 1] = PAIRS(hi, b[i], b[i + 2]);
        a[i + 2] = PAIRS(lo, b[i + 1], b[i + 3]);
        a[i + 3] = PAIRS(hi, b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 low = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd);
        const __m512 others = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88), last = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
        _mm512_storeu_ps(to + i * of_column, _mm512_shuffle_f32x4(low, others, 0x88));
        _mm512_storeu_ps(to + (8 + i) * of_column, _mm512_shuffle_f32x4(low, others, 0xdd));
        _mm512_storeu_ps(to + (4 + i) * of_column, _mm512_shuffle_f32x4(high, last, 0x88));
        _mm512_storeu_ps(to + (12 + i) * of_column, _mm512_shuffle_f32x4(high, last, 0xdd));
    }
}

/* Keys in panels, values row by row; zeros behind the last key and the last number. */
INLINE(WIDER) void pack(const Attention *p, Room *room, int64_t row, int64_t number, int64_t kv_head, int64_t wide) {
    const float *keys = p->k + row * p->of_k + kv_head * p->dim, *values = p->v + row * p->of_v + kv_head * p->dim;
    for (int64_t key = 0; key < number; key += 16) {
        float *panel = room->keys + key / TILE_COLUMNS * p->dim * TILE_COLUMNS + key % TILE_COLUMNS;
        int64_t at = 0;
        if (key + 16 <= number)
            for (; at + 16 <= p->dim; at += 16) turn(keys + key * p->of_k + at, p->of_k, panel + at * TILE_COLUMNS, TILE_COLUMNS);
        for (; at < p->dim; at++)
            for (int64_t i = 0; i < 16; i++) panel[at * TILE_COLUMNS + i] = key + i < number ? keys[(key + i) * p->of_k + at] : 0.0f;
    }
    if (number % TILE_COLUMNS && number % TILE_COLUMNS <= 16) /* the other half of the last panel */
        for (int64_t at = 0; at < p->dim; at++)
            _mm512_storeu_ps(room->keys + (number / TILE_COLUMNS * p->dim + at) * TILE_COLUMNS + 16, _mm512_setzero_ps());
    for (int64_t key = 0; key < number; key++) {
        memcpy(room->values + key * wide, values + key * p->of_v, p->dim * sizeof(float));
        memset(room->values + key * wide + p->dim, 0, (wide - p->dim) * sizeof(float));
    }
}

/* Scores become weights; returns the sum of a row's, and by what its earlier sums are multiplied. Keys `low` to `high` are seen. */
INLINE(WIDER) float weigh_some(
    float *scores, int64_t number, int64_t low, int64_t high, float scale, float *most, float *before, const int sees_all
) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i first = _mm512_set1_epi32((int)low), end = _mm512_set1_epi32((int)high);
    __m512 largest = _mm512_set1_ps(LEAST), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < number; i += 16) {
        const __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int)i), lanes);
        const __mmask16 seen = sees_all ? 0xffff : _mm512_cmpge_epi32_mask(at, first) & _mm512_cmplt_epi32_mask(at, end);
        largest = _mm512_mask_max_ps(largest, seen, largest, _mm512_loadu_ps(scores + i));
    }
    const float own = _mm512_reduce_max_ps(largest);
    const float now = own > LEAST && own * scale > *most ? own * scale : *most;
    const __m512 less = _mm512_set1_ps(now), factor = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < number; i += 16) {
        const __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int)i), lanes);
        const __mmask16 seen = sees_all ? 0xffff : _mm512_cmpge_epi32_mask(at, first) & _mm512_cmplt_epi32_mask(at, end);
        /* rounded as `now` is, and so 0 for the largest one */
        const __m512 own_score = _mm512_mul_ps(_mm512_loadu_ps(scores + i), factor);
        const __m512 power = power_of_e_wide(_mm512_sub_ps(own_score, less));
        const __m512 weight = _mm512_maskz_mov_ps(seen, power);
        _mm512_storeu_ps(scores + i, weight);
        sum = _mm512_add_ps(sum, weight);
    }
    *before = _mm512_cvtss_f32(power_of_e_wide(_mm512_set1_ps(*most - now)));
    *most = now;
    return _mm512_reduce_add_ps(sum);
}

INLINE(WIDER) float weigh(float *scores, int64_t number, int64_t low, int64_t high, float scale, float *most, float *before) {
    const int sees_all = low <= 0 && high >= number && number % 16 == 0;
    return sees_all ? weigh_some(scores, number, low, high, scale, most, before, 1)
                    : weigh_some(scores, number, low, high, scale, most, before, 0);
}

/* Some queries, from `query` on and in the piece from `row` on, meet `number` packed keys, the first of which is `key`. */
INLINE(WIDER) void meet(
    const Attention *p, Room *room, const float *q, int64_t row, int64_t query, int64_t key, int64_t number, int64_t wide, const int rows
) {
    float scores[TILE_ROWS][SOME], before[TILE_ROWS];
    for (int64_t at = 0; at < number; at += TILE_COLUMNS) {
        __m512 sum[TILE_ROWS][2];
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
        add_tile(sum, q + row * p->of_q, p->of_q, room->keys + at * p->dim, TILE_COLUMNS, p->dim, rows);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++)
            for (int half = 0; half < 2; half++) _mm512_storeu_ps(scores[i] + at + 16 * half, sum[i][half]);
    }
    for (int i = 0; i < rows; i++) {
        const int64_t place = query + i - key;
        const int64_t low = p->before < 0 || place < p->before ? 0 : place - p->before;
        const int64_t high = p->after < 0 || place + p->after >= number ? number : place + p->after + 1;
        const float sum = weigh(scores[i], number, low, high, (float)p->scale, room->most + row + i, before + i);
        room->total[row + i] = room->total[row + i] * before[i] + sum;
    }
    for (int64_t at = 0; at < wide; at += TILE_COLUMNS) {
        float *sums = room->sums + row * wide + at;
        __m512 sum[TILE_ROWS][2];
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++)
            for (int half = 0; half < 2; half++)
                sum[i][half] = _mm512_mul_ps(_mm512_loadu_ps(sums + i * wide + 16 * half), _mm512_set1_ps(before[i]));
        add_tile(sum, scores[0], SOME, room->values + at, wide, number, rows);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++)
            for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums + i * wide + 16 * half, sum[i][half]);
    }
}

static __attribute__((target(WIDER))) void attend(const void *job, int64_t begin, int64_t end) {
    const Attention *p = job;
    const int64_t wide = (p->dim + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS;
    Room room;
    for (int64_t piece = begin; piece < end; piece++) {
        const int32_t *own = p->pieces + piece / p->num_heads * 4;
        const int64_t head = piece % p->num_heads, text = own[0], length = own[1], first = own[2];
        const int64_t queries = length - first < QUERIES ? length - first : QUERIES;
        const int64_t row_of_queries = own[3] + first; /* query 0 itself may be before all rows */
        const float *q = p->q + row_of_queries * p->of_q + head * p->dim;
        for (int64_t i = 0; i < queries; i++) room.most[i] = LEAST, room.total[i] = 0.0f;
        memset(room.sums, 0, queries * wide * sizeof(float));
        int64_t from = p->before < 0 || first < p->before ? 0 : first - p->before, until = length;
        if (p->after >= 0 && first + queries + p->after < length) until = first + queries + p->after;
        from -= from % SOME; /* so that a query's sums don't depend on where its piece begins */
        for (int64_t key = from; key < until; key += SOME) {
            const int64_t number = until - key < SOME ? until - key : SOME;
            pack(p, &room, text + key, number, head * p->num_kv_heads / p->num_heads, wide);
#define MEET(rows) meet(p, &room, q, row, first + row, key, number, wide, rows)
            IN_TILES(0, queries, MEET);
        }
        for (int64_t i = 0; i < queries; i++) {
            float *out = p->out + ((row_of_queries + i) * p->num_heads + head) * p->dim;
            for (int64_t at = 0; at < p->dim; at++) out[at] = room.sums[i * wide + at] / room.total[i];
        }
    }
}

void baton_texts_attend(const Attention *p) { baton_in_parallel(attend, p, p->num_pieces * p->num_heads, 1, p->threads); }
#endif
