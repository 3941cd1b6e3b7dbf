/* What the kernels share: threads, and e to a power, which every processor computes alike. */
#pragma once
#include "vectors.h"

/* `work(job, begin, end)` over runs of `chunk` until `end`, by so many threads. */
typedef void (*Work)(const void *job, int64_t begin, int64_t end);
void baton_in_parallel(Work work, const void *job, int64_t end, int64_t chunk, int64_t threads);

/* e to the power of x, within 2 units in the last place between 2^-126 and 2^127, beyond them one of these; NaN stays. */
INLINE(NARROW) Floats power_of_e(Floats x) {
    x = max8(set8(-87.3f), min8(set8(88.0f), x)); /* NaN is the second operand */
    const Floats whole = round8(mul8(x, set8(1.44269504f)));
    Floats rest = fnma8(whole, set8(0.693359375f), x);
    rest = fnma8(whole, set8(-2.12194440e-4f), rest);
    Floats sum = set8(1.9875691500e-4f);
    sum = fma8(sum, rest, set8(1.3981999507e-3f));
    sum = fma8(sum, rest, set8(8.3334519073e-3f));
    sum = fma8(sum, rest, set8(4.1665795894e-2f));
    sum = fma8(sum, rest, set8(1.6666665459e-1f));
    sum = fma8(sum, rest, set8(5.0000001201e-1f));
    sum = fma8(sum, mul8(rest, rest), add8(rest, set8(1.0f)));
    return times_power8(sum, whole);
}
