"""DeviceSampler on a GPU: the tokens of `engine.sampling.host` on the CPU, then times. `python -m tests.gpu.bench_sampling`."""

from __future__ import annotations

import random
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from engine.sampling.device import DeviceSampler
from engine.sampling.host import SampledRow, sample
from engine.sequence import Chunk, Sequence
from engine.step.staging import NewestTokens
from tests.unit.engine.generate import new_sequence
from tests.unit.kernels.sampling_checks import CHECKS, run

VOCAB = 128256
CUDA = torch.device("cuda")

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "top_k, cold": {"temperature": 0.1, "top_k": 50},
    "top_k, most": {"temperature": 1.0, "top_k": 60_000},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_p, hot": {"temperature": 8.0, "top_p": 0.99},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "typical_p": {"temperature": 1.0, "typical_p": 0.9},
    "typical_p, hot": {"temperature": 8.0, "typical_p": 0.5, "top_k": 60_000},
    "all filters": {"temperature": 0.9, "top_k": 100, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "penalties, drawn": {"temperature": 0.8, "frequency_penalty": 0.7, "top_p": 0.95},
    "bias, bans": {"logit_bias": {5: 30.0, 77: -5.0, 128255: 29.0}, "stop_token_ids": [5], "min_tokens": 4},
    "logprobs": {"temperature": 1.0, "logprobs": 20},
}


def sequences_with(parameters: dict[str, Any], count: int, prompt: int = 200) -> list[Sequence]:
    sequences = []
    for row in range(count):
        tokens = [random.randrange(VOCAB) for _ in range(prompt)] + [random.randrange(50) for _ in range(prompt)]
        sequence = new_sequence("a", tokens, **({"seed": row * 7919 + 1, "max_tokens": 10**6} | parameters))
        sequence.num_prompt_tokens -= prompt // 2
        sequences.append(sequence)
    return sequences


def scheduled(sequences: list[Sequence]) -> list[Chunk]:
    return [sequence.schedule(sequence.num_unscheduled) for sequence in sequences]


def language_like(rows: int) -> torch.Tensor:
    """Normal logits with a few that stick out, as a language model's do."""
    logits = 2 * torch.randn(rows, VOCAB, device=CUDA)
    at = torch.randint(0, VOCAB, (rows, 200), device=CUDA)
    return logits.scatter_add_(1, at, 14 * torch.rand(rows, 200, device=CUDA)).bfloat16()


def compare(name: str, parameters: dict[str, Any], rows: int = 8, passes: int = 3) -> None:
    """Overlapping passes: every other pass begins with tokens that the host has not been told."""
    sampler = DeviceSampler(VOCAB, rows, CUDA)
    sequences = sequences_with(parameters, rows)
    newest, known, before = NewestTokens.none(CUDA), dict[Sequence, int](), None
    wrong, error = 0, 0.0
    for _ in range(passes):
        chunks = scheduled(sequences)
        logits = language_like(rows)
        draw = sampler.launch(logits, chunks, newest)
        expected = sample(logits.float().cpu(), [SampledRow.of(chunk, known) for chunk in chunks])
        actual = draw.wait()
        for one, other in zip(actual, expected, strict=True):
            assert one is not None
            assert other is not None
            wrong += one.token_id != other.token_id
            if one.logprobs and other.logprobs:
                pairs = zip(
                    [one.logprobs.logprob, *one.logprobs.top_logprobs],
                    [other.logprobs.logprob, *other.logprobs.top_logprobs],
                    strict=True,
                )
                error = max(error, *(abs(a - b) / max(abs(b), 1.0) for a, b in pairs))
        if before is not None:
            for sequence, sampled in zip(sequences, before, strict=True):
                sequence.append(sampled.token_id)
        newest, before = draw.newest, actual  # right or wrong, it is what the next pass goes on with
        known = {sequence: row.token_id for sequence, row in zip(sequences, actual, strict=True) if row}
    print(f"{name:18} mismatches {wrong}/{rows * passes}  logprob error {error:.1e}", flush=True)


def measure(name: str, parameters: dict[str, Any], rows: int, logits: torch.Tensor) -> None:
    """Device time of a pass (events around launches that follow each other) and the host's time to launch one."""
    sampler = DeviceSampler(VOCAB, 256, CUDA)
    sequences = sequences_with(parameters, rows)
    newest = sampler.launch(logits, scheduled(sequences), NewestTokens.none(CUDA)).newest
    pending = [1] * rows
    host: list[float] = []
    device: list[float] = []
    for _ in range(30):
        chunks = scheduled(sequences)
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_500_000)  # keeps the device busy until all launches are queued
        start.record()
        began = time.perf_counter()
        draw = sampler.launch(logits, chunks, newest)
        host.append((time.perf_counter() - began) * 1e6)
        end.record()
        results = draw.wait()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end) * 1e3)
        newest = draw.newest
        for sequence, token_id in zip(sequences, pending, strict=True):  # one token stays unknown to the host
            sequence.append(token_id)
        pending = [sampled.token_id if sampled else 0 for sampled in results]
    print(
        f"{name:18} R={rows:3}  device {statistics.median(device[5:]):7.1f} us  host {statistics.median(host[5:]):6.1f} us"
        f"  (max {max(host[5:]):.0f})",
        flush=True,
    )


def attempt(what: str, act: Callable[[], None]) -> None:
    try:
        act()
    except Exception:  # the rest is worth knowing as well
        print(f"FAILED {what}\n{traceback.format_exc(limit=6)}", flush=True)


def main() -> None:
    random.seed(1)
    torch.manual_seed(1)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for check in CHECKS:
        began = time.perf_counter()
        attempt(check, lambda check=check: run(check, "cuda", large=True))
        print(f"check {check}: {time.perf_counter() - began:.1f} s", flush=True)
    for name, parameters in PARAMETERS.items():
        attempt(name, lambda name=name, parameters=parameters: compare(name, parameters))
    flat = torch.randn(256, VOCAB, device=CUDA).bfloat16()
    peaked = language_like(256)
    for rows in (1, 32, 256):
        for name in (
            "greedy",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            "all filters",
            "penalties",
            "penalties, drawn",
            "logprobs",
        ):
            for kind, logits in (("", peaked), (", flat", flat)):
                if kind and name not in ("temperature", "top_k", "top_p", "all filters"):
                    continue
                attempt(
                    name, lambda name=name, kind=kind, rows=rows, logits=logits: measure(
                        name + kind, PARAMETERS[name], rows, logits[:rows]
                    )
                )  # fmt: skip


if __name__ == "__main__":
    main()
