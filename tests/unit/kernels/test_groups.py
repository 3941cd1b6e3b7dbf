"""Packing of 4 and 8 bits: round trips, and each checkpoint's order against a loop over its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.kernels.quantised import repack
from engine.kernels.quantised.groups import Groups, allocate, codes_of, dequantised, pack, values
from engine.kernels.quantised.repack import Unpacked
from tests.unit.kernels.group_checks import KINDS, matrix

K, N, GROUP = 256, 24, 64


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(3, 128), (5, 100), (2, 7, 192), (1, 1), (4, 2880)])
def test_codes_come_back(bits: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    packed = pack(codes, torch.ones(*shape[:-1], 1), bits=bits, group=shape[-1])
    assert torch.equal(codes_of(packed), codes)
    assert packed.codes.shape[-1] % 16 == 0


@pytest.mark.parametrize(
    ("inputs", "bits", "group", "words"),
    [
        (4096, 4, 128, 32),
        (4096, 4, 4096, 32),
        (4096, 4, 32, 32),
        (4096, 8, 16, 16),  # a plane of 32 would be two groups
        (2880, 4, 32, 32),  # 192 inputs more
        (384, 4, 128, 16),  # not 128 more
        (384, 8, 128, 32),
        (100, 4, 100, 16),
    ],
)
def test_blocks_are_wide_where_groups_and_inputs_let_them(inputs: int, bits: int, group: int, words: int) -> None:
    packed = pack(torch.zeros(2, inputs), torch.ones(2, -(-inputs // group)), bits=bits, group=group)
    assert packed.words == words
    empty = allocate((2, inputs), bits=bits, group=group, device=torch.device("cpu"))
    assert (empty.words, empty.codes.shape, empty.group) == (words, packed.codes.shape, packed.group)


def test_where_a_code_is() -> None:
    """Column `W * plane + word` of a block, planes 0 to 3 in the bytes' low halves: another order would be other numbers."""
    codes = torch.arange(512, dtype=torch.uint8).view(1, -1) % 13
    words = pack(codes, torch.ones(1, 4), bits=4, group=128).codes[0].tolist()
    for column, code in enumerate(codes[0].tolist()):
        block, plane, word = column // 256, column % 256 // 32, column % 32
        assert words[32 * block + word] >> 8 * (plane % 4) + plane // 4 * 4 & 15 == code


@pytest.mark.parametrize("name", KINDS)
def test_elements_are_those_of_the_format(name: str) -> None:
    torch.manual_seed(2)
    weight, expected = matrix(KINDS[name], 12, 256, "cpu")
    torch.testing.assert_close(values(weight).double(), expected, rtol=1e-6, atol=1e-7)
    rounded = dequantised(weight.codes, weight, torch.bfloat16)
    assert torch.equal(rounded, values(weight).bfloat16())
    assert torch.equal(values(weight.rows(3, 9)), values(weight)[3:9])


def test_experts_are_packed_alike() -> None:
    codes, scales = torch.randint(0, 16, (3, 8, 128)), torch.rand(3, 8, 4)
    together = pack(codes, scales, bits=4, group=32)
    for expert in range(3):
        alone = pack(codes[expert], scales[expert], bits=4, group=32)
        assert torch.equal(values(together[expert]), values(alone))


