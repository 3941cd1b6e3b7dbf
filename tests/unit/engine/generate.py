"""The smallest loop around an engine: admit, chunk, step, append, publish. What a worker does, without one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain, product

import torch

from common.blocks import hash_root
from common.messages import SamplingParams
from engine.cache.block_pool import BlockPool
from engine.engine import Chunk, Engine, Pass, Sampled
from engine.groups import Entry, entries_of
from engine.sequence import Sequence
from kvtransfer.digest import block_digests
from kvtransfer.plan import LayoutMismatchError, plan_copies
from tests.unit.engine.tables import blocks_of_tokens, table_of
from worker.serving.allocation import HeldBlocks, admit, cargo_of, publish_computed, received
from worker.serving.chunks import finish, schedule

ROOT = hash_root(model="tiny", kv_dtype="float32", block_size=16)


def new_sequence(request_id: str, prompt: list[int], **sampling: object) -> Sequence:
    """A greedy sequence of 12 tokens unless `sampling` says otherwise."""
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | sampling))  # type: ignore[arg-type]
    return Sequence(
        request_id=request_id,
        attempt=1,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=params,
        hash_root=ROOT,
    )


class Generator:
    """Runs sequences to their end, all in one batch, each with at most `chunk_size` tokens a step.

    `draft(sequence)`: tokens that may follow its own, which the next step verifies.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        chunk_size: int = 512,
        draft: Callable[[Sequence], SequenceOf[int]] = lambda _: (),
    ) -> None:
        self.pool = BlockPool.of(engine.layout)
        self.results: dict[str, list[Sampled | None]] = {}  # request id -> everything its sampling chunks got
        self.engine, self.launch = engine, engine.launch
        self._chunk_size = chunk_size
        self._draft = draft
        self.accepted: list[int] = []  # drafted tokens, by verified draft

    def run(self, sequences: Iterable[Sequence]) -> list[list[int]]:
        """Return each sequence's generated tokens."""
        sequences = list(sequences)
        for sequence in sequences:
            self.admit(sequence)
        self.go_on(sequences)
        for sequence in sequences:
            self.release(sequence)
        return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]

    def start(self, sequence: Sequence) -> None:
        """Admit a sequence and compute its prompt and first token."""
        self.admit(sequence)
        self.go_on([sequence], num_tokens=1)

    def go_on(self, sequences: list[Sequence], *, num_tokens: int | None = None) -> None:
        """Advance admitted sequences to their end, or until each has generated `num_tokens`."""
        while running := [
            sequence
            for sequence in sequences
            if not self._is_over(sequence) and (num_tokens is None or sequence.num_generated < num_tokens)
        ]:
            self._advance(running)

    def _is_over(self, sequence: Sequence) -> bool:
        return bool(sequence.finish_reason()) or None in self.results.get(sequence.request_id, [])

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence its cached prefix and blocks for all that it may generate."""
        admit(self.pool, sequence, num_tokens=sequence.num_tokens + sequence.sampling.max_tokens)

    def _advance(self, running: list[Sequence]) -> None:
        chunks = [
            schedule(self.pool, sequence, num_tokens, drafted=self._drafted(sequence) if num_tokens == 1 else ())
            for sequence in running
            for num_tokens in [min(sequence.num_unscheduled, self._chunk_size)]
        ]
        self.deliver(chunks, self.launch(chunks))

    def _drafted(self, sequence: Sequence) -> tuple[int, ...]:
        """A draft behind the last token, with room for the token that is sampled behind it."""
        if sequence.num_unscheduled != 1:
            return ()
        return tuple(self._draft(sequence))[: sequence.sampling.max_tokens - sequence.num_generated - 1]

    def deliver(self, chunks: list[Chunk], pass_: Pass) -> None:
        """Wait for a pass and give each sequence its result."""
        for chunk, sampled in zip(chunks, pass_.wait(), strict=True):
            further = () if sampled is None else sampled.further
            if chunk.drafted:
                self.accepted.append(len(further))
            finish(self.pool, chunk, len(further))
            for each in (sampled, *further) if chunk.sample else ():
                self.results.setdefault(chunk.sequence.request_id, []).append(each)
                if each is not None:
                    chunk.sequence.append(each.token_id)
                if chunk.sequence.finish_reason():
                    publish_computed(self.pool, chunk.sequence)
                    break

    def release(self, sequence: Sequence) -> None:
        """Give all blocks of a sequence back."""
        HeldBlocks(self.pool).give_back(sequence)


def move(sequence: Sequence, source: Generator, target: Generator) -> None:
    """Copy what the sequence's next token reads to another engine's pool, and let it go on there."""
    pool, num_computed = target.pool, sequence.num_computed
    cargo, moved = cargo_of(pool, num_computed), list[list[Entry]]()
    for group, part, table in zip(pool.groups, cargo.groups, sequence.tables, strict=True):
        sent = list(dict.fromkeys(table.entries[part.first :]))  # what goes on in place, once
        taken = entries_of(pool.allocate(len(sent) * group.blocks), group.blocks)
        for ours, theirs in product(_each(source.engine), _each(target.engine)):
            _copy(ours, [*chain(*sent)], theirs, [*chain(*taken)])
        moved.append(taken)
    source.release(sequence)
    sequence.restart(num_computed)
    sequence.tables = received(pool, cargo, moved, [0] * len(moved))


def _each(engine: Engine) -> list[Engine]:
    """The engine, and those that have other shares."""
    return [engine, *getattr(engine._ranks.followers, "engines", ())]


def _copy(source: Engine, sent: list[int], target: Engine, taken: list[int]) -> None:
    if source.layout.compatible_with(target.layout):
        target.kv[taken] = source.kv[sent]
        return
    with contextlib.suppress(LayoutMismatchError):  # nothing in common
        ours, theirs = map(torch.from_numpy, plan_copies(source.layout, target.layout).lanes())
        lanes = [engine.kv.flatten(1).view(torch.uint8).view(torch.int32) for engine in (source, target)]
        lanes[1][torch.tensor(taken)[:, None], theirs] = lanes[0][torch.tensor(sent)[:, None], ours]


def said_in_flight(engine: Engine, prompt: list[int]) -> list[int]:
    """Tokens that are drawn behind a prompt, with two passes in flight: each begins with a token that nobody knows yet."""
    generator, sequence = Generator(engine), new_sequence("a", prompt, max_tokens=40, temperature=1.0, seed=9)
    generator.admit(sequence)
    before = [sequence.schedule(sequence.num_unscheduled)]
    pass_ = engine.launch(before)
    while not sequence.finish_reason():
        after = [sequence.schedule(1)] if sequence.num_generated + 1 < 40 else []
        following = engine.launch(after)
        generator.deliver(before, pass_)
        before, pass_ = after, following
    return sequence.token_ids[len(prompt) :]


def scored(engine: Engine, sequences: list[Sequence], *, chunk_size: int = 512) -> list[list[int]]:
    """Compute the sequences together, keeping scores as a worker does; return the generated tokens."""
    generator = Generator(engine, chunk_size=chunk_size)
    for sequence in sequences:
        generator.admit(sequence)
    while running := [sequence for sequence in sequences if not sequence.finish_reason()]:
        chunks = [sequence.schedule(min(sequence.num_next, chunk_size)) for sequence in running]
        pass_ = generator.launch(chunks)
        for chunk, result in zip(chunks, pass_.wait(), strict=True):
            if result is not None and result.prompt_logprobs is not None:
                chunk.sequence.scored(chunk, result.prompt_logprobs)
        generator.deliver(chunks, pass_)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def handed_over(prefill: Engine, decode: Engine, prompt: list[int]) -> list[int]:
    """What the second engine generates behind a prompt whose blocks the first computed. They have the same digests in both."""
    writer, reader = Generator(prefill), Generator(decode)
    sent, received = (new_sequence("a", prompt) for _ in range(2))
    writer.admit(sent)
    chunk = sent.schedule(len(prompt))
    writer.deliver([chunk], writer.launch([chunk]))
    sources = blocks_of_tokens(sent)[: -(-len(prompt) // reader.pool.block_size)]
    *places, last = random.sample(reader.pool.allocate(40), len(sources) + 1)
    source, target = (engine.kv.view(len(engine.kv), -1).view(torch.uint8) for engine in (prefill, decode))
    target[places] = source[sources]
    digests = block_digests(prefill.kv, sources, prefill.layout)
    assert block_digests(decode.kv, places, decode.layout) == digests
    received.tables = [table_of([*places, last])]
    received.restart(len(prompt))
    received.append(sent.token_ids[-1])
    while not received.finish_reason():
        chunk = received.schedule(1)
        reader.deliver([chunk], reader.launch([chunk]))
    return received.token_ids[len(prompt) :]
