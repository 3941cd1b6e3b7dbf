/* Products of rows of floats with packed matrices, with what follows them: a bias, an activation, a gate, a sum; LayerNorm. AVX-512.

   A panel is 32 outputs [K, 32], the last one of a matrix with zeros behind them. Of a gated product it has 16 outputs of the gate,
   and beside them those of up. A row's sums are taken input by input: it depends neither on its batch nor on the number of threads. */
#ifdef __x86_64__
#include "wide.h"

enum { ROWS_AT_ONCE = 96, PANELS_AT_ONCE = 4 };
enum { NONE, GELU, GELU_TANH, SILU, RELU, TANH };

typedef struct {
    const float *x;      /* [T, of_row], K of each */
    const float *panels; /* [panels, K, 32] */
    const float *bias;   /* [panels, 32], or NULL */
    const float *added;  /* [T, N], or NULL */
    float *out;          /* [T, N] */
    int64_t num_rows, inputs, outputs, of_row, activation, is_gated, threads;
} Product;

/* 1 / (1 + e^-x) */
INLINE(WIDER) __m512 sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, power_of_e_wide(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

/* erf(x / sqrt 2) / 2 for x from 0 to 6, by 32 polynomials of degree 4 (Chebyshev's, within 5e-8): coefficients of each power. */
static const float NORMAL[5][32] = {
    {
        4.4227515e-09f, 0.0743656904f, 0.146169767f, 0.213112295f, 0.27337265f, 0.325749278f, 0.369705468f, 0.40532425f,
        0.43319279f, 0.454246372f, 0.469603628f, 0.480419934f, 0.487775534f, 0.492605388f, 0.495667547f, 0.497542113f,
        0.498650104f, 0.499282449f, 0.499630928f, 0.499816328f, 0.499911577f, 0.499958843f, 0.499981463f, 0.499991924f,
        0.499996603f, 0.499998629f, 0.499999464f, 0.499999791f, 0.499999911f, 0.49999997f, 0.5f, 0.5f,
    },
    {
        0.0748014525f, 0.0734981075f, 0.069722712f, 0.0638563856f, 0.0564633049f, 0.0482014529f, 0.0397270024f, 0.0316113606f,
        0.024284672f, 0.0180116259f, 0.0128974859f, 0.00891638082f, 0.00595118525f, 0.00383485993f, 0.00238575949f, 0.00143296248f,
        0.000830948004f, 0.000465204212f, 0.000251445628f, 0.000131212451f, 6.61053273e-05f, 3.21534899e-05f, 1.50990627e-05f, 6.84544875e-06f,
        2.99628937e-06f, 1.26617999e-06f, 5.16579064e-07f, 2.03473448e-07f, 7.73763347e-08f, 2.84078183e-08f, 1.0069245e-08f, 3.44576057e-09f,
    },
    {
        1.77494076e-06f, -0.00129046349f, -0.00245020888f, -0.00336707965f, -0.00397034455f, -0.00423720665f, -0.00419098791f, -0.00389077305f,
        -0.00341600878f, -0.00285023917f, -0.002267604f, -0.00172427541f, -0.0012553354f, -0.000876201317f, -0.00058693171f, -0.000377629854f,
        -0.000233521379f, -0.000138868229f, -7.94491134e-05f, -4.37469389e-05f, -2.31908252e-05f, -1.18389153e-05f, -5.82151142e-06f, -2.75787829e-06f,
        -1.2589436e-06f, -5.53855045e-07f, -2.34857112e-07f, -9.60022462e-08f, -3.78334413e-08f, -1.43756917e-08f, -5.26717869e-09f, -1.86104876e-09f,
    },
    {
        -0.000443275232f, -0.000419761345f, -0.000353914016f, -0.000256833475f, -0.000144057136f, -3.21262123e-05f, 6.47308407e-05f, 0.000136965435f,
        0.000180671734f, 0.00019715348f, 0.000191483326f, 0.000170630068f, 0.00014170348f, 0.000110688532f, 8.18059125e-05f, 5.7435027e-05f,
        3.84177911e-05f, 2.45348165e-05f, 1.498447e-05f, 8.76329977e-06f, 4.91258061e-06f, 2.64199775e-06f, 1.36407311e-06f, 6.76515754e-07f,
        3.22453531e-07f, 1.47770649e-07f, 6.51326459e-08f, 2.76207768e-08f, 1.12724861e-08f, 4.42849002e-09f, 1.67509728e-09f, 6.10178463e-10f,
    },
    {
        5.72350973e-06f, 1.61885346e-05f, 2.39407455e-05f, 2.78784501e-05f, 2.77396066e-05f, 2.40778609e-05f, 1.80340649e-05f, 1.09940174e-05f,
        4.24536165e-06f, -1.27267617e-06f, -5.07952973e-06f, -7.12822748e-06f, -7.68764221e-06f, -7.18916772e-06f, -6.087565e-06f, -4.76556352e-06f,
        -3.48960498e-06f, -2.40772442e-06f, -1.57303805e-06f, -9.76528781e-07f, -5.77510207e-07f, -3.25997036e-07f, -1.7591897e-07f, -9.0863459e-08f,
        -4.49652617e-08f, -2.1337085e-08f, -9.71547109e-09f, -4.2473558e-09f, -1.78368387e-09f, -7.1986217e-10f, -2.79310047e-10f, -1.04225732e-10f,
    },
};

/* The share of a normal distribution below x. */
INLINE(WIDER) __m512 below(__m512 x) {
    const __m512 place = _mm512_min_ps(_mm512_set1_ps(31.99999f), _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(32.0f / 6.0f)));
    const __m512i which = _mm512_cvttps_epi32(place);
    const __m512 rest = _mm512_sub_ps(place, _mm512_cvtepi32_ps(which));
#define OF_POWER(i) _mm512_permutex2var_ps(_mm512_loadu_ps(NORMAL[i]), which, _mm512_loadu_ps(NORMAL[i] + 16))
    __m512 sum = _mm512_fmadd_ps(OF_POWER(4), rest, OF_POWER(3));
    sum = _mm512_fmadd_ps(sum, rest, OF_POWER(2));
    sum = _mm512_fmadd_ps(sum, rest, OF_POWER(1));
    sum = _mm512_fmadd_ps(sum, rest, OF_POWER(0));
    const __m512 half = _mm512_set1_ps(0.5f);
    return _mm512_mask_sub_ps(_mm512_add_ps(half, sum), _mm512_movepi32_mask(_mm512_castps_si512(x)), half, sum);
}

