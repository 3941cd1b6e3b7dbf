"""A checkpoint's own layer for multi-token prediction: what it drafts is the published arithmetic's, and changes no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.config import CacheConfig, DraftConfig, EngineConfig
from engine.engine import Engine
from engine.sequence import Sequence
from engine.spec.model import UnsupportedModelError
from tests.unit.engine.drafts import PROMPTS, Drafts, check_hand_over, compare_drafts, new_sequences
from tests.unit.engine.families.case import Case
from tests.unit.engine.generate import Generator
from tests.unit.engine.mtp_reference import CASES, FAMILIES, Mtp, Reference

NUM_DRAFTS = 3
# The layer's form, of which there are three, decides how drafts are carried on; products don't. Others are `long`.
OF_EACH_FORM = ("qwen3_next", "deepseek_v3", "mimo")
of_each_form = pytest.mark.parametrize(
    "built",
    [pytest.param(name, marks=[] if name in OF_EACH_FORM else [pytest.mark.long]) for name in FAMILIES],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", params=FAMILIES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Mtp, Path]:
    """A family, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param].build(folder)
    return FAMILIES[request.param], folder


def _engine(folder: Path, *, num_drafts: int | None = NUM_DRAFTS, **settings: Any) -> Engine:
    """An engine with the layer; without it for None."""
    model = folder / "model"
    draft = None if num_drafts is None else DraftConfig(folder=model, num_drafts=num_drafts)
    return Engine(EngineConfig(model=model, cache=CacheConfig(num_blocks=256, **settings), draft=draft))


@pytest.mark.quick(*OF_EACH_FORM)
def test_drafts_are_those_of_the_arithmetic(built: tuple[Mtp, Path]) -> None:
    engine, reference = _engine(built[1]), Reference(*built)
    plain, sequences = Generator(engine, chunk_size=16), new_sequences()
    answers = plain.run(sequences)
    assert compare_drafts(plain, sequences, reference) == 3 * 14
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    verifying, sequences = Generator(engine, chunk_size=32, draft=Drafts(known, wrong=0.3)), new_sequences()
    assert verifying.run(sequences) == answers
    assert sum(verifying.accepted) > 10
    assert compare_drafts(verifying, sequences, reference) > 10


@pytest.mark.quick
@of_each_form
@pytest.mark.parametrize(("temperature", "kept"), [(0.0, "auto"), (1.0, "auto"), (1.0, "int8")])
def test_the_layer_changes_no_text(built: tuple[Mtp, Path], temperature: float, kept: str) -> None:
    def sequences() -> list[Sequence]:
        return new_sequences(temperature=temperature, seed=5)

    without = Generator(_engine(built[1], num_drafts=None, kv_cache_dtype=kept))
    drafting = Generator(
        _engine(built[1], kv_cache_dtype=kept),
        draft=lambda sequence: ((last := drafting.results[sequence.request_id][-1]) and last.drafts) or (),
    )
    assert drafting.run(sequences()) == without.run(sequences())
    assert len(drafting.accepted) > 20


@of_each_form
def test_drafts_stay_right_across_a_hand_over(built: tuple[Mtp, Path]) -> None:
    prefill, decode = (_engine(built[1], num_drafts=number) for number in (0, NUM_DRAFTS))
    assert prefill.fingerprint == decode.fingerprint != _engine(built[1], num_drafts=None).fingerprint
    check_hand_over(prefill, decode)


def test_the_layer_is_one_more_of_each_block(built: tuple[Mtp, Path]) -> None:
    counts = [sum(part.layers for part in _engine(built[1], num_drafts=each).layout.pages) for each in (3, None)]
    kinds = len(_engine(built[1], num_drafts=None).layout.pages)
    assert counts[0] == counts[1] + kinds


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    folder = CASES["qwen3_5"].build(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=r"the checkpoint has no tensor mtp\.fc\.weight"):
        _engine(folder.parent)


def test_a_family_without_such_layers_is_refused(tmp_path: Path) -> None:
    folder = Case(name="llama", config="LlamaConfig").build(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="mtp: not for LlamaForCausalLM; supported: Qwen3Next"):
        _engine(folder.parent)


def test_further_layers_and_copies_of_the_models_tensors_are_left_out(tmp_path: Path) -> None:
    model = FAMILIES["glm4_moe"].build(tmp_path)
    tensors = load_file(model / "model.safetensors")
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.{layers}.{name}.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"model.layers.{layers + 1}.enorm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (model / "config.json").write_text(json.dumps(config))
    generator = Generator(_engine(tmp_path))
    generator.run(new_sequences())
    assert all(result and result.drafts for result in generator.results["0"][:-1])
