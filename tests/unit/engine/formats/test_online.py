"""Plain weights that are quantised while they are loaded, however the checkpoint stores a product's rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.families.quantised import ONLINE
from engine.formats.product import LinearSpec
from engine.weights.loader import load_weights
from engine.weights.parameters import Shard, Weights

INPUTS = 128
OUTPUTS = {"q_proj": 128, "k_proj": 64, "v_proj": 64}


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stored", ["fused", "twice"])
def test_rows_of_one_tensor_are_quantised_as_those_of_several(
    name: str, rank: int, stored: str, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(4)
    parts = {module: torch.randn(rows, INPUTS, generator=generator) for module, rows in OUTPUTS.items()}
    if stored == "twice":
        parts["v_proj"] = parts["k_proj"]
        tensors = {"q_proj.weight": parts["q_proj"], "k_proj.weight": parts["k_proj"]}
        spec = LinearSpec(inputs=INPUTS, outputs=OUTPUTS, bias=False, shard=Shard.OUTPUTS, twice={"v_proj": "k_proj"})
    else:
        tensors = {"qkv_proj.weight": torch.cat(list(parts.values()))}
        spec = LinearSpec(inputs=INPUTS, outputs=OUTPUTS, bias=False, shard=Shard.OUTPUTS, fused="qkv_proj")
    apart = LinearSpec(inputs=INPUTS, outputs=OUTPUTS, bias=False, shard=Shard.OUTPUTS)
    x = torch.randn(3, INPUTS, generator=generator)
    of_several = {f"{module}.weight": part.clone() for module, part in parts.items()}
    expected = _product(name, apart, of_several, tmp_path / "apart", rank, x)
    assert torch.equal(_product(name, spec, tensors, tmp_path / "together", rank, x), expected)
    half = {module: part.chunk(2)[rank] for module, part in parts.items()}
    assert (expected - x @ torch.cat(list(half.values())).T).abs().mean() < 2.0


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_rows_are_quantised_a_few_at_a_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes for a while does not grow with the matrix, and no row depends on its piece."""
    spec = LinearSpec(inputs=INPUTS, outputs=OUTPUTS, bias=False, shard=Shard.OUTPUTS)
    generator = torch.Generator().manual_seed(5)
    tensors = {f"{module}.weight": torch.randn(rows, INPUTS, generator=generator) for module, rows in OUTPUTS.items()}
    x, found = torch.randn(3, INPUTS, generator=generator), []
    for elements in (1 << 22, 5 * INPUTS):
        monkeypatch.setattr(f"engine.formats.{name}._ELEMENTS_AT_ONCE", elements)
        found.append(_product(name, spec, tensors, tmp_path / str(elements), 0, x))
    assert torch.equal(*found)


def _product(
    name: str, spec: LinearSpec, tensors: dict[str, torch.Tensor], folder: Path, rank: int, x: torch.Tensor
) -> torch.Tensor:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    weights = Weights(torch.float32, torch.device("cpu"), rank=rank, size=2)
    linear = ONLINE[name].format_of(["q_proj"]).linear(spec, weights, under="")
    load_weights(weights, folder)
    weights.settle()
    return linear(x)
