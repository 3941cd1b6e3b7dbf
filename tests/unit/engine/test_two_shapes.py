# mypy: allow-untyped-calls, disable-error-code="no-any-return, operator"
"""A model whose layers have heads of two shapes, as Gemma 4's: exact, and blocks with two parts are handed over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from common.pages import PagePart
from engine import families
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families.meta import read_llama
from engine.families.reading import Fields
from engine.spec.model import ModelSpec
from tests.models import build_tiny_model
from tests.unit.engine.generate import Generator, handed_over, new_sequence

WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 48}
WIDE_LAYERS = (1, 3)
NUM_TOKENS = 12


class OwnRotation(torch.nn.Module):
    """An attention that rotates by its own head size."""

    def __init__(self, attention: LlamaAttention) -> None:
        super().__init__()
        self.attention = attention
        self.rotary = LlamaRotaryEmbedding(attention.config)

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor, **given: Any) -> Any:
        given["position_embeddings"] = self.rotary(hidden_states, position_ids)
        return self.attention(hidden_states=hidden_states, position_ids=position_ids, **given)


def read(fields: Fields) -> ModelSpec:
    """Llama, with some wide layers; every fourth has a window too."""
    narrow = read_llama(fields)
    wide = read_llama(Fields({**fields, **WIDE})).layers[0]
    layers = tuple(wide if index in WIDE_LAYERS else layer for index, layer in enumerate(narrow.layers))
    return replace(narrow, layers=layers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = build_tiny_model(tmp_path_factory.mktemp("two"), "llama", num_hidden_layers=4, seed=3)
    config = json.loads((path / "config.json").read_bytes())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["TwoShapes"]}))
    weights, random = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    for index in WIDE_LAYERS:
        for name, shape in (("q", (96, 64)), ("k", (48, 64)), ("v", (48, 64)), ("o", (64, 96))):
            weight = torch.randn(shape, generator=random) * 1.5 / shape[1] ** 0.5
            weights[f"model.layers.{index}.self_attn.{name}_proj.weight"] = weight
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FAMILIES, "TwoShapes", read)
        yield path


@pytest.fixture(scope="module")
def model(folder: Path) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    built = transformers.LlamaForCausalLM(config)
    for index in WIDE_LAYERS:
        wide = transformers.LlamaConfig(**{**config.to_dict(), **WIDE})
        wide._attn_implementation = "eager"
        built.model.layers[index].self_attn = LlamaAttention(wide, layer_idx=index)
    built.load_state_dict(load_file(folder / "model.safetensors"))
    for index in WIDE_LAYERS:
        built.model.layers[index].self_attn = OwnRotation(built.model.layers[index].self_attn)
    return built.eval()


@torch.inference_mode()
def expected(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed + length)).tolist()


def engine_of(folder: Path) -> Engine:
    nan = partial(torch.full, fill_value=255, dtype=torch.uint8)  # NaN: what was never written must never matter
    return Engine(
        EngineConfig(model=folder, cache=CacheConfig(num_blocks=80)), allocate=lambda shape, dtype, device: nan(shape)
    )


def test_each_layer_finds_its_part_of_a_block(folder: Path) -> None:
    assert engine_of(folder).layout.parts == (
        PagePart(layers=2, planes=2, heads=2, dim=16, dtype="float32"),
        PagePart(layers=2, planes=2, heads=1, dim=48, dtype="float32"),
    )


@pytest.mark.parametrize("chunk_size", [512, 13])
def test_alone_in_chunks_and_in_a_mixed_batch(
    folder: Path, model: transformers.PreTrainedModel, chunk_size: int
) -> None:
    prompts = [prompt_of(length) for length in (1, 16, 17, 70)]
    generator = Generator(engine_of(folder), chunk_size=chunk_size)
    sequences = [new_sequence(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    assert generator.run(sequences) == [expected(model, prompt) for prompt in prompts]
    again = new_sequence("again", prompts[-1])
    assert generator.run([again]) == [expected(model, prompts[-1])]
    assert again.num_cached == 64


def test_blocks_of_two_parts_are_handed_over(folder: Path, model: transformers.PreTrainedModel) -> None:
    prompt = prompt_of(37)
    assert handed_over(engine_of(folder), engine_of(folder), prompt) == expected(model, prompt)
