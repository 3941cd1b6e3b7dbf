"""Blocks of GGUF mean the same numbers to us and to `gguf`, bit for bit, whatever the bytes are."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.kernels.quantised.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS, DECODERS, decoded
from modelfiles.gguf import KINDS

NUM_BLOCKS = 512


@pytest.mark.parametrize("kind", DECODERS)
def test_random_bytes_mean_the_same_numbers(kind: str) -> None:
    random = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES[kind]), dtype=np.uint8)
    random[0], random[1] = 0, 255
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.dequantize(random, gguf.GGMLQuantizationType[kind])
    found = decoded(kind, torch.from_numpy(random)).values().numpy()
    assert found.shape == expected.shape == (NUM_BLOCKS, BLOCK_ELEMENTS[kind])
    known = ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~known)
    assert np.array_equal(found[known].view(np.uint32), expected[known].view(np.uint32))
    assert known.mean() > 0.9


def test_kinds_are_those_of_the_format() -> None:
    assert {number: sizes[1:] for number, sizes in KINDS.items()} == {
        int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()
    }
    assert all(gguf.GGMLQuantizationType(number).name == name for number, (name, _, _) in KINDS.items())
