"""8-bit weights made while loading: close to the plain ones, alone as in a batch, and a third of the memory of float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.families import read_model_spec
from engine.formats.int8 import Int8Linear
from engine.model.decoder import Decoder
from engine.sequence import Sequence
from engine.weights.loader import load_weights
from tests.models import build_tiny_model
from tests.unit.engine.families.experts import CASES
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.insides import products_of

DEMO = Path(__file__).parents[4] / "demo"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied, with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, fields = SHAPES[request.param]
    return build_tiny_model(tmp_path / "model", family, **fields)


def engine(folder: Path, **config: Any) -> Engine:
    return Engine(EngineConfig.of(model=folder, num_blocks=64, **{"quantization": "int8", **config}))


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def said(engine: Engine, sequences: list[Sequence], **options: Any) -> list[list[tuple[int, float]]]:
    """Each sequence's tokens with their log probabilities."""
    generator = Generator(engine, **options)
    generator.run(sequences)
    return [
        [
            (each.token_id, each.logprobs.logprob)
            for each in generator.results[sequence.request_id]
            if each is not None and each.logprobs is not None
        ]
        for sequence in sequences
    ]


@pytest.mark.quick(first=2)
def test_a_request_does_not_depend_on_its_batch(folder: Path) -> None:
    prompts = [prompt(seed, length) for seed, length in enumerate((3, 30, 17, 1))]

    def some(which: list[int]) -> list[Sequence]:
        return [new_sequence(str(each), prompts[each], logprobs=0) for each in which]

    quantised = engine(folder)
    together = said(quantised, some([0, 1, 2, 3]))
    assert all(len(tokens) == 12 for tokens in together)
    for each, tokens in enumerate(together):
        assert said(engine(folder), some([each])) == [tokens]


def test_answers_are_close_to_the_plain_ones(folder: Path) -> None:
    prompts = [prompt(seed, 40) for seed in range(16)]
    plain, quantised = (
        said(
            engine(folder, quantization=name),
            [new_sequence(str(each), tokens, logprobs=0, max_tokens=1) for each, tokens in enumerate(prompts)],
        )
        for name in ("auto", "int8")
    )
    both = [(one[0][1], other[0][1]) for one, other in zip(plain, quantised, strict=True) if one[0][0] == other[0][0]]
    assert len(both) >= 12
    first, second = torch.tensor(both).T
    assert not torch.equal(first, second)
    assert (first - second).abs().mean() < 0.1


def test_every_product_and_the_table_are_quantised(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    decoder = Decoder(
        read_model_spec(folder, quantization="int8"),
        dtype=torch.float32, device=torch.device("cpu"), max_model_len=64,
    )  # fmt: skip
    load_weights(decoder.weights, folder)
    decoder.weights.settle()
    matrix = decoder._embedding.table._matrix  # type: ignore[attr-defined]
    assert matrix.codes.dtype is torch.int8
    assert isinstance(decoder._head.product, Int8Linear)
    for layer in decoder._layers:
        products = products_of(layer)
        assert {name for name, value in products.items() if isinstance(value, Int8Linear)} == {
            "_qkv", "_output", "_gate_up", "_down",
        }  # fmt: skip


def test_another_way_of_rounding_has_another_fingerprint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a release that rounds otherwise shares no block with this one."""
    plain, today = engine(folder, quantization="auto").fingerprint, engine(folder).fingerprint
    monkeypatch.setattr("engine.formats.int8.ROUNDED", "rows of 8 bits, as they were once")
    assert len({plain, today, engine(folder).fingerprint}) == 3


def test_experts_stay_plain(tmp_path: Path) -> None:
    folder = CASES[0].build(tmp_path / "moe")
    tokens = said(engine(folder), [new_sequence("one", prompt(1, 20), logprobs=0)])
    assert len(tokens[0]) == 12


def test_the_demo_s_greedy_answer_stays_its_own() -> None:
    """A trained model, whose activations have the outliers that random weights lack.

    In float32: there the answers are the same on every processor, and those of bfloat16 are not.
    """
    text = list((DEMO / "README.md").read_bytes()[:64])  # ids of some bytes and words
    plain, quantised = (
        said(engine(DEMO, quantization=name, dtype="float32"), [new_sequence("r", text, logprobs=0, max_tokens=6)])[0]
        for name in ("auto", "int8")
    )
    assert [token for token, _ in quantised] == [token for token, _ in plain]
    apart = [abs(one - other) for (_, one), (_, other) in zip(plain, quantised, strict=True)]
    assert sum(apart) / len(apart) < 0.2


def test_only_cpus_take_it(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="quantization = 'int8' is for CPUs, not cuda:0: take fp8"):
        EngineConfig(model=tiny_model("llama"), device="cuda:0", quantization="int8")