INLINE(WIDER) __m512 activated(__m512 x, int64_t activation) {
    const __m512 one = _mm512_set1_ps(1.0f);
    switch (activation) {
    case GELU: return _mm512_mul_ps(x, below(x));
    case GELU_TANH: {
        const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), one);
        return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.59576912f))));
    }
    case SILU: return _mm512_mul_ps(x, sigmoid(x));
    case RELU: return _mm512_max_ps(_mm512_setzero_ps(), x); /* NaN is the second operand */
    case TANH: return _mm512_fmsub_ps(_mm512_set1_ps(2.0f), sigmoid(_mm512_add_ps(x, x)), one);
    }
    return x;
}

INLINE(WIDER) __mmask16 lanes(int64_t number) { return number >= 16 ? 0xffff : number <= 0 ? 0 : (__mmask16)((1u << number) - 1); }

INLINE(WIDER) void put(const Product *p, int64_t row, int64_t column, __m512 some) {
    const __mmask16 own = lanes(p->outputs - column);
    float *out = p->out + row * p->outputs + column;
    if (p->added) some = _mm512_add_ps(some, _mm512_maskz_loadu_ps(own, p->added + row * p->outputs + column));
    _mm512_mask_storeu_ps(out, own, some);
}

INLINE(WIDER) void multiply_tile(const Product *p, int64_t row, int64_t panel, const int rows) {
    __m512 sum[TILE_ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++)
            sum[i][half] = p->bias ? _mm512_loadu_ps(p->bias + panel * TILE_COLUMNS + 16 * half) : _mm512_setzero_ps();
    add_tile(sum, p->x + row * p->of_row, p->of_row, p->panels + panel * p->inputs * TILE_COLUMNS, TILE_COLUMNS, p->inputs, rows);
    float found[TILE_ROWS][TILE_COLUMNS];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(found[i] + 16 * half, sum[i][half]);
    for (int i = 0; i < rows; i++) {
        const __m512 first = activated(_mm512_loadu_ps(found[i]), p->activation), second = _mm512_loadu_ps(found[i] + 16);
        if (p->is_gated) put(p, row + i, panel * 16, _mm512_mul_ps(first, second));
        else {
            put(p, row + i, panel * TILE_COLUMNS, first);
            put(p, row + i, panel * TILE_COLUMNS + 16, activated(second, p->activation));
        }
    }
}

static int64_t panels_of(const Product *p) { return (p->outputs * (1 + p->is_gated) + TILE_COLUMNS - 1) / TILE_COLUMNS; }

static int64_t runs_of(const Product *p) { return (panels_of(p) + PANELS_AT_ONCE - 1) / PANELS_AT_ONCE; }

static __attribute__((target(WIDER))) void multiply(const void *job, int64_t begin, int64_t end) {
    const Product *p = job;
    const int64_t panels = panels_of(p), runs = runs_of(p);
    for (int64_t piece = begin; piece < end; piece++) {
        const int64_t first_row = piece / runs * ROWS_AT_ONCE, first = piece % runs * PANELS_AT_ONCE;
        const int64_t last_row = first_row + ROWS_AT_ONCE < p->num_rows ? first_row + ROWS_AT_ONCE : p->num_rows;
        for (int64_t panel = first; panel < panels && panel < first + PANELS_AT_ONCE; panel++) {
#define MULTIPLY(rows) multiply_tile(p, row, panel, rows)
            IN_TILES(first_row, last_row, MULTIPLY);
        }
    }
}

