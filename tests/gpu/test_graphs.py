"""Passes replayed from CUDA graphs answer as passes launched kernel by kernel do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from tests.gpu.waves import WITH_STATES, run_both_ways, run_waves
from tests.unit.engine.families import foreign, latents
from tests.unit.engine.generate import Generator, new_sequence, scored

LATENT = {case.name: case for case in latents.CASES}
FOREIGN = {case.name.removeprefix("by transformers: "): case for case in foreign.CASES}
ROOT = Path(__file__).resolve().parents[2]
MOST_BEHIND = 0.5  # natural logarithms, in the mean of an answer: tokens of another context are behind by several

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_graphs_answer_alike(dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(ROOT / "demo", dtype, tolerance, monkeypatch)


@pytest.mark.parametrize("family", WITH_STATES)
def test_so_they_do_with_states(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(WITH_STATES[family].build(tmp_path), "float16", 0.02, monkeypatch)


@pytest.mark.parametrize("family", ["qwen3_5", "longcat_flash", "deepseek_v32", "glm_moe_dsa"])
def test_a_gpu_answers_as_a_cpu(family: str, tmp_path: Path) -> None:
    """In float32: prompts whole and in chunks beside decoding, decoding from graphs."""
    model = (WITH_STATES | LATENT)[family].build(tmp_path)
    answers = []
    for device in ("cpu", "cuda"):
        engine = Engine(
            EngineConfig(
                model=model, device=device, dtype="float32", max_sequences=8, cache=CacheConfig(num_blocks=300)
            )
        )
        prompts = [[(31 * length + 7 * at + at * at) % 500 + 5 for at in range(length)] for length in (1, 16, 70, 200)]
        sequences = [new_sequence(f"r{index}", prompt, max_tokens=30) for index, prompt in enumerate(prompts)]
        answers.append(
            [Generator(engine, chunk_size=size).run(some) for size, some in ((512, sequences[:2]), (90, sequences[2:]))]
        )
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_decoded_over_int4_is_likely_to_a_prompt_over_int4(dtype: str) -> None:
    """Decoding and prompts have kernels of their own. A number between two codes may become the other one."""
    cache = CacheConfig(num_blocks=300, kv_cache_dtype="int4")
    engine = Engine(EngineConfig(model=ROOT / "demo", device="cuda", dtype=dtype, max_sequences=8, cache=cache))
    prompts = [[(31 * length + 7 * at + at * at) % 500 + 5 for at in range(length)] for length in (1, 16, 70, 200)]
    sequences = [new_sequence(f"r{index}", prompt, max_tokens=30) for index, prompt in enumerate(prompts)]
    for prompt, answer in zip(prompts, Generator(engine, chunk_size=90).run(sequences), strict=True):
        whole = new_sequence("whole", prompt + answer, max_tokens=1, prompt_logprobs=1)
        scored(engine, [whole])
        assert whole.prompt_logprobs is not None
        chosen, best = (
            np.frombuffer(found, "<f4")[-len(answer) :]
            for found in (whole.prompt_logprobs.logprobs, whole.prompt_logprobs.top_logprobs)
        )
        assert (best - chosen).mean() < MOST_BEHIND


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2", "apertus"])
def test_so_they_do_by_the_code_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(FOREIGN[name].build(tmp_path), "float16", 0.02, monkeypatch, model_impl="transformers")


def test_so_do_experts_by_the_code_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To all of its experts: where two are about as good, other rounding would choose another one."""
    case = FOREIGN["qwen3_moe"]
    case = replace(case, fields=case.fields | {"num_experts_per_tok": case.fields["num_experts"]})
    _check(case.build(tmp_path), "bfloat16", 0.05, monkeypatch, model_impl="transformers")


@pytest.mark.parametrize(("name", "captured"), [("gpt_neox", True), ("qwen3_moe", False)])
def test_transformers_on_a_gpu_is_transformers_on_a_cpu(
    name: str, captured: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In float32, in which torch computes experts in a loop on the host: nothing is captured then, and the log says why."""
    model, answers = FOREIGN[name].build(tmp_path), []
    for device in ("cpu", "cuda"):
        engine = Engine(
            EngineConfig(
                model=model,
                device=device,
                dtype="float32",
                max_sequences=8,
                model_impl="transformers",
                cache=CacheConfig(num_blocks=300),
            )
        )
        prompts = [[(31 * length + 7 * at + at * at) % 500 + 5 for at in range(length)] for length in (1, 16, 70, 200)]
        sequences = [new_sequence(f"r{index}", prompt, max_tokens=30) for index, prompt in enumerate(prompts)]
        answers.append(Generator(engine, chunk_size=90).run(sequences))
    assert answers[0] == answers[1]
    assert bool(engine._runner.graphs.sizes) == captured
    whys = [vars(record)["why"] for record in caplog.records if record.message == "engine.not_captured"]
    assert len(whys) == (not captured)
    assert all("wait for the GPU" in why for why in whys)
    assert torch.cuda.get_sync_debug_mode() == 0


def _check(
    model: Path, dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch, *, model_impl: str = "auto"
) -> None:
    engine = Engine(
        EngineConfig(
            model=model,
            device="cuda",
            dtype=dtype,
            max_sequences=32,
            model_impl=model_impl,
            cache=CacheConfig(num_blocks=600),
        )
    )
    plain, replayed = run_both_ways(engine, monkeypatch)
    again = run_waves(engine, monkeypatch, with_graphs=True, like=plain)
    apart = [
        float((a - b).abs().max() / a.abs().max())
        for a, b in zip(plain.logits, replayed.logits, strict=True)
        if a.numel()
    ]
    assert max(apart) < tolerance, sorted(apart)[-5:]  # products of other sizes, and other tiles, round otherwise
    assert all(torch.equal(a, b) for a, b in zip(replayed.logits, again.logits, strict=True)), "a race"
