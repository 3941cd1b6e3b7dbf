"""An engine without a model, for tests and load experiments: the real pool, real bytes, arithmetic for attention.

Every slot gets a pattern from a running hash of the tokens up to it. The next token depends on the whole context *read back*
through the block table, so a wrong, stale or missing lane changes the answer. `FakeEngine.expected` computes the right answer
from the tokens alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from common.messages import Grammar, PromptLogprobs, SamplingParams, TokenLogprobs
from common.pages import KVLayout, PagePart
from engine.cache.pages import (
    DEFAULT_CPU_BYTES,
    allocate_zeros,
    layout_of,
    pool_dtype,
    pool_shape,
)
from engine.config import KV_CACHE_DTYPES, EngineConfig
from engine.engine import Allocate, Chunk, InvalidChunkError, Pass, Sampled
from engine.fake.faults import FakeFaults
from engine.fake.pattern import MASK, ROOT, further_parts_of, mix, parts_of, running_hashes
from engine.grammars.grammars import Grammars
from engine.groups import groups_of
from engine.kernels.codes import part_dims
from engine.passes import Finished
from engine.sampling.scores import NO_TOKEN
from engine.sampling.verifying import verifying
from engine.sequence import Sequence
from engine.step.limits import wrong_tables

DEFAULT_MAX_MODEL_LEN = 4096
Allowed = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]  # [V], for a grammar
FAKE_VOCAB = 512
HEAD_DIM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCosts:
    """Milliseconds of a pass: fixed, for each prefilled token, for each decoding sequence."""

    step_ms: float = 0.0
    prefill_token_ms: float = 0.0
    decode_sequence_ms: float = 0.0

    def seconds(self, chunks: SequenceOf[Chunk]) -> float:
        decoding = sum(chunk.num_tokens for chunk in chunks if chunk.decodes and chunk.sample)
        prefilled = sum(chunk.num_tokens for chunk in chunks) - decoding
        return (self.step_ms + self.prefill_token_ms * prefilled + self.decode_sequence_ms * decoding) / 1000


class FakeEngine:
    """A stand-in for `Engine`: same attributes, same `launch`. `config.model` is only the fingerprint.

    `sleep(seconds)` spends what `costs` say; None spends nothing. `parts`: what a block holds; None: keys and values of
    two layers with one small head.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int = FAKE_VOCAB,
        parts: SequenceOf[PagePart] | None = None,
        costs: FakeCosts | None = None,
        faults: FakeFaults | None = None,
        sleep: Callable[[float], object] | None = time.sleep,
        allocate: Allocate | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.max_model_len = config.max_model_len or DEFAULT_MAX_MODEL_LEN
        dtype = "float32" if config.dtype == "auto" else config.dtype
        kind = KV_CACHE_DTYPES[config.cache.kv_cache_dtype]
        kept = part_dims(kind, HEAD_DIM) if kind else ((dtype, HEAD_DIM),)
        plain = [PagePart(layers=2, planes=2, heads=1, dim=dim, dtype=part) for part, dim in kept]
        self.layout = _layout(config, parts or plain)
        self.fingerprint = _fingerprint(str(config.model), vocab_size, self.layout)
        self.kv = (allocate or allocate_zeros)(pool_shape(self.layout), pool_dtype(self.layout), config.device)
        self.pass_ms: dict[tuple[int, int], float] = {}  # there are no graphs
        self.draft_ms: dict[int, float] = {}  # it has no drafter
        self.launch_ms = 0.0
        self.grammars = Grammars(config.model, vocab_size)
        self._costs = costs or FakeCosts()
        self._faults = faults or FakeFaults("")
        self._newest: dict[Sequence, tuple[int, int]] = {}  # sampled by the last launch: position, token
        self._sleep = sleep
        self._parts = parts_of(self.kv, self.layout)
        self._groups = groups_of(self.layout)
        self._further = list(further_parts_of(self.kv, self.layout))

    @property
    def lost(self) -> str:
        """See `Engine.lost`: it has one rank."""
        return ""

    def launch(self, chunks: list[Chunk]) -> Pass:
        """Write each chunk's slots, then read each sampled sequence's whole context; the pass has ended on return.

        A chunk may begin with the token that the launch before sampled. Raises InvalidChunkError before anything was
        written when a chunk contradicts its sequence, the pool or what is known.
        """
        self._faults.strike(chunks)
        return verifying(chunks, self._launch)

    def _launch(self, chunks: list[Chunk]) -> Finished:
        newest, self._newest = self._newest, {}
        tokens = {chunk: self._tokens(chunk, newest) for chunk in chunks}
        for chunk in chunks:
            self._write(chunk, tokens[chunk])
        sampling = [chunk for chunk in chunks if chunk.sample]
        masks = self.grammars.masks(sampling, lambda sequence: newest[sequence][1])
        allowed = {sampling[row]: mask for row, mask in masks.allowed(self.vocab_size).items()} if masks.rows else {}
        results = [
            Sampled(NO_TOKEN, None, problem=masks.problems[chunk])
            if chunk in masks.problems
            else self._sample(chunk, allowed.get(chunk))
            if chunk.sample
            else self._scores(chunk)
            for chunk in chunks
        ]
        for chunk, sampled in zip(chunks, results, strict=True):
            if chunk.drafted:
                self._newest.pop(chunk.sequence, None)  # which of its tokens is the newest, the caller decides
            elif sampled is not None and sampled.token_id != NO_TOKEN:
                self._newest[chunk.sequence] = (chunk.end, sampled.token_id)
        if self._sleep is not None:
            self._sleep(self._costs.seconds(chunks))
        return Finished(results)

    def expected(
        self,
        token_ids: SequenceOf[int],
        n: int,
        sampling: SamplingParams,
        *,
        num_generated: int = 0,
        grammar: Grammar | None = None,
    ) -> list[int]:
        """Return the `n` tokens that follow `token_ids`, computed without the pool; fewer if a stop token ends them.

        The last `num_generated` of `token_ids` count for `max_tokens` and `min_tokens`.
        """
        hashes, start = running_hashes(ROOT, token_ids), 0
        tokens = 0  # checksum of the blocks' parts
        answer: list[int] = []
        followed = Sequence(
            request_id="expected",
            attempt=1,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids) - num_generated,
            sampling=sampling,
            hash_root=b"",
            grammar=grammar,
        )
        while len(answer) < min(n, sampling.max_tokens - num_generated):
            tokens += sum(part.expected(hashes, start=start) for part in self._parts)
            further = sum(kept.expected(hashes) for _, kept in self._further)
            chunk = Chunk(followed, 0, len(followed.token_ids), sample=True)
            masks = self.grammars.masks([chunk], lambda _: 0)
            allowed = masks.allowed(self.vocab_size)[0] if masks.rows else None
            token = self._choose((tokens + further) & MASK, sampling, num_generated + len(answer), allowed)
            answer.append(token)
            followed.append(token)
            if token in sampling.stop_token_ids:
                break
            start = len(hashes)
            hashes = np.append(hashes, running_hashes(int(hashes[-1]), [token]))
        return answer

    def _tokens(self, chunk: Chunk, newest: dict[Sequence, tuple[int, int]]) -> list[int]:
        """The chunk's tokens, the last one possibly sampled by the previous pass. Raises InvalidChunkError."""
        sequence, end = chunk.sequence, chunk.end
        known, blocks = [*sequence.token_ids[:end], *chunk.drafted], _blocks_of_tokens(sequence)
        sampled_at, sampled = newest.get(sequence, (-1, -1))
        if sampled_at == len(known) == end - 1:
            known.append(sampled)
        if chunk.num_tokens < 1 or chunk.start < 0 or end > len(known):
            problem = f"a chunk of {chunk.num_tokens} at {chunk.start} of {len(known)} tokens"
        elif chunk.sample and end < len(sequence.token_ids):
            problem = f"asked to sample at position {end} of {len(sequence.token_ids)} known tokens"
        elif end > self.max_model_len:
            problem = f"{end} tokens, the model takes {self.max_model_len}"
        elif not all(0 <= block < self.layout.num_blocks for block in blocks):
            problem = "a block outside the pool"
        elif not all(0 <= token < self.vocab_size for token in known[chunk.start :]):
            problem = "a token outside the vocabulary"
        elif sampled_at == end - 1 and known[-1] != sampled:
            problem = f"token {end - 1} is {known[-1]}, but {sampled} was sampled"
        elif not (problem := wrong_tables(chunk, self._groups) or self._wrong_entries(chunk)):
            return known[chunk.start :]
        raise InvalidChunkError(f"request {sequence.request_id}: {problem}")

    def _wrong_entries(self, chunk: Chunk) -> str:
        """Problem of the entries that go on in place; "" if they can be the chunk's."""
        for group, table in zip(self._groups, chunk.sequence.tables, strict=True):
            first, end = group.first_seen(chunk.start), -(-chunk.end // group.block_size)
            for entry in () if group.grows else (*table.entries[first:end], *table.behind):
                if len(entry) != group.blocks or not all(0 <= block < self.layout.num_blocks for block in entry):
                    return f"a state in blocks {entry}, not {group.blocks} in [0, {self.layout.num_blocks})"
        return ""

    def _write(self, chunk: Chunk, token_ids: list[int]) -> None:
        blocks, tables = _blocks_of_tokens(chunk.sequence), chunk.sequence.tables
        previous = self._parts[0].hash_at(blocks, chunk.start - 1) if chunk.start else ROOT
        hashes = running_hashes(previous, token_ids)
        for part in self._parts:
            part.write(blocks, chunk.start, hashes)
        for number, kept in self._further:
            kept.write(tables[number], chunk.start, hashes, token_ids, drafted=len(chunk.drafted))

    def _sample(self, chunk: Chunk, allowed: Allowed | None) -> Sampled:
        sampling, tables = chunk.sequence.sampling, chunk.sequence.tables
        blocks = _blocks_of_tokens(chunk.sequence)
        checksum = sum(part.checksum(blocks, chunk.end) for part in self._parts)
        drafted = len(chunk.drafted)
        checksum += sum(kept.checksum(tables[number], chunk.end, drafted=drafted) for number, kept in self._further)
        token = self._choose(checksum & MASK, sampling, chunk.sampled_index, allowed)
        scores = self._prompt_logprobs(chunk)
        if sampling.logprobs is None:
            return Sampled(token, None, scores)
        top_ids = [(token + rank) % self.vocab_size for rank in range(sampling.logprobs)]
        top = [-1.0 - rank for rank in range(sampling.logprobs)]
        return Sampled(token, TokenLogprobs(logprob=-1.0, top_ids=top_ids, top_logprobs=top), scores)

    def _scores(self, chunk: Chunk) -> Sampled | None:
        """The result of a chunk that samples nothing."""
        scores = self._prompt_logprobs(chunk)
        return None if scores is None else Sampled(NO_TOKEN, None, scores)

    def _prompt_logprobs(self, chunk: Chunk) -> PromptLogprobs | None:
        """Prompt logprobs: each token has -1 - its id / vocabulary, and is among the likeliest."""
        if not chunk.scored:
            return None
        count = chunk.sequence.sampling.prompt_logprobs or 0
        tokens = np.array(chunk.sequence.token_ids[chunk.start + 1 : chunk.start + 1 + chunk.scored])
        top = (tokens[:, None] + np.arange(count)) % self.vocab_size
        return PromptLogprobs(
            logprobs=(-1 - tokens / self.vocab_size).astype("<f4").tobytes(),
            ranks=np.ones(len(tokens), dtype="<u4").tobytes(),
            top_ids=top.astype("<u4").tobytes(),
            top_logprobs=(-1 - top / self.vocab_size).astype("<f4").tobytes(),
        )

    def _choose(
        self, checksum: int, sampling: SamplingParams, num_generated: int, allowed: Allowed | None = None
    ) -> int:
        """The token for a context's checksum; the seed only counts with a temperature."""
        word = mix(checksum + (mix(sampling.seed) if sampling.temperature > 0 else 0))
        if allowed is not None:
            ids = np.flatnonzero(allowed)
            return int(ids[word % len(ids)])
        banned = sampling.stop_token_ids if num_generated < sampling.min_tokens else ()
        while word % self.vocab_size in banned:
            word = mix(word)
        return word % self.vocab_size


def _blocks_of_tokens(sequence: Sequence) -> list[int]:
    return [block for entry in sequence.tables[0].entries for block in entry] if sequence.tables else []


def _layout(config: EngineConfig, parts: SequenceOf[PagePart]) -> KVLayout:
    memory = config.cache.kv_memory_bytes or DEFAULT_CPU_BYTES
    return layout_of(parts, config.cache, memory, max_model_len=config.max_model_len)


def _fingerprint(model: str, vocab_size: int, layout: KVLayout) -> str:
    """The fingerprint. Without parts it must be the same text in every release: workers of two releases exchange sequences."""
    later = ("parts", "groups")
    names = [name for name in layout.__struct_fields__ if name not in later or getattr(layout, name)]
    fields = ", ".join(f"{name}={getattr(layout, name)!r}" for name in names)
    text = f"fake {model} {vocab_size} KVLayout({fields})"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
