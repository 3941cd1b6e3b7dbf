"""Triton version of `embedding`: one program a token. T tokens, V vocabulary, E features."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.embedding import InputTokens
from engine.kernels.launch import Kernel


def embed(table: torch.Tensor, tokens: InputTokens) -> torch.Tensor:
    num_tokens, num_features = tokens.known.shape[0], table.shape[1]
    out = table.new_empty((num_tokens, num_features))
    pdl = describe(table.device).has_tma
    _EMBED.launch(
        (num_tokens,), None,
        tokens.known, tokens.sources, tokens.newest, table, out,
        NUM_FEATURES=num_features, E=triton.next_power_of_2(num_features), PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _embed(
    token_ids_T, sources_T, newest_R, table_VE, out_TE,
    NUM_FEATURES: tl.constexpr, E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, E)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = tl.load(sources_T + row)
    token = tl.load(token_ids_T + row).to(tl.int64)
    if source >= 0:
        token = tl.load(newest_R + source)
    x = tl.load(table_VE + token * NUM_FEATURES + at, mask=at < NUM_FEATURES)
    tl.store(out_TE + row * NUM_FEATURES + at, x, mask=at < NUM_FEATURES)


_EMBED = Kernel(_embed)
