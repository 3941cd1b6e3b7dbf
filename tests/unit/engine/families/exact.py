# mypy: allow-untyped-calls
"""Two engines over one checkpoint, a prefill's and a decode's, and `transformers` as the judge of what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.config import EngineConfig
from engine.engine import Engine
from engine.groups import groups_of
from engine.sequence import Sequence
from tests.models import VOCAB_SIZE
from tests.unit.engine.families.case import Case, without_towers
from tests.unit.engine.generate import Generator, move, new_sequence
from worker.serving.allocation import blocks_of

NUM_BLOCKS = 96
TAKEN = 5  # blocks of the decode end's pool: a block has another id there
NUM_TOKENS = 8
TOP_LOGPROBS = 20
TOLERANCE = 2e-3  # of a logprob; float32 sums in another order make 1e-5, a forgotten switch 0.1


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed + length)).tolist()


def asked(request_id: str, prompt: list[int], *, max_tokens: int = NUM_TOKENS) -> Sequence:
    return new_sequence(request_id, prompt, max_tokens=max_tokens, logprobs=TOP_LOGPROBS)


class Bench:
    """The engines of one case. What was never written into their pools is NaN.

    `stored`: the checkpoint as the engines read it, made from the folder, which transformers reads afterwards. None: the
    folder, and transformers' network is the one that wrote it: one that was read gives the same logits. `options`: of the
    engines.
    """

    def __init__(
        self, case: Case, folder: Path, *, stored: Callable[[Path], Path] | None = None, **options: Any
    ) -> None:
        self._reference = case.built(folder)
        self.shortest, model = case.shortest, folder
        if stored is not None:
            model, network = stored(folder), getattr(transformers, case.architecture())
            with without_towers():
                read = network.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            self._reference = read.eval()
        self._logprobs: dict[tuple[int, ...], torch.Tensor] = {}
        config = EngineConfig.of(
            model=model, num_blocks=NUM_BLOCKS, max_model_len=case.max_model_len, model_impl=case.model_impl, **options
        )
        self._engines = Engine(config, allocate=_full_of_nan), Engine(config, allocate=_full_of_nan)
        layout = self._engines[0].layout
        # Tokens between the checkpoints that any sequence leaves; without states each block can be gone on from.
        distances = (group.resume_distance for group in groups_of(layout) if not group.grows)
        self.checkpoint_every = max(distances, default=layout.block_size)

    def generators(
        self, *, chunk_size: int = 512, draft: Callable[[Sequence], SequenceOf[int]] = lambda _: ()
    ) -> tuple[Generator, Generator]:
        """Empty pools at both ends, and what drives them."""
        for engine in self._engines:
            _fill_with_nan(engine.kv)
        prefill, decode = (Generator(engine, chunk_size=chunk_size, draft=draft) for engine in self._engines)
        decode.pool.allocate(TAKEN)
        return prefill, decode

    def hand_over(self, sequence: Sequence, prefill: Generator, decode: Generator) -> None:
        """Copy a sequence's blocks to the other pool, and let it go on there."""
        move(sequence, prefill, decode)

    def check_handed_over(self, *, chunk_size: int) -> None:
        """A prompt is computed at one end, and answered at the other."""
        prefill, decode = self.generators(chunk_size=chunk_size)
        sequence = asked("alone", prompt_of(70))
        prefill.start(sequence)
        self.hand_over(sequence, prefill, decode)
        decode.go_on([sequence])
        self.check([sequence], prefill, decode)

    def lose(self, sequence: Sequence, generator: Generator) -> None:
        """Take all blocks of a sequence of the decode end away, as preemption does; what was in them is lost."""
        lost = blocks_of(sequence)
        self._engines[1].kv[lost] = self._engines[1].kv.new_tensor(_nothing(self._engines[1].kv))
        generator.pool.withdraw(lost, sequence.digests)
        generator.release(sequence)

    def check(self, sequences: Iterable[Sequence], *generators: Generator) -> None:
        """Every token is the likeliest of transformers, and has the logprobs that it gives to the twenty likeliest."""
        for sequence in sequences:
            expected = self._expected(sequence.token_ids)
            prompt = sequence.num_prompt_tokens
            got = [each for generator in generators for each in generator.results.get(sequence.request_id, [])]
            assert len(got) == sequence.num_generated
            for at, sampled in enumerate(got, start=prompt - 1):
                row = expected[at]
                assert sampled is not None
                assert sampled.logprobs is not None
                ids = sampled.logprobs.top_ids
                assert len(ids) == TOP_LOGPROBS
                ours = torch.tensor(sampled.logprobs.top_logprobs)
                error = float((ours - row[ids]).abs().max())
                assert error < TOLERANCE, f"{sequence.request_id}, position {at}: logprobs differ by {error}"
                assert sampled.token_id == int(row.argmax()), f"{sequence.request_id}, position {at}"

    @torch.inference_mode()
    def _expected(self, tokens: list[int]) -> torch.Tensor:
        """Logprobs [T, V] behind each token."""
        if (key := tuple(tokens)) not in self._logprobs:
            self._logprobs[key] = self._reference(torch.tensor([tokens])).logits[0].float().log_softmax(dim=-1)
        return self._logprobs[key]


def _full_of_nan(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return _fill_with_nan(torch.empty(shape, dtype=dtype, device=device))


def _fill_with_nan(pool: torch.Tensor) -> torch.Tensor:
    return pool.fill_(_nothing(pool))


def _nothing(pool: torch.Tensor) -> float:
    """NaN, also where the pool is bytes: all ones is NaN in every format."""
    return float("nan") if pool.is_floating_point() else 255
