"""Draft heads: what an engine drafts is the plain arithmetic's, wherever the text was computed, and changes no text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine.config import CacheConfig, DraftConfig, EngineConfig
from engine.engine import Engine
from engine.sequence import Sequence
from engine.spec.model import UnsupportedModelError
from tests.models import build_tiny_model
from tests.unit.engine.drafts import PROMPTS, Drafts, check_hand_over, compare_drafts, new_sequences
from tests.unit.engine.eagle3_reference import CONFIG, Reference, write_head
from tests.unit.engine.generate import Generator, new_sequence

NUM_DRAFTS = 3
PARALLEL = ("parallel", "two_layers", "norm_before_residual", "norm_before_fc", "embed")
VARIANTS = (
    (),
    ("norm_before_residual", "embed"),
    ("norm_output", "fc_norm"),
    ("norm_before_fc", "norm_before_residual", "norm_output"),
    ("parallel",),
    PARALLEL,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny checkpoint with three layers, each of which a head reads."""
    built: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in built:
            built[family] = build_tiny_model(tmp_path_factory.mktemp(family), family, num_hidden_layers=3)
        return built[family]

    return folder


def _engine(model: Path, draft: Path | None, *, num_drafts: int = NUM_DRAFTS, **cache: Any) -> Engine:
    settings = CacheConfig(num_blocks=128, **cache)
    drafting = DraftConfig(folder=draft, num_drafts=num_drafts) if draft else None
    return Engine(EngineConfig(model=model, cache=settings, draft=drafting))


@pytest.mark.quick
@pytest.mark.parametrize("family", ["llama", "mistral"])  # windows of 24
@pytest.mark.parametrize("flags", VARIANTS, ids="+".join)
def test_drafts_are_those_of_the_arithmetic(
    target: Callable[[str], Path], family: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    head = write_head(tmp_path, *flags)
    reference = Reference(target(family), load_file(head / "model.safetensors"), *flags)
    engine = _engine(target(family), head)
    plain, sequences = Generator(engine, chunk_size=16), new_sequences()
    answers = plain.run(sequences)
    assert compare_drafts(plain, sequences, reference) == 3 * 14
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    verifying, sequences = Generator(engine, chunk_size=32, draft=Drafts(known, wrong=0.3)), new_sequences()
    assert verifying.run(sequences) == answers
    assert sum(verifying.accepted) > 10
    assert compare_drafts(verifying, sequences, reference) > 10


@pytest.mark.parametrize("flags", [(), PARALLEL], ids=["eagle3", "peagle"])
def test_drafts_stay_right_across_a_hand_over(
    target: Callable[[str], Path], flags: tuple[str, ...], tmp_path: Path
) -> None:
    head = write_head(tmp_path, *flags)
    prefill, decode = (_engine(target("llama"), head, num_drafts=number) for number in (0, NUM_DRAFTS))
    assert prefill.fingerprint == decode.fingerprint
    check_hand_over(prefill, decode)


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("flags", [(), PARALLEL], ids=["eagle3", "peagle"])
def test_a_head_changes_no_text(
    target: Callable[[str], Path], flags: tuple[str, ...], temperature: float, kv_cache_dtype: str, tmp_path: Path
) -> None:
    def sequences() -> list[Sequence]:
        return new_sequences(temperature=temperature, seed=5)

    without = Generator(_engine(target("llama"), None, kv_cache_dtype=kv_cache_dtype))
    drafting = Generator(
        _engine(target("llama"), write_head(tmp_path, *flags), kv_cache_dtype=kv_cache_dtype),
        draft=lambda sequence: ((last := drafting.results[sequence.request_id][-1]) and last.drafts) or (),
    )
    assert drafting.run(sequences()) == without.run(sequences())
    assert len(drafting.accepted) > 20


def test_drafts_end_where_the_blocks_do(target: Callable[[str], Path], tmp_path: Path) -> None:
    generator = Generator(_engine(target("llama"), write_head(tmp_path)))
    (answer,) = generator.run([new_sequence("a", list(range(3, 23)), max_tokens=12)])  # two blocks
    found = [len(result.drafts) for result in generator.results["a"] if result is not None]
    assert found == [NUM_DRAFTS] * 11 + [2]
    assert len(answer) == 12


def test_the_layer_is_one_more_of_each_block(target: Callable[[str], Path], tmp_path: Path) -> None:
    with_head, without = (_engine(target("llama"), draft) for draft in (write_head(tmp_path / "head"), None))
    assert [part.layers for part in with_head.layout.pages] == [4]
    assert [part.layers for part in without.layout.pages] == [3]
    narrow = write_head(tmp_path / "another", seed=1)
    assert len({with_head.fingerprint, without.fingerprint, _engine(target("llama"), narrow).fingerprint}) == 3


def test_a_head_of_speculators_is_read(target: Callable[[str], Path], tmp_path: Path) -> None:
    write_head(tmp_path, "norm_before_residual")
    layer = {name: value for name, value in CONFIG.items() if name not in ("draft_vocab_size", "architectures")}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
        "transformer_layer_config": layer,
        "draft_vocab_size": CONFIG["draft_vocab_size"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    reference = Reference(target("llama"), load_file(tmp_path / "model.safetensors"), "norm_before_residual")
    generator, sequences = Generator(_engine(target("llama"), tmp_path)), new_sequences()
    generator.run(sequences)
    assert compare_drafts(generator, sequences, reference) == 3 * 14


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"target_hidden_size": 128, "target_model": "another"}, "target_hidden_size = 128.*64.*trained for another"),
        ({"vocab_size": 600}, "vocab_size = 600.*512"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, r"layer_ids = \[0, 1, 3\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "layer_ids"),
        ({"parallel_drafting": True}, "parallel_drafting"),  # without the tensor for it
        ({"draft_vocab_size": "many"}, "draft_vocab_size"),
    ],
)
def test_another_targets_head_is_refused(
    target: Callable[[str], Path], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        _engine(target("llama"), write_head(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"mask_token_id": None}, "mask_token_id must be a token, not None"), ({"mask_token_id": 512}, "not 512")],
)
def test_a_parallel_head_has_a_mask_token(
    target: Callable[[str], Path], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        _engine(target("llama"), write_head(tmp_path, "parallel", **changes))


def test_drafts_need_a_head(target: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="num_drafts must be 0 or more"):
        DraftConfig(folder=target("llama"), num_drafts=-1)
