"""Triton version of `mask_rows`. R rows, V vocabulary; only forbidden entries are written."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel
from engine.kernels.sampling.words import SamplingInputs, mask_words

BLOCK = 4096  # tokens of a program


def mask_rows(logits: torch.Tensor, inputs: SamplingInputs) -> None:
    vocab_size, row_stride = logits.shape[1], logits.stride(0)
    variant = (logits.device, logits.dtype, logits.data_ptr() % 16, row_stride, vocab_size)
    _MASK.launch(
        (inputs.masked, -(-vocab_size // BLOCK)), variant,
        logits, inputs.words, inputs.masked_at, inputs.masks_at, vocab_size, row_stride, mask_words(vocab_size), BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["masked_at", "masks_at"])
def _mask(logits_RV, words, masked_at, masks_at, vocab_size, row_stride, width, BLOCK: tl.constexpr):
    masked = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    bits = tl.load(words + masks_at + masked * width + at // 64, mask=inside, other=-1)
    forbidden = inside & (((bits >> (at % 64)) & 1) == 0)
    row = tl.load(words + masked_at + masked)
    tl.store(logits_RV + row * row_stride + at, float("-inf"), mask=forbidden)


_MASK = Kernel(_mask, num_warps=4)