@pytest.mark.parametrize(
    ("codes", "scales", "how", "said"),
    [
        ((4, 128), (4, 2), {"bits": 4, "group": 48}, "a group has 16, 32, 64, 128 or all 128 inputs, not 48"),
        ((4, 128), (4, 2), {"bits": 3, "group": 64}, "4 or 8 bits"),
        ((4, 128), (4, 3), {"bits": 4, "group": 64}, "don't go with scales"),
        ((4, 128), (4, 1), {"bits": 8, "group": 128, "is_e2m1": True}, "floats 4"),
        ((4, 128), (4, 1), {"bits": 8, "group": 128, "levels": torch.zeros(16)}, "levels are named by codes of 4 bits"),
    ],
)
def test_what_does_not_suit_is_refused(
    codes: tuple[int, ...], scales: tuple[int, ...], how: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        pack(torch.zeros(codes, dtype=torch.uint8), torch.ones(scales), **how)


def _drawn(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K], zeros [N, G] with both ends of their range, scales [N, G]."""
    draw = np.random.default_rng(bits)
    codes = draw.integers(0, 1 << bits, (N, K))
    zeros = draw.integers(0, 1 << bits, (N, K // GROUP))
    zeros[0, 0], zeros[1, 0] = 0, (1 << bits) - 1
    return codes, zeros, draw.random((N, K // GROUP)).astype(np.float16)


def _words(shape: tuple[int, int]) -> np.ndarray:
    return np.zeros(shape, dtype=np.uint32)


def _signed(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int32).copy())


def _check(found: Unpacked, bits: int, codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray) -> None:
    weight = pack(found.codes, found.scales, bits=bits, group=GROUP, zeros=found.zeros)
    expected = np.empty((N, K))
    for n in range(N):
        for k in range(K):
            zero = 1 << (bits - 1) if zeros is None else zeros[n, k // GROUP]
            expected[n, k] = (float(codes[n, k]) - float(zero)) * float(scales[n, k // GROUP])
    assert np.array_equal(values(weight).double().numpy(), expected.astype(np.float32).astype(np.float64))
    assert isinstance(weight, Groups)
    assert weight.scales.dtype == found.scales.dtype


@pytest.mark.parametrize("has_zeros", [True, False])
def test_awq(has_zeros: bool) -> None:
    codes, zeros, scales = _drawn(4)
    qweight, qzeros = _words((K, N // 8)), _words((K // GROUP, N // 8))
    for word in range(N // 8):
        for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            n = 8 * word + column
            qweight[:, word] |= codes[n].astype(np.uint32) << np.uint32(4 * nibble)
            qzeros[:, word] |= zeros[n].astype(np.uint32) << np.uint32(4 * nibble)
    found = repack.from_awq(_signed(qweight), _signed(qzeros) if has_zeros else None, torch.from_numpy(scales.T.copy()))
    _check(found, 4, codes, zeros if has_zeros else None, scales)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("less_one", [True, False])
def test_gptq(bits: int, less_one: bool) -> None:
    codes, zeros, scales = _drawn(bits)
    a_word, mask = 32 // bits, (1 << bits) - 1
    qweight, qzeros = _words((K // a_word, N)), _words((K // GROUP, N // a_word))
    for k in range(K):
        qweight[k // a_word] |= codes[:, k].astype(np.uint32) << np.uint32(bits * (k % a_word))
    for n in range(N):
        stored = ((zeros[n] - 1) & mask if less_one else zeros[n]).astype(np.uint32)
        qzeros[:, n // a_word] |= stored << np.uint32(bits * (n % a_word))
    scales_KN = torch.from_numpy(scales.T.copy())
    found = repack.from_gptq(_signed(qweight), _signed(qzeros), scales_KN, bits=bits, less_one=less_one)
    _check(found, bits, codes, zeros, scales)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_compressed_tensors(bits: int, has_zeros: bool) -> None:
    codes, zeros, scales = _drawn(bits)
    packed, packed_zeros = _words((N, K * bits // 32)), _words((-(-N * bits // 32), K // GROUP))
    for bit in range(K * bits):
        packed[:, bit // 32] |= ((codes[:, bit // bits] >> (bit % bits)) & 1).astype(np.uint32) << np.uint32(bit % 32)
    for bit in range(N * bits):
        of = ((zeros[bit // bits] >> (bit % bits)) & 1).astype(np.uint32)
        packed_zeros[bit // 32] |= of << np.uint32(bit % 32)
    found = repack.from_packed_rows(
        _signed(packed), _signed(packed_zeros) if has_zeros else None, torch.from_numpy(scales), bits=bits, inputs=K
    )
    _check(found, bits, codes, zeros if has_zeros else None, scales)


def test_signed_bytes() -> None:
    codes, zeros, scales = _drawn(8)
    weight, lower = torch.from_numpy((codes - 128).astype(np.int8)), torch.from_numpy((zeros - 128).astype(np.int8))
    _check(repack.from_signed(weight, None, torch.from_numpy(scales)), 8, codes, None, scales)
    _check(repack.from_signed(weight, lower, torch.from_numpy(scales)), 8, codes, zeros, scales)


def test_inputs_in_the_order_of_their_activations() -> None:
    groups = torch.arange(K) // GROUP
    assert repack.by_group(groups, GROUP) is None
    shuffled = groups[torch.randperm(K)]
    order = repack.by_group(shuffled, GROUP)
    assert order is not None
    assert torch.equal(shuffled[order], groups)
    shuffled[0] = (shuffled[0] + 1) % 4
    with pytest.raises(ValueError, match="groups of 64"):
        repack.by_group(shuffled, GROUP)
