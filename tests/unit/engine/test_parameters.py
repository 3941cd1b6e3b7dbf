"""Parameters: the shares of all ranks put together are the whole, and nothing is declared twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.families import read_model_spec
from engine.model.layers.attention import GroupedQueryAttention
from engine.model.layers.building import Rotations, Surroundings, declare_branch
from engine.model.layers.mlp import GatedMlp
from engine.weights.loader import load_weights
from engine.weights.parameters import Parameter, Part, Shard, Weights, share_of, stacked, whole

CPU = torch.device("cpu")
LAYER = "model.layers.0."
GATE_UP = stacked({"gate": 8, "up": 8})
EXPERTS = tuple(
    part for expert in range(4) for part in stacked({f"{expert}.gate": 8, f"{expert}.up": 8}, expert=expert)
)


def stored(parameter: Parameter) -> dict[str, torch.Tensor]:
    """A checkpoint in which no two values are alike."""
    values, begin = {}, 0
    for placement in share_of(parameter, 0, 1).placements:
        shape = placement.stored_shape
        count = int(torch.tensor(shape).prod())
        values[placement.name] = torch.arange(begin, begin + count).view(shape)
        begin += count
    return values


def held(parameter: Parameter, rank: int, size: int) -> torch.Tensor:
    """What a rank has once everything is where it belongs; -1: nothing came here."""
    share = share_of(parameter, rank, size)
    tensor = torch.full(share.shape, -1)
    for placement in share.placements:
        tensor[placement.target] = stored(parameter)[placement.name][placement.source]
    assert (tensor >= 0).all(), "a part of the share was never filled"
    return tensor


def ranks(parameter: Parameter, size: int) -> list[torch.Tensor]:
    return [held(parameter, rank, size) for rank in range(size)]


def test_one_rank_has_its_parts_one_behind_the_other() -> None:
    parameter = Parameter(shape=(16, 4), parts=GATE_UP)
    values = stored(parameter)
    assert torch.equal(held(parameter, 0, 1), torch.cat((values["gate"], values["up"])))


@pytest.mark.parametrize("size", [1, 2, 8])
def test_every_rank_has_all_of_what_is_not_shared(size: int) -> None:
    parameter = Parameter(shape=(16, 4), parts=GATE_UP)
    assert all(torch.equal(share, held(parameter, 0, 1)) for share in ranks(parameter, size))


@pytest.mark.parametrize("shard", [Shard.OUTPUTS, Shard.HEADS])
@pytest.mark.parametrize("shape", [(16, 4), (16,)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shared_outputs_are_rows_of_every_part(shard: Shard, shape: tuple[int, ...], size: int) -> None:
    parameter = Parameter(shape=shape, parts=GATE_UP, shard=shard, unit=2)
    halves = [share.chunk(2) for share in ranks(parameter, size)]
    together = [torch.cat(parts) for parts in zip(*halves, strict=True)]
    assert torch.equal(torch.cat(together), held(parameter, 0, 1))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("shape", "parts"), [((16, 8), GATE_UP), ((8,), stacked({"scale": 8})), ((4, 16, 8), EXPERTS)])
def test_shared_inputs_are_columns(shape: tuple[int, ...], parts: tuple[Part, ...], size: int) -> None:
    parameter = Parameter(shape=shape, parts=parts, shard=Shard.INPUTS, unit=2)
    assert torch.equal(torch.cat(ranks(parameter, size), dim=-1), held(parameter, 0, 1))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_key_heads_are_there_several_times_when_ranks_outnumber_them(size: int) -> None:
    """Eight query heads share two key heads; a rank has the key head of its query heads."""
    parameter = Parameter(shape=(10 * 3, 4), parts=stacked({"q": 8 * 3, "k": 2 * 3}), shard=Shard.HEADS, unit=3)
    values = stored(parameter)
    queries, keys = values["q"].split(24 // size), values["k"].split(3)
    for rank, share in enumerate(ranks(parameter, size)):
        assert torch.equal(share[: 24 // size], queries[rank])
        mine = keys if size == 1 else (keys[rank * 2 // size],)
        assert torch.equal(share[24 // size :], torch.cat(mine))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("parts", [EXPERTS, stacked({"experts": 4})])
def test_shared_experts_are_whole(parts: tuple[Part, ...], size: int) -> None:
    """As the checkpoint has them: two tensors each, or all in one."""
    parameter = Parameter(shape=(4, 16, 2), parts=parts, shard=Shard.EXPERTS)
    assert torch.equal(torch.cat(ranks(parameter, size)), held(parameter, 0, 1))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_can_be_cut_themselves(size: int) -> None:
    parameter = Parameter(shape=(4, 16, 2), parts=EXPERTS, shard=Shard.OUTPUTS)
    halves = [share.chunk(2, dim=1) for share in ranks(parameter, size)]
    together = [torch.cat(parts, dim=1) for parts in zip(*halves, strict=True)]
    assert torch.equal(torch.cat(together, dim=1), held(parameter, 0, 1))


@pytest.mark.parametrize(
    ("shard", "unit", "size"), [(Shard.OUTPUTS, 1, 3), (Shard.OUTPUTS, 4, 4), (Shard.HEADS, 3, 1), (Shard.HEADS, 4, 3)]
)
def test_what_ranks_cannot_share_evenly_is_named(shard: Shard, unit: int, size: int) -> None:
    parameter = Parameter(shape=(16, 4), parts=GATE_UP, shard=shard, unit=unit)
    with pytest.raises(ValueError, match=f"gate: {size} ranks can't share 8 .* in units of {unit}"):
        share_of(parameter, 0, size)


def test_no_tensor_of_the_checkpoint_goes_to_two_places() -> None:
    weights = Weights(torch.float32, CPU)
    weights.new(whole("norm.weight", 4), under="a.")
    weights.new(whole("norm.weight", 4), under="b.")
    with pytest.raises(ValueError, match=r"two parameters are made of a\.norm\.weight"):
        weights.new(whole("norm.weight", 4), under="a.")


def test_a_parameter_may_be_stored_in_a_format_of_its_own() -> None:
    weights = Weights(torch.bfloat16, CPU)
    assert weights.new(whole("a", 4)).dtype is torch.bfloat16
    assert weights.new(Parameter(shape=(4,), parts=stacked({"b": 4}), format=torch.float32)).dtype is torch.float32


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_load_their_shares_of_a_layer(tiny_model: Callable[[str], Path], size: int) -> None:
    """The model has four query heads and two key heads, so two of four ranks share a key head."""
    folder = tiny_model("qwen2")
    checkpoint = load_file(folder / "model.safetensors")
    for rank in range(size):
        views = load_layer(folder, rank, size)
        assert views.keys() == {name for name in checkpoint if name.startswith(LAYER)}
        for name, view in views.items():
            expected = checkpoint[name]
            if "q_proj" in name or "gate_proj" in name or "up_proj" in name:
                expected = expected.chunk(size)[rank]
            elif "k_proj" in name or "v_proj" in name:
                expected = expected.chunk(min(size, 2))[rank * min(size, 2) // size]
            elif "o_proj" in name or "down_proj" in name:
                expected = expected.chunk(size, dim=1)[rank]
            assert torch.equal(view, expected), name


def load_layer(folder: Path, rank: int, size: int) -> dict[str, torch.Tensor]:
    """Where the tensors of the first layer went on one rank."""
    spec = read_model_spec(folder)
    weights = Weights(torch.float32, CPU, rank=rank, size=size)
    layer, rotations = spec.layers[0], Rotations(16, CPU)
    mixers, mlps = (declare_branch(of, spec, weights, under=LAYER) for of in (layer.around_mixer, layer.around_mlp))
    GroupedQueryAttention(layer.mixer, Surroundings(spec, weights, rotations, LAYER, mixers))
    GatedMlp(layer.mlp, Surroundings(spec, weights, rotations, LAYER, mlps))
    weights.unused |= {name for name in load_file(folder / "model.safetensors") if not name.startswith(LAYER)}
    load_weights(weights, folder)
    return {name: places[0].tensor for name, places in weights.destinations.items()}
