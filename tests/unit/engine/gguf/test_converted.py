"""A file as llama.cpp's converter writes it answers as its folder does, which other tests compare with `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.families.quantised.gguf import kept_as
from modelfiles.gguf import read_header
from tests.gguf_files import as_floats
from tests.unit.engine.families.case import Case
from tests.unit.engine.gguf.cases import CASES, WIDE
from tests.unit.engine.gguf.converted import answer, recorded, write_converted

TOLERANCE = 1e-4  # of a logprob
ROUNDED = 0.1  # the same, with the scales of K-quants in 16 bits
EACH = 20  # logprobs of a token
# As llama-quantize mixes them: what is finer, and what rows of 64 get.
MIXES = {
    "Q4_K_M": ({"": "Q4_K", "ffn_down": "Q6_K", "attn_v": "Q5_K", "output.weight": "Q6_K"}, "Q5_0"),
    "IQ4_XS": ({"": "IQ4_XS", "ffn_down": "Q5_K", "output.weight": "Q6_K"}, "IQ4_NL"),
}
PLAIN = {"ffn_gate_inp": "F32", "conv1d": "F32"}


@pytest.mark.quick(of=lambda name: CASES[name].config)
@pytest.mark.parametrize("name", recorded())
def test_it_answers_as_its_folder(name: str, tmp_path: Path) -> None:
    folder = CASES[name].build(tmp_path / "model")
    file = write_converted(folder, tmp_path / "model.gguf", name)
    tokens, logprobs = answer(file)
    expected, theirs = answer(folder)
    assert tokens == expected
    assert len(logprobs) == len(theirs) == 8 * EACH
    assert max(abs(one - other) for one, other in zip(logprobs, theirs, strict=True)) < TOLERANCE


@pytest.mark.quick
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_a_mix_of_kinds_answers_as_its_numbers(
    case: Case, mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, narrow = MIXES[mix]
    folder = case.build(tmp_path / "model")
    file = write_converted(folder, tmp_path / "model.gguf", case.name, kind=kinds | PLAIN, narrow=narrow)
    found = {tensor.kind for tensor in read_header(file).tensors.values()}
    assert found >= {kinds[""], "Q6_K", "F32"}
    assert (narrow in found) is ("kv_lora_rank" in case.fields)  # a head's part of a latent
    expected = answer(as_floats(file, tmp_path / "floats.gguf"))
    assert answer(file) == expected
    monkeypatch.setattr(
        "engine.families.kept_as", lambda file, device, dtype: kept_as(file, device="cuda", dtype=dtype)
    )
    (first, *_), logprobs = answer(file)
    assert first == expected[0][0]
    assert max(abs(one - other) for one, other in zip(logprobs[:EACH], expected[1][:EACH], strict=True)) < ROUNDED
