"""Greedy tokens of the engine against `transformers` on the same device, for one model of each family.

    python -m benchmarks.quality.accuracy --device cuda           models of real shapes in bfloat16
    python -m benchmarks.quality.accuracy --device cpu            the demo model in float32: every token must be the same

The reference judges each of the engine's tokens behind the engine's own tokens before it, so one early difference hides nothing.
In bfloat16 both round, and random weights make near-ties; the judge is therefore the reference in float32. A token other than its
best is explained by rounding if its logit lies below the best one by no more than twice the largest error that the bfloat16
reference makes at that position, which is what rounding can do to two logits. What is not explained is wrong.

One sample of errors is not enough where rounding makes a token choose another expert. Where a token seems wrong, the float32
reference is asked again with the results of all its modules rounded up or down at random (Parker, "Monte Carlo arithmetic",
1997), several times, and the largest of all these errors counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.engine.workload import Prompts, Workload, driven
from benchmarks.environment import ROOT, device_of
from benchmarks.results_format import Result
from benchmarks.weights.checkpoint import write_checkpoint
from benchmarks.weights.drawn import DRAWN
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from worker.device.prompt_budget import PromptBudget

SHAPES = {"llama": "llama-small", "mistral": "mistral-small", "qwen2": "qwen2-small", "qwen3": "qwen3-small"}
# Shapes of `benchmarks/weights/drawn.py` with fewer layers and experts, and windows that short prompts reach.
_LITTLE = {"num_hidden_layers": 2, "vocab_size": 32_000, "bos_token_id": 1, "eos_token_id": 2}
DRAWN_SMALLER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma-3-12b", {"sliding_window_pattern": 2, "sliding_window": 256}),
    "qwen3_moe": ("qwen3-30b-a3b", {"num_experts": 32}),
    "gpt_oss": ("gpt-oss-20b", {"num_local_experts": 8}),
    "qwen3_5": ("qwen3.5-9b", {"num_hidden_layers": 4}),
    "qwen3_5_moe": ("qwen3.5-35b-a3b", {"num_hidden_layers": 4, "num_experts": 32}),
    "glm4_moe_lite": ("glm-4.7-flash", {"n_routed_experts": 16}),
}
PROMPT_LENGTHS = (5, 17, 64, 100, 129, 250, 333, 511)
NUM_TOKENS = 32
DEADLINE_S = 120.0
ROUNDINGS = 8  # at random


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The agreement of one model's tokens with the reference's."""

    name: str
    tokens: int
    as_reference: int  # tokens that are the reference's best in the engine's dtype
    as_float32: int
    reference_as_float32: int  # what the reference itself reaches
    gaps: tuple[float, ...]  # how far wrong tokens' logits lie below the best one
    explained: tuple[float, ...]  # the same where rounding explains it

    def __str__(self) -> str:
        text = (
            f"{self.name}: {self.as_reference} of {self.tokens} tokens are the reference's; the float32 reference's: "
            f"{self.as_float32} of ours, {self.reference_as_float32} of the reference's own"
        )
        if self.explained:
            text += f"; {len(self.explained)} explained by rounding, largest gap {max(self.explained):.4f}"
        if self.gaps:
            text += f"; WRONG: {len(self.gaps)}, gaps {', '.join(f'{gap:.4f}' for gap in self.gaps[:8])}"
        return text

    def results(self) -> list[Result]:
        """In a results page: the share that agrees, and how many are wrong."""
        return [
            Result(
                name=f"accuracy_{self.name}",
                value=100 * self.as_float32 / self.tokens,
                unit="% of tokens as in float32",
                better="higher",
                floor=100.0,
                reference=100 * self.reference_as_float32 / self.tokens or None,
            ),
            Result(name=f"accuracy_{self.name}_wrong", value=len(self.gaps), unit="tokens", better="lower"),
        ]


def measure_accuracy(device: str, *, quick: bool, seed: int) -> Iterator[Agreement]:
    """Compare one model of each family after the other; the demo model alone if `quick`."""
    if quick:
        yield compare(ROOT / "demo", "demo", device=device, seed=seed)
        return
    for family in (*SHAPES, *DRAWN_SMALLER):
        with tempfile.TemporaryDirectory(prefix=f"{family}-") as folder:
            if family in SHAPES:
                write_checkpoint(Path(folder), SHAPES[family])
            else:
                write_smaller(Path(folder), family, device=device)
            yield compare(Path(folder), family, device=device, seed=seed)


def write_smaller(folder: Path, family: str, *, device: str) -> None:
    """Write a checkpoint of a shape of `DRAWN_SMALLER`, its weights as transformers draws them."""
    shape, changes = DRAWN_SMALLER[family]
    fields = DRAWN[shape] | _LITTLE | changes
    config = transformers.AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    release_memory()


