"""What a CPU computes with is, bit by bit, what plain torch computes, and a row doesn't depend on its batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear as torch_linear

from engine.kernels.attention import on_cpu, reference
from engine.kernels.attention.plan import AttentionBatch, Scores
from engine.kernels.codes import decoded
from engine.kernels.linear import computes_in_bfloat16, gated_linear, linear, packed

needs_bfloat16 = pytest.mark.skipif(not computes_in_bfloat16(), reason="this processor has no bfloat16")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1152, 896), (896, 4864), (40, 24)])
def test_a_packed_weight_gives_the_same_bits(outputs: int, inputs: int, bias: bool) -> None:
    weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(9, inputs).bfloat16()
    offset = torch.randn(outputs).bfloat16() if bias else None
    assert torch.equal(linear.reference(x, packed(weight), offset), torch_linear(x, weight, offset))


@needs_bfloat16
@pytest.mark.parametrize(("outputs", "inputs"), [(1152, 896), (896, 4864), (2048, 8192), (40, 24)])
def test_a_row_does_not_depend_on_its_batch(outputs: int, inputs: int) -> None:
    weight, x = packed(torch.randn(outputs, inputs).bfloat16()), torch.randn(40, inputs).bfloat16()
    assert weight.is_mkldnn
    whole, gated = linear.reference(x, weight, None), gated_linear.reference(x, weight, None)
    for count in (1, 2, 3, 7, 16, 33):
        assert torch.equal(linear.reference(x[:count], weight, None), whole[:count])
        assert torch.equal(gated_linear.reference(x[:count], weight, None), gated[:count])


def test_other_dtypes_stay_as_they_are() -> None:
    for dtype in (torch.float32, torch.float16):
        weight = torch.randn(8, 8).to(dtype)
        assert packed(weight) is weight


@pytest.mark.parametrize("how", [Scores(scale=0.3), Scores(scale=0.3, window=5), Scores(scale=0.3, softcap=4.0)])
@pytest.mark.parametrize("lengths", [[(1, 1), (1, 9), (1, 30)], [(7, 7), (5, 21), (1, 17)], [(30, 30)]])
def test_attention_is_the_reference_s(how: Scores, lengths: list[tuple[int, int]]) -> None:
    heads, kv_heads, size, block = 6, 2, 16, 4
    pool = torch.full((40, 2, block, kv_heads, size), float("nan"))
    table = torch.randperm(40)[: 3 * 10].view(3, 10).int()
    for row, (_, context) in enumerate(lengths):
        for position in range(context):
            pool[table[row, position // block], :, position % block] = torch.randn(2, kv_heads, size)
    q = torch.randn(sum(new for new, _ in lengths), heads, size)
    starts = [0]
    for new, _ in lengths:
        starts.append(starts[-1] + new)
    contexts = [context for _, context in lengths]
    batch = AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_len=torch.tensor(contexts, dtype=torch.int32),
        block_table=table[: len(lengths)],
        max_query_len=max(new for new, _ in lengths),
        max_context_len=max(contexts),
    )

    out = on_cpu.attend(q, pool, batch, how)
    torch.testing.assert_close(out, reference.attend(q, pool, batch, how), rtol=1e-5, atol=1e-5)
    for row, (new, _) in enumerate(lengths):  # alone
        one = AttentionBatch(
            query_start=torch.tensor([0, new], dtype=torch.int32),
            context_len=batch.context_len[row : row + 1],
            block_table=table[row : row + 1],
            max_query_len=new,
            max_context_len=contexts[row],
        )

        alone = on_cpu.attend(q[starts[row] : starts[row + 1]], pool, one, how)
        if not how.softcap:
            assert torch.equal(alone, out[starts[row] : starts[row + 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_of_fp8_is_torch_s_number(dtype: torch.dtype) -> None:
    factor = torch.tensor(0.3)
    for codes in (torch.arange(256), torch.tensor([code for code in range(256) if code & 0x7F != 0x7F])):
        pages = codes.to(torch.uint8).view(torch.float8_e4m3fn)  # with NaN, and without: another way
        expected = (pages.float() * factor).to(dtype)
        torch.testing.assert_close(decoded(pages, None, factor, dtype), expected, rtol=0, atol=0, equal_nan=True)
