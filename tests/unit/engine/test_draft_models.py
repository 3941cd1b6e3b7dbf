"""Draft models: what an engine drafts is what the small model alone would write, and it changes no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, DraftConfig, EngineConfig
from engine.engine import Engine
from engine.sequence import Sequence
from engine.spec.model import UnsupportedModelError
from tests.models import build_tiny_model
from tests.unit.engine.drafts import PROMPTS, Alone, Drafts, check_hand_over, compare_drafts, new_sequences
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.mtp_reference import FAMILIES

NUM_DRAFTS = 3
TARGET = {"num_hidden_layers": 3, "seed": 1}


def _engine(model: Path, draft: Path | None, *, num_drafts: int = NUM_DRAFTS, **cache: Any) -> Engine:
    settings = CacheConfig(num_blocks=128, **cache)
    drafting = DraftConfig(folder=draft, is_model=True, num_drafts=num_drafts) if draft else None
    return Engine(EngineConfig(model=model, cache=settings, draft=drafting))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("target"), "llama", **TARGET)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("small"), "qwen3")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_size": 32}),  # heads of another size
        ("qwen3", {"num_key_value_heads": 4}),
        ("mistral", {}),  # windows of 24
        ("qwen3_moe", {}),
        ("llama3", {"vocab_size": 500}),
        ("llama", {"vocab_size": 520}),
    ],
)
@pytest.mark.parametrize("of", ["llama", "mistral"])
def test_drafts_are_what_the_small_model_would_write(
    of: str, family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = build_tiny_model(tmp_path / "target", of, **TARGET)
    small = build_tiny_model(tmp_path / "small", family, **changes)
    engine = _engine(model, small, disable_hybrid_kv_cache_manager=of == family)
    without = Generator(_engine(model, None)).run(new_sequences())
    plain, sequences = Generator(engine, chunk_size=16), new_sequences()
    assert plain.run(sequences) == without
    if "vocab_size" in changes:  # alone it reads and writes other tokens
        return
    reference = Alone(small)
    assert compare_drafts(plain, sequences, reference) > 35
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, without, strict=True)}
    verifying, sequences = Generator(engine, chunk_size=32, draft=Drafts(known, wrong=0.3)), new_sequences()
    assert verifying.run(sequences) == without
    assert sum(verifying.accepted) > 10
    assert compare_drafts(verifying, sequences, reference) > 10


def test_a_model_that_drafts_for_itself_is_always_right(target: Path) -> None:
    generator = Generator(_engine(target, target))
    generator._draft = lambda sequence: _newest(generator, sequence)
    generator.run(new_sequences())
    assert set(generator.accepted) <= {1, 2, NUM_DRAFTS}
    assert len(generator.accepted) >= 3 * 3
    found = [result for results in generator.results.values() for result in results]
    assert sum(generator.accepted) + len(generator.accepted) >= len(found) - 3 * 3


def _newest(generator: Generator, sequence: Sequence) -> tuple[int, ...]:
    last = generator.results[sequence.request_id][-1]
    return last.drafts if last is not None else ()


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_draft_model_changes_no_text(target: Path, small: Path, temperature: float, kv_cache_dtype: str) -> None:
    def sequences() -> list[Sequence]:
        return new_sequences(temperature=temperature, seed=5)

    without = Generator(_engine(target, None, kv_cache_dtype=kv_cache_dtype))
    drafting = Generator(_engine(target, small, kv_cache_dtype=kv_cache_dtype))
    drafting._draft = lambda sequence: _newest(drafting, sequence)
    assert drafting.run(sequences()) == without.run(sequences())
    assert len(drafting.accepted) > 20


def test_it_reads_a_token_that_is_still_in_flight(target: Path, small: Path) -> None:
    generator, sequence = Generator(_engine(target, small)), new_sequence("a", PROMPTS[0])
    generator.start(sequence)
    chunks = [sequence.schedule(1)]
    passes = [generator.launch(chunks)]
    chunks.append(sequence.schedule(1))
    passes.append(generator.launch(chunks[1:]))
    for chunk, launched in zip(chunks, passes, strict=True):
        generator.deliver([chunk], launched)
    generator.go_on([sequence])
    assert compare_drafts(generator, [sequence], Alone(small)) > 8


def test_drafts_stay_right_across_a_hand_over_and_a_prefix_hit(target: Path, small: Path) -> None:
    prefill, decode = (_engine(target, small, num_drafts=number) for number in (0, NUM_DRAFTS))
    assert prefill.fingerprint == decode.fingerprint
    reference = Alone(small)

    def compare(here: Generator, stayed: Sequence) -> None:
        assert compare_drafts(here, [stayed], reference) > 8

    check_hand_over(prefill, decode, (*PROMPTS, PROMPTS[2] + [7, 8, 9]), compare=compare)


def test_who_wants_no_drafts_gets_none_and_costs_none(target: Path, small: Path) -> None:
    generator, sequences = Generator(_engine(target, small)), new_sequences()
    sequences[0].speculation, sequences[1].speculation = 0, 2
    generator.run(sequences)
    longest = [max(len(result.drafts) for result in generator.results[each.request_id] if result) for each in sequences]
    assert longest == [0, 2, NUM_DRAFTS]


def test_drafts_end_where_the_blocks_do(target: Path, small: Path) -> None:
    generator = Generator(_engine(target, small))
    generator.run([new_sequence("a", list(range(3, 23)), max_tokens=12)])  # two blocks
    found = [len(result.drafts) for result in generator.results["a"] if result is not None]
    assert found == [NUM_DRAFTS] * 10 + [2, 1]


def test_its_layers_are_further_ones_of_each_block(target: Path, small: Path) -> None:
    with_model, without = (_engine(target, draft) for draft in (small, None))
    assert [part.layers for part in without.layout.pages] == [3]
    assert sorted(part.layers for part in with_model.layout.pages) == [2, 3]
    assert with_model.fingerprint != without.fingerprint
    assert with_model.fingerprint != _engine(target, target).fingerprint


def test_another_tokenizer_is_refused_by_its_first_token(target: Path, tmp_path: Path) -> None:
    small = build_tiny_model(tmp_path, "llama")
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text())
    described["added_tokens"][1]["content"] = "<|begin|>"
    path.write_text(json.dumps(described))
    with pytest.raises(UnsupportedModelError, match=r"token 1 is '<\|begin\|>', and the model's is '<\|im_start\|>'"):
        _engine(target, small)
    path.unlink()
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer.json"):
        _engine(target, small)


def test_a_text_of_the_tokenizers_file_may_differ(target: Path, tmp_path: Path) -> None:
    small = build_tiny_model(tmp_path, "llama")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))
    assert _engine(target, small).config.draft == DraftConfig(folder=small, is_model=True, num_drafts=NUM_DRAFTS)


def test_what_blocks_of_tokens_have_no_place_for_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        _engine(target, tmp_path)
    with pytest.raises(UnsupportedModelError, match="no recurrent states"):
        _engine(target, FAMILIES["qwen3_5"].build(tmp_path / "states"))
    windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "num_hidden_layers": 3}
    apart = build_tiny_model(tmp_path / "windows", "qwen2", **windows)
    with pytest.raises(UnsupportedModelError, match="disable-hybrid-kv-cache-manager"):
        _engine(apart, apart)
    whole = Generator(_engine(apart, apart, disable_hybrid_kv_cache_manager=True))
    assert whole.run(new_sequences()) == Generator(_engine(apart, target)).run(new_sequences())
