"""Sampling on the device, without sorting and without the host.

Reading order: `words` (a pass's inputs), `choose` (the public functions, in plain torch), `philox` (random numbers that both
versions share), `typical`, `triton_mask`, `triton_choose`, `triton_filter` with `triton_typical`, and their common
`triton_ranks` and `triton_scores`.
"""

from engine.kernels.sampling.choose import choose, choose_rows, count_tokens, mask_rows
from engine.kernels.sampling.typical import leave_typical
from engine.kernels.sampling.words import GENERATED, MAX_VOCAB, RowWord, SampledTokens, SamplingInputs, mask_words

__all__ = [
    "GENERATED",
    "MAX_VOCAB",
    "RowWord",
    "SampledTokens",
    "SamplingInputs",
    "choose",
    "choose_rows",
    "count_tokens",
    "leave_typical",
    "mask_rows",
    "mask_words",
]