def compare(model: Path, name: str, *, device: str, seed: int) -> Agreement:
    """Generate with the engine, then let the reference judge each token."""
    computed = "float32" if device == "cpu" else "auto"
    config = EngineConfig(
        model=model,
        device=device,
        dtype=computed,
        max_batch_tokens=256,
        max_sequences=16,
        cache=CacheConfig(kv_memory_bytes=1 << 30),
    )
    engine = Engine(config)
    lengths = [min(length, engine.max_model_len - NUM_TOKENS) for length in PROMPT_LENGTHS]
    sequences = asyncio.run(_generate(engine, lengths, seed))
    dtype: torch.dtype = getattr(torch, engine.layout.dtype)
    del engine
    release_memory()
    (exact,) = _logits(model, sequences, lengths, device=device, dtype=torch.float32)
    rounded = exact
    if dtype is not torch.float32:
        (rounded,) = _logits(model, sequences, lengths, device=device, dtype=dtype)
    ours = [torch.tensor(tokens[length:]) for tokens, length in zip(sequences, lengths, strict=True)]
    tokens = torch.cat(ours)
    found = judge(name, ours=tokens, exact=exact, rounded=rounded)
    if not found.gaps or dtype is not torch.bfloat16:
        return found
    others = _logits(model, sequences, lengths, device=device, dtype=torch.float32, seeds=range(ROUNDINGS))
    errors = [(exact - each).abs().amax(dim=-1) for each in others]
    return judge(name, ours=tokens, exact=exact, rounded=rounded, errors=errors)


def judge(
    name: str, *, ours: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor, errors: Sequence[torch.Tensor] = ()
) -> Agreement:
    """`ours` [N] tokens; `exact` and `rounded` [N, V]: the reference's logits in float32 and in the engine's dtype.

    `errors` [N] each: the largest ones of other roundings.
    """
    best, reference = exact.argmax(dim=-1), rounded.argmax(dim=-1)
    gaps = exact.amax(dim=-1) - exact.gather(1, ours[:, None])[:, 0]
    allowed = 2 * torch.stack([(exact - rounded).abs().amax(dim=-1), *errors]).amax(dim=0)
    parted = (ours != best) & (gaps > 0)
    return Agreement(
        name=name,
        tokens=len(ours),
        as_reference=int((ours == reference).sum()),
        as_float32=int((ours == best).sum()),
        reference_as_float32=int((reference == best).sum()),
        gaps=tuple(gaps[parted & (gaps > allowed)].tolist()),
        explained=tuple(gaps[parted & (gaps <= allowed)].tolist()),
    )


def release_memory() -> None:
    """Give back what nobody refers to any more, on the device too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


async def _generate(engine: Engine, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts and generated tokens, all in one batch, prefill in chunks, passes overlapping: as a worker does it."""
    workload = Workload(engine)
    requests = Prompts(vocab_size=engine.vocab_size, seed=seed).requests(lengths, max_tokens=NUM_TOKENS)
    async with driven(engine, workload, budget=PromptBudget(token_budget=engine.config.max_batch_tokens)) as loop:
        for request in requests:
            workload.enqueue(request)
        loop.wake()
        await asyncio.wait_for(workload.finished(), DEADLINE_S)
    return [request.sequence.token_ids for request in requests]


@torch.inference_mode()
def _logits(
    model: Path,
    sequences: Sequence[list[int]],
    lengths: Sequence[int],
    *,
    device: str,
    dtype: torch.dtype,
    seeds: Iterable[int | None] = (None,),
) -> list[torch.Tensor]:
    """The reference's logits [tokens, V] float32, on the host, before each generated token, for each seed.

    With a seed the results of its modules are rounded to bfloat16, up or down at random.
    """
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager")
    reference = reference.to(device).eval()
    parts = [module for module in reference.modules() if not any(module.children())]
    found = []
    for seed in seeds:
        hooks = []
        if seed is not None:
            torch.manual_seed(seed)
            hooks = [part.register_forward_hook(_round_at_random) for part in parts]
        logits = []
        for tokens, length in zip(sequences, lengths, strict=True):
            output = reference(torch.tensor([tokens[:-1]], device=device)).logits[0, length - 1 :]
            logits.append(output.float().cpu())
        found.append(torch.cat(logits))
        for hook in hooks:
            hook.remove()
    del reference, parts
    release_memory()
    return found


def _round_at_random(module: torch.nn.Module, given: Any, result: Any) -> Any:
    """As a forward hook: a float32 result with 16 bits of noise below those that bfloat16 keeps, and these alone."""
    if not isinstance(result, torch.Tensor) or result.dtype is not torch.float32:
        return result
    bits = result.contiguous().view(torch.int32)
    return ((bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)).view(torch.float32)


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 1 when a token is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=20_261_121)
    options = parser.parse_args(arguments)
    device_of("benchmarks.quality.accuracy", options.device)
    is_wrong = False
    for agreement in measure_accuracy(options.device, quick=options.device == "cpu", seed=options.seed):
        print(agreement, flush=True)
        is_wrong |= bool(agreement.gaps)
    return 1 if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
