"""Float32 kernels of AVX-512: products with what follows them, LayerNorm, attention of whole texts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, relu, scaled_dot_product_attention, silu

from engine.kernels.native import floats
from tests.unit.kernels.in_c import drawn

pytestmark = pytest.mark.skipif(not floats.is_usable(), reason="needs AVX-512 and a compiler")
ACTS = {
    "": lambda x: x,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "silu": silu,
    "relu": relu,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("activation", ACTS)
@pytest.mark.parametrize("shape", [(1, 5, 3), (23, 70, 50), (300, 64, 160)], ids=str)
def test_products_are_those_of_torch(shape: tuple[int, int, int], activation: str, threads: None) -> None:
    rows, inputs, outputs = shape
    x, weight, bias = drawn(rows, inputs), drawn(outputs, inputs), drawn(outputs)
    wanted = ACTS[activation](x.double() @ weight.double().T + bias.double()).float()
    found = floats.product(x, floats.packed(weight, bias, activation))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)
    residual = drawn(rows, outputs, seed=1)
    onto = residual.clone()
    assert floats.product(x, floats.packed(weight, bias, activation), onto=onto) is onto
    torch.testing.assert_close(onto, residual + wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("size", [16, 20, 48])
def test_gated_products_are_those_of_torch(size: int, threads: None) -> None:
    x, weight, bias = drawn(23, 70), drawn(2 * size, 70), drawn(2 * size)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=1)
    found = floats.product(x, floats.packed(weight, bias, "silu", is_gated=True))
    torch.testing.assert_close(found, (silu(gate) * up).float(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("is_gated", [False, True])
def test_rows_do_not_depend_on_their_batch_or_threads(is_gated: bool, threads: None) -> None:
    """In batches of every size up to two tiles and of more, whatever lies between rows."""
    x, weight = drawn(211, 96), floats.packed(drawn(100, 96), drawn(100), "gelu", is_gated=is_gated)
    residual = drawn(211, weight.outputs, seed=1)
    whole, sums = floats.product(x, weight), floats.product(x, weight, onto=residual.clone())
    among_others = torch.cat((x, drawn(211, 5)), dim=1)[:, :96]
    assert torch.equal(floats.product(among_others, weight), whole)
    for count in (*range(1, 26), 97, 193):
        for begin in (0, 211 - count):
            own = slice(begin, begin + count)
            assert torch.equal(floats.product(x[own], weight), whole[own]), (begin, count)
            assert torch.equal(floats.product(x[own], weight, onto=residual[own].clone()), sums[own]), (begin, count)
    torch.set_num_threads(1)
    assert torch.equal(floats.product(x, weight), whole)
    assert torch.equal(floats.product(x, weight, onto=residual.clone()), sums)


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 31, 33])
def test_nothing_is_written_beside_a_product(outputs: int, threads: None) -> None:
    around = torch.full((9 + 2, outputs), 7.0)
    floats.product(drawn(9, 5), floats.packed(drawn(outputs, 5), None), onto=around[1:-1])
    assert (around[[0, -1]] == 7).all()
    assert (around[1:-1] != 7).all()


def test_no_rows_give_none() -> None:
    assert floats.product(drawn(0, 5), floats.packed(drawn(4, 5), None)).shape == (0, 4)
    assert floats.layer_norm(drawn(0, 5), drawn(5), None, 1e-5).shape == (0, 5)
    assert floats.attend(*[drawn(0, 2, 8)] * 3, floats.pieces_of([0, 0]), scale=1).shape == (0, 2, 8)


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 5 inputs"):
        floats.product(drawn(2, 5), floats.packed(drawn(4, 6), None))


@pytest.mark.parametrize(
    "onto", [torch.zeros(2, 3), torch.zeros(1, 4), torch.zeros(4, 2).T], ids=lambda x: str(x.stride())
)
def test_sums_of_another_shape_are_refused(onto: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="don't go onto"):
        floats.product(drawn(2, 6), floats.packed(drawn(4, 6), None), onto=onto)


def test_what_is_no_number_stays_none() -> None:
    """A broken weight shows in its outputs alone, and in all of them."""
    weight = drawn(40, 8)
    weight[3, 2] = torch.nan
    for activation in ACTS:
        found = floats.product(drawn(5, 8), floats.packed(weight, None, activation))
        assert found.isnan().all(0).nonzero().tolist() == [[3]], activation
        assert not found[:, :3].isnan().any()


@pytest.mark.parametrize("size", [3, 16, 100])
def test_layer_norm_is_that_of_torch(size: int, threads: None) -> None:
    x, weight, bias = 30 + 5 * drawn(70, size), drawn(size), drawn(size, seed=1)
    for its in (bias, None):
        wanted = layer_norm(x.double(), (size,), weight.double(), None if its is None else its.double(), 1e-5)
        found = floats.layer_norm(x, weight, its, 1e-5)
        torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=2e-5)
        assert all(torch.equal(floats.layer_norm(x[[at]], weight, its, 1e-5)[0], found[at]) for at in (0, 33, 69))
        assert torch.equal(floats.layer_norm(x.T.contiguous().T, weight, its, 1e-5), found)


@pytest.mark.parametrize("size", [3, 16, 100])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_rows_of_tables_are_summed(others: int, size: int, threads: None) -> None:
    tables = [
        (drawn(30 + at, size, seed=at), torch.arange(150, dtype=torch.int32) % 7 + 20) for at in range(1 + others)
    ]
    wanted = 3 * tables[0][0][tables[0][1]] + sum(table[rows] for table, rows in tables[1:])
    torch.testing.assert_close(floats.sums_of_rows(tables, 3.0), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row", [-1, 5])
def test_rows_that_a_table_lacks_are_refused(row: int) -> None:
    lacking = (drawn(5, 8), torch.tensor([0, row], dtype=torch.int32))
    with pytest.raises(IndexError, match="of a table of 5"):
        floats.sums_of_rows([(drawn(9, 8), torch.zeros(2, dtype=torch.int32)), lacking], 1.0)
    with pytest.raises(ValueError, match="at most 3"):
        floats.sums_of_rows([(drawn(9, 8), torch.zeros(2, dtype=torch.int32))] * 4, 1.0)


@pytest.mark.parametrize("size", [3, 16, 100])
def test_means_are_of_a_texts_rows_alone(size: int, threads: None) -> None:
    x, begins, lengths = 30 + drawn(700, size), [0, 1, 50, 400], [1, 49, 333, 300]
    found = floats.means(x, *(torch.tensor(each, dtype=torch.int32) for each in (begins, lengths)))
    wanted = [x[begin : begin + length].double().mean(0) for begin, length in zip(begins, lengths, strict=True)]
    torch.testing.assert_close(found, torch.stack(wanted).float(), rtol=1e-6, atol=1e-6)


LENGTHS = (3, 50, 1, 200, 129, 33, 401)


@pytest.mark.parametrize(("before", "after"), [(-1, -1), (-1, 0), (7, 7), (140, 0), (0, 0), (130, 200)])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 3, 32), (4, 2, 20), (2, 1, 128), (1, 1, 7)])
def test_attention_is_that_of_torch(
    heads: int, kv_heads: int, size: int, before: int, after: int, threads: None
) -> None:
    product = drawn(sum(LENGTHS), (heads + 2 * kv_heads) * size)
    parts = [
        part.unflatten(1, (-1, size))
        for part in product.split([each * size for each in (heads, kv_heads, kv_heads)], 1)
    ]
    found = floats.attend(*parts, floats.pieces_of(LENGTHS), scale=0.3, before=before, after=after)
    begin = 0
    for length in LENGTHS:
        own = [part[begin : begin + length].transpose(0, 1).double() for part in parts]
        behind = torch.arange(length)[:, None] - torch.arange(length)
        seen = (behind <= (before if before >= 0 else length)) & (-behind <= (after if after >= 0 else length))
        wanted = scaled_dot_product_attention(*(each[None] for each in own), attn_mask=seen, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(
            found[begin : begin + length], wanted[0].transpose(0, 1).float(), rtol=1e-5, atol=1e-5
        )
        alone = floats.attend(
            *(part[begin : begin + length] for part in parts),
            floats.pieces_of([length]), scale=0.3, before=before, after=after,
        )  # fmt: skip
        assert torch.equal(alone, found[begin : begin + length])
        begin += length
    torch.set_num_threads(1)
    apart = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]  # head by head
    for own in (parts, apart):
        again = floats.attend(*own, floats.pieces_of(LENGTHS), scale=0.3, before=before, after=after)
        assert torch.equal(again, found)


def test_a_text_that_is_no_number_leaves_the_others_alone(threads: None) -> None:
    keys, values, lengths = drawn(80, 2, 20), drawn(80, 2, 20, seed=1), (30, 20, 30)
    wanted = floats.attend(keys, keys, values, floats.pieces_of(lengths), scale=0.3)
    broken = keys.clone()
    broken[35, 1, 3] = torch.nan
    found = floats.attend(keys, broken, values, floats.pieces_of(lengths), scale=0.3)
    is_whole = torch.ones(80, 2, dtype=torch.bool)
    is_whole[30:50, 1] = False
    assert torch.equal(found[is_whole], wanted[is_whole])
    assert found[~is_whole].isnan().all()


def test_scores_of_any_size_give_weights(threads: None) -> None:
    """Weights of one key or of all, however far scores are from 0."""
    keys, values = drawn(60, 1, 32), drawn(60, 1, 32, seed=1)
    for scale in (1e-8, 1e4, 1e10):
        found = floats.attend(keys, keys, values, floats.pieces_of([60]), scale=scale)
        wanted = scaled_dot_product_attention(
            *(each.transpose(0, 1)[None].double() for each in (keys, keys, values)), scale=scale
        )
        torch.testing.assert_close(found, wanted[0].transpose(0, 1).float(), rtol=1e-4, atol=1e-5)