void baton_floats_product(const Product *p) {
    const int64_t blocks = (p->num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    baton_in_parallel(multiply, p, blocks * runs_of(p), 1, p->threads);
}

typedef struct {
    const float *x;      /* [T, K] */
    const float *weight; /* [K] */
    const float *bias;   /* [K], or NULL */
    float *out;          /* [T, K]; may be x */
    int64_t num_rows, inputs, threads;
    double eps;
} Norm;

static __attribute__((target(WIDER))) void norm(const void *job, int64_t begin, int64_t end) {
    const Norm *p = job;
    for (int64_t row = begin; row < end; row++) {
        const float *x = p->x + row * p->inputs;
        float *out = p->out + row * p->inputs;
        __m512 total = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
        for (int64_t at = 0; at < p->inputs; at += 16) total = _mm512_add_ps(total, _mm512_maskz_loadu_ps(lanes(p->inputs - at), x + at));
        const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(total) / (float)p->inputs);
        for (int64_t at = 0; at < p->inputs; at += 16) {
            const __mmask16 own = lanes(p->inputs - at);
            const __m512 some = _mm512_maskz_sub_ps(own, _mm512_maskz_loadu_ps(own, x + at), mean);
            squares = _mm512_fmadd_ps(some, some, squares);
        }
        const float variance = _mm512_reduce_add_ps(squares) / (float)p->inputs;
        const __m512 inverse = _mm512_set1_ps(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(variance + (float)p->eps))));
        for (int64_t at = 0; at < p->inputs; at += 16) {
            const __mmask16 own = lanes(p->inputs - at);
            const __m512 some = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(own, x + at), mean), inverse);
            const __m512 bias = p->bias ? _mm512_maskz_loadu_ps(own, p->bias + at) : _mm512_setzero_ps();
            _mm512_mask_storeu_ps(out + at, own, _mm512_fmadd_ps(some, _mm512_maskz_loadu_ps(own, p->weight + at), bias));
        }
    }
}

void baton_floats_norm(const Norm *p) { baton_in_parallel(norm, p, p->num_rows, 32, p->threads); }

typedef struct {
    const float *tables[3];    /* [V, K]; the last ones may be NULL */
    const int32_t *numbers[3]; /* [T] */
    float *out;                /* [T, K] */
    int64_t num_rows, inputs, threads;
    double multiplier; /* of the first table's rows */
} Embedding;

static __attribute__((target(WIDER))) void embed(const void *job, int64_t begin, int64_t end) {
    const Embedding *p = job;
    const __m512 multiplier = _mm512_set1_ps((float)p->multiplier);
    for (int64_t row = begin; row < end; row++)
        for (int64_t at = 0; at < p->inputs; at += 16) {
            const __mmask16 own = lanes(p->inputs - at);
            __m512 sum = _mm512_mul_ps(_mm512_maskz_loadu_ps(own, p->tables[0] + p->numbers[0][row] * p->inputs + at), multiplier);
            for (int i = 1; i < 3 && p->tables[i]; i++)
                sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(own, p->tables[i] + p->numbers[i][row] * p->inputs + at));
            _mm512_mask_storeu_ps(p->out + row * p->inputs + at, own, sum);
        }
}

void baton_floats_embed(const Embedding *p) { baton_in_parallel(embed, p, p->num_rows, 64, p->threads); }

typedef struct {
    const float *x;                  /* [T, K] */
    const int32_t *begins, *lengths; /* [B] */
    float *out;                      /* [B, K] */
    int64_t num_texts, inputs, threads;
} Means;

static __attribute__((target(WIDER))) void average(const void *job, int64_t begin, int64_t end) {
    const Means *p = job;
    for (int64_t text = begin; text < end; text++)
        for (int64_t at = 0; at < p->inputs; at += 16) {
            const __mmask16 own = lanes(p->inputs - at);
            const float *x = p->x + p->begins[text] * p->inputs + at;
            __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
            for (int64_t row = 0; row < p->lengths[text]; row++, x += p->inputs) {
                const __m512 some = _mm512_maskz_loadu_ps(own, x);
                low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(some)));
                high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(some, 1)));
            }
            const __m512d share = _mm512_set1_pd(1.0 / (double)p->lengths[text]);
            const __m256 first = _mm512_cvtpd_ps(_mm512_mul_pd(low, share)), second = _mm512_cvtpd_ps(_mm512_mul_pd(high, share));
            _mm512_mask_storeu_ps(p->out + text * p->inputs + at, own, _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1));
        }
}

void baton_floats_means(const Means *p) { baton_in_parallel(average, p, p->num_texts, 1, p->threads); }
#endif
