# mypy: allow-untyped-calls
"""Checkpoints of 4 and 8 bits in groups on a CPU: their codes stay, in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import read_model_spec
from engine.formats.grouped import TiledLinear
from engine.formats.int4 import quantise_groups
from engine.kernels import native
from engine.kernels.experts import Experts, mixture
from engine.kernels.experts.routing import Choice
from engine.kernels.quantised import tiles
from engine.kernels.quantised.tiles import Tiles
from engine.model.decoder import Decoder
from engine.model.layers.sparse_mlp import SparseMlp
from engine.weights.loader import load_weights
from tests.unit.engine.formats.checkpoints import Tensors, plain_of, written
from tests.unit.engine.formats.forms import FORMS, HEAD, MOE, source_of
from tests.unit.engine.formats.loading import Form, Tiny
from tests.unit.engine.insides import parts_of, products_of
from tests.unit.engine.ranks import engine_of_ranks

pytestmark = pytest.mark.skipif(not native.is_suitable() or not tiles.is_usable(), reason="no C compiler, or no AVX2")

OF_A_PRODUCT = 0.02  # the error of rows in 8 bits and factors in 16, over the root mean square
TILED = {name: form for name, form in FORMS.items() if "fp4" not in name}


def loaded(folder: Path, *, dtype: str = "auto", quantization: str = "auto") -> Decoder:
    spec = read_model_spec(folder, dtype=dtype, quantization=quantization)
    decoder = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    load_weights(decoder.weights, folder)
    decoder.weights.settle()
    return decoder


def tiled_products(decoder: Decoder, plain: Decoder) -> Iterator[tuple[TiledLinear, torch.Tensor]]:
    """Each with the matrix [N, K] that it stands for."""
    for layer, theirs in zip(decoder._layers, plain._layers, strict=True):
        others = products_of(theirs)
        for name, product in products_of(layer).items():
            if isinstance(product, TiledLinear):
                yield product, others[name](torch.eye(product.weight.inputs)).T


def root_of_squares(x: torch.Tensor) -> torch.Tensor:
    return x.double().square().mean().sqrt()


@pytest.mark.parametrize("form", TILED.values(), ids=TILED)
def test_products_are_those_of_the_checkpoints_numbers(form: Form, tiny_model: Tiny, tmp_path: Path) -> None:
    source = source_of(form, tiny_model, tmp_path)
    folder = written(source, tmp_path / "quantised", form.store, form.config, keeps=form.keeps)
    decoder, plain = loaded(folder), loaded(plain_of(folder), dtype="float32")
    count = 0
    for product, matrix in tiled_products(decoder, plain):
        bias = 0 if product.bias is None else product.bias
        matrix = matrix - (0 if product.bias is None else product.bias[:, None])
        x = torch.randn(5, matrix.shape[1])
        expected = x @ matrix.T + bias
        assert root_of_squares(product(x) - expected) < OF_A_PRODUCT * root_of_squares(expected)
        residual = torch.ones_like(expected)
        product.onto(residual, x)
        assert torch.equal(residual, 1 + product(x))
        inputs = torch.arange(matrix.shape[1]) if product.order is None else product.order
        stored = product.weight.rows(torch.arange(product.weight.outputs))
        assert root_of_squares(stored - matrix[:, inputs]) < 1e-3 * root_of_squares(matrix)
        count += 1
    assert count > 0


def experts_of(decoder: Decoder) -> list[Experts]:
    parts = (part for layer in decoder._layers for part in parts_of(layer))
    return [part._mixture._experts for part in parts if isinstance(part, SparseMlp)]


@pytest.mark.parametrize("name", ["awq, experts", "int4"])
def test_experts_stay_in_4_bits(name: str, tmp_path: Path) -> None:
    case = replace(MOE, fields={**MOE.fields, "moe_intermediate_size": 64})
    if name == "int4":
        folder = case.build(tmp_path / "moe")
        decoder, plain, limit = loaded(folder, quantization="int4"), loaded(folder, dtype="float32"), 0.2
    else:
        form = FORMS[name]
        folder = written(case.build(tmp_path / "moe"), tmp_path / "q", form.store, form.config, keeps=form.keeps)
        decoder, plain, limit = loaded(folder), loaded(plain_of(folder), dtype="float32"), 2 * OF_A_PRODUCT
    for own, theirs in zip(experts_of(decoder), experts_of(plain), strict=True):
        assert isinstance(own.gate_up, Tiles)
        assert isinstance(own.down, Tiles)
        x, ids = (
            torch.randn(9, own.gate_up.inputs),
            torch.stack([torch.randperm(own.num_experts)[:2] for _ in range(9)]),
        )
        choice = Choice(ids.int(), torch.rand(9, 2))
        expected = mixture(x, choice, theirs)
        assert root_of_squares(mixture(x, choice, own) - expected) < limit * root_of_squares(expected)


def test_plain_weights_are_quantised_in_groups_of_a_tile(tiny_model: Tiny, tmp_path: Path) -> None:
    def rounded(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales = quantise_groups(weight, tiles.OF_ROWS)
        return {"weight": weight}, (codes.float() - 8) * scales.float().repeat_interleave(tiles.OF_ROWS, 1)

    folder = written(tiny_model("llama"), tmp_path / "same", rounded, {}, keeps=HEAD)
    decoder, plain = loaded(folder, quantization="int4"), loaded(plain_of(folder), dtype="float32")
    found = list(tiled_products(decoder, plain))
    assert len(found) == 4 * len(decoder._layers)
    for product, matrix in found:
        assert (product.weight.rows(torch.arange(len(matrix))) - matrix).abs().max() < 1e-6


def test_rows_are_rounded_with_the_scale_that_leaves_the_smallest_squares() -> None:
    factors = [each / -8 for each in (1.0, 0.94, 0.88, 0.82, 0.76)]
    rows = torch.randn(16, 256)
    rows[:, ::31] *= 20
    rows[3, 32:64], rows[4, 64:96] = 0, 1e-7 * torch.randn(32)
    weight = tiles.allocate(24, 256, bits=4, group=32, has_minimums=False)
    tiles.put_rounded(weight, 8, rows, factors)
    groups = rows.double().unflatten(1, (-1, 32))
    furthest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    left = []
    for factor in factors:
        scale = (furthest.float() * factor).half().double()
        left.append((groups / scale.where(scale != 0, 1.0)).round().clamp(-8, 7).mul(scale).sub(groups).square().sum(2))
    stored = weight.rows(torch.arange(8, 24)).double().unflatten(1, (-1, 32))
    assert torch.allclose((stored - groups).square().sum(2), torch.stack(left).amin(0), rtol=1e-4, atol=1e-18)


@pytest.mark.parametrize("number", [float("nan"), float("-inf"), 1e9])
def test_rows_that_float16_does_not_scale_are_refused(number: float) -> None:
    rows = torch.randn(8, 64)
    rows[5, 40] = number
    weight = tiles.allocate(8, 64, bits=4, group=32, has_minimums=False)
    with pytest.raises(ValueError, match="too large for float16"):
        tiles.put_rounded(weight, 0, rows, [-0.125, -0.11])


def test_two_ranks_have_the_parts_of_one(tiny_model: Tiny, tmp_path: Path) -> None:
    form = FORMS["awq"]
    folder = written(tiny_model("llama"), tmp_path / "quantised", form.store, form.config, keeps=form.keeps)
    config = EngineConfig(model=folder, cache=CacheConfig(num_blocks=16))
    own, whole = (products_of(each._decoder._layers[0]) for each in (engine_of_ranks(config, 2), Engine(config)))
    part, every = own["_output"].linear.weight, whole["_output"].weight
    numbers = torch.arange(every.outputs)
    assert torch.equal(part.rows(numbers), every.rows(numbers)[:, : every.inputs // 2])


def test_the_fingerprint_and_the_pool_are_those_of_tiles(tiny_model: Tiny, tmp_path: Path) -> None:
    form = FORMS["gptq"]
    folder = written(tiny_model("llama"), tmp_path / "quantised", form.store, form.config, keeps=form.keeps)
    engines = {
        dtype: Engine(EngineConfig(model=folder, dtype=dtype, cache=CacheConfig(num_blocks=8)))
        for dtype in ("auto", "float32")
    }
    assert engines["auto"].fingerprint != engines["float32"].fingerprint
    assert engines["auto"].layout.block_bytes * 2 == engines["float32"].layout.block_bytes


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_scales_that_float16_does_not_hold_are_refused(scale: float, tiny_model: Tiny, tmp_path: Path) -> None:
    form = FORMS["compressed, 4 bits"]
    folder = written(tiny_model("llama"), tmp_path / "quantised", form.store, form.config, keeps=form.keeps)
    file = folder / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.down_proj"
    stored = tensors[f"{name}.weight_scale"]
    tensors[f"{name}.weight_scale"] = torch.full_like(stored, scale, dtype=torch.float32)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"^{name}: float16 does not hold its scales: load it with --dtype float32"):
        loaded(folder)
    loaded(folder, dtype="float32")
