"""An engine without a model, for tests and load experiments: the real pool, real bytes, arithmetic for attention.

Every token's slot gets a pattern derived from a running hash of the tokens up to it. The next token is a function of
what is *read back* through the block table over the whole context, so one wrong, stale or missing lane gives another
answer. What the answer must be, `FakeEngine.expected` computes from the tokens alone.

Shapes: N blocks, P = layers * 2 planes, B block size, W = heads * head_dim; a slot has P * W lanes of 2 or 4 bytes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from common.messages import KVLayout, SamplingParams, TokenLogprobs
from engine.config import EngineConfig
from engine.engine import Allocate, Chunk, InvalidChunkError, Pass, Sampled
from engine.fake_faults import FakeFaults
from engine.kv_cache import DEFAULT_CPU_BYTES, allocate_zeros, pool_shape
from engine.passes import Finished
from engine.sequence import Sequence

Lanes = npt.NDArray[np.unsignedinteger]
Words = npt.NDArray[np.uint64]

DEFAULT_MAX_MODEL_LEN = 4096
FAKE_VOCAB = 512
_MASK = 2**64 - 1
_ROOT = 0x6261746F6E_0001  # running hash before the first token
_STEP = 6364136223846793005  # Knuth's multiplier for 64-bit linear congruential sequences
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCosts:
    """How long a pass takes, in milliseconds: a fixed part, each prefilled token, each sequence that decodes."""

    step_ms: float = 0.0
    prefill_token_ms: float = 0.0
    decode_sequence_ms: float = 0.0

    def seconds(self, chunks: SequenceOf[Chunk]) -> float:
        """Duration of a pass of these chunks."""
        decoding = sum(chunk.num_tokens == 1 and chunk.sample for chunk in chunks)
        prefilled = sum(chunk.num_tokens for chunk in chunks) - decoding
        return (self.step_ms + self.prefill_token_ms * prefilled + self.decode_sequence_ms * decoding) / 1000


class FakeEngine:
    """Takes the place of `Engine`: same attributes, same `launch`. `config.model` names no folder, only the fingerprint.

    `sleep(seconds)` spends what `costs` say; None spends nothing.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int = FAKE_VOCAB,
        num_layers: int = 2,
        num_kv_heads: int = 1,
        head_dim: int = 8,
        costs: FakeCosts | None = None,
        faults: FakeFaults | None = None,
        sleep: Callable[[float], object] | None = time.sleep,
        allocate: Allocate | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.max_model_len = config.max_model_len or DEFAULT_MAX_MODEL_LEN
        self.layout = _layout(config, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.fingerprint = hashlib.sha256(f"fake {config.model} {vocab_size} {self.layout}".encode()).hexdigest()[:32]
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        self.kv = (allocate or allocate_zeros)(pool_shape(self.layout), dtype, config.device)
        self.pass_ms: dict[tuple[int, int], float] = {}  # it has no graphs
        self._costs = costs or FakeCosts()
        self._faults = faults or FakeFaults("")
        self._newest: dict[Sequence, tuple[int, int]] = {}  # what the last launch sampled: position, token
        self._sleep = sleep
        self._slots = _slot_view(self.kv)
        self._pattern = _Pattern(num_lanes=2 * num_layers * num_kv_heads * head_dim, itemsize=self.kv.element_size())

    def launch(self, chunks: list[Chunk]) -> Pass:
        """Write each chunk's slots, then read each sampled sequence's whole context; the pass is over on return.

        A chunk may begin with the token that the launch before sampled. Raises InvalidChunkError before anything was
        written when a chunk contradicts its sequence, the pool or what is known.
        """
        self._faults.strike(chunks)
        newest, self._newest = self._newest, {}
        tokens = {chunk: self._tokens(chunk, newest) for chunk in chunks}
        for chunk in chunks:
            self._write(chunk, tokens[chunk])
        results = [self._sample(chunk) if chunk.sample else None for chunk in chunks]
        for chunk, sampled in zip(chunks, results, strict=True):
            if sampled is not None:
                self._newest[chunk.sequence] = (chunk.end, sampled.token_id)
        if self._sleep is not None:
            self._sleep(self._costs.seconds(chunks))
        return Finished(results)

    def expected(
        self, token_ids: SequenceOf[int], n: int, sampling: SamplingParams, *, num_generated: int = 0
    ) -> list[int]:
        """Return the tokens that follow `token_ids`, computed without the pool: `n`, fewer if a stop token ends them.

        `num_generated` of `token_ids` were generated before, which counts for `max_tokens` and `min_tokens`.
        """
        hashes = _running_hashes(_ROOT, token_ids)
        checksum = self._pattern.checksum(self._pattern.lanes(hashes), start=0)
        answer: list[int] = []
        while len(answer) < min(n, sampling.max_tokens - num_generated):
            token = self._choose(checksum, sampling, num_generated + len(answer))
            answer.append(token)
            if token in sampling.stop_token_ids:
                break
            hashes = _running_hashes(int(hashes[-1]), [token])
            position = len(token_ids) + len(answer) - 1
            checksum = (checksum + self._pattern.checksum(self._pattern.lanes(hashes), start=position)) & _MASK
        return answer

    def _tokens(self, chunk: Chunk, newest: dict[Sequence, tuple[int, int]]) -> list[int]:
        """The chunk's tokens: known, but for a last one that the pass before sampled. Raises InvalidChunkError."""
        sequence, end = chunk.sequence, chunk.end
        known, table = sequence.token_ids[:end], list(sequence.block_table)
        sampled_at, sampled = newest.get(sequence, (-1, -1))
        if sampled_at == len(known) == end - 1:
            known.append(sampled)
        if chunk.num_tokens < 1 or chunk.start < 0 or end > len(known):
            problem = f"a chunk of {chunk.num_tokens} at {chunk.start} of {len(known)} tokens"
        elif chunk.sample and end < len(sequence.token_ids):
            problem = f"asked to sample at position {end} of {len(sequence.token_ids)} known tokens"
        elif end > self.max_model_len:
            problem = f"{end} tokens, the model takes {self.max_model_len}"
        elif end > len(table) * self.layout.block_size:
            problem = f"{len(table)} blocks don't cover {end} positions"
        elif not all(0 <= block < self.layout.num_blocks for block in table):
            problem = "a block outside the pool"
        elif not all(0 <= token < self.vocab_size for token in known[chunk.start :]):
            problem = "a token outside the vocabulary"
        elif sampled_at == end - 1 and known[-1] != sampled:
            problem = f"token {end - 1} is {known[-1]}, but {sampled} was sampled"
        else:
            return known[chunk.start :]
        raise InvalidChunkError(f"request {sequence.request_id}: {problem}")

    def _write(self, chunk: Chunk, token_ids: list[int]) -> None:
        start, size = chunk.start, self.layout.block_size
        previous = self._pattern.hash_of(self._read(chunk, start - 1, start)[0]) if start else _ROOT
        hashes = _running_hashes(previous, token_ids)
        lanes = self._pattern.lanes(hashes).reshape(chunk.num_tokens, self._slots.shape[1], self._slots.shape[3])
        positions = np.arange(start, chunk.end)
        blocks = np.asarray(chunk.sequence.block_table)[positions // size]
        self._slots[blocks, :, positions % size] = lanes

    def _read(self, chunk: Chunk, start: int, end: int) -> Lanes:
        """The lanes [end - start, P * W] of positions [start, end), through the block table."""
        size = self.layout.block_size
        first, last = start // size, -(-end // size)
        rows = self._slots[chunk.sequence.block_table[first:last]]  # [blocks, P, B, W]
        by_position = rows.transpose(0, 2, 1, 3).reshape((last - first) * size, -1)
        lanes: Lanes = by_position[start - first * size : end - first * size]
        return lanes

    def _sample(self, chunk: Chunk) -> Sampled:
        sampling = chunk.sequence.sampling
        checksum = self._pattern.checksum(self._read(chunk, 0, chunk.end), start=0)
        token = self._choose(checksum, sampling, chunk.sampled_index)
        if sampling.logprobs is None:
            return Sampled(token, None)
        top_ids = [(token + rank) % self.vocab_size for rank in range(sampling.logprobs)]
        top = [-1.0 - rank for rank in range(sampling.logprobs)]
        return Sampled(token, TokenLogprobs(logprob=-1.0, top_ids=top_ids, top_logprobs=top))

    def _choose(self, checksum: int, sampling: SamplingParams, num_generated: int) -> int:
        """The token for a context's checksum: pure, and of the seed only when the temperature asks for chance."""
        word = _mix(checksum + (_mix(sampling.seed) if sampling.temperature > 0 else 0))
        banned = sampling.stop_token_ids if num_generated < sampling.min_tokens else ()
        while word % self.vocab_size in banned:
            word = _mix(word)
        return word % self.vocab_size


class _Pattern:
    """What a slot holds for a running hash: its pieces, repeated over the lanes, each lane under a mask of its own."""

    def __init__(self, *, num_lanes: int, itemsize: int) -> None:
        self._pieces = 8 // itemsize
        if num_lanes < self._pieces:
            raise ValueError(f"a slot of {num_lanes} lanes of {itemsize} bytes can't hold a 64-bit hash")
        self._dtype = {2: np.uint16, 4: np.uint32}[itemsize]
        self._piece_of_lane = np.arange(num_lanes) % self._pieces
        self._masks = _mixed(num_lanes, salt=1).astype(self._dtype)
        self._factors = _mixed(num_lanes, salt=2) | np.uint64(1)
        self._weights = _mixed(DEFAULT_MAX_MODEL_LEN, salt=3) | np.uint64(1)

    def lanes(self, hashes: Words) -> Lanes:
        """Lanes [tokens, num_lanes] for the running hashes [tokens]."""
        pieces = hashes.astype("<u8").reshape(-1, 1).view(self._dtype)
        lanes: Lanes = pieces[:, self._piece_of_lane] ^ self._masks
        return lanes

    def hash_of(self, lanes: Lanes) -> int:
        """The running hash that a slot's lanes [num_lanes] say they hold."""
        pieces = lanes[: self._pieces] ^ self._masks[: self._pieces]
        return int.from_bytes(pieces.astype(self._dtype).tobytes(), "little")

    def checksum(self, lanes: Lanes, *, start: int) -> int:
        """Sum over lanes [tokens, num_lanes] at positions from `start`, mod 2^64: any single other lane changes it."""
        end = start + len(lanes)
        if end > len(self._weights):
            self._weights = _mixed(2 * end, salt=3) | np.uint64(1)
        slots = lanes.astype(np.uint64) @ self._factors
        return int((slots * self._weights[start:end]).sum(dtype=np.uint64))


def _layout(config: EngineConfig, *, num_layers: int, num_kv_heads: int, head_dim: int) -> KVLayout:
    layout = KVLayout(
        num_blocks=config.num_blocks or 0,
        num_layers=num_layers,
        block_size=config.block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype="float32" if config.dtype == "auto" else config.dtype,
    )
    return structs.replace(
        layout, num_blocks=config.num_blocks or (config.kv_memory_bytes or DEFAULT_CPU_BYTES) // layout.block_bytes
    )


def _slot_view(kv: torch.Tensor) -> Lanes:
    """View the pool as unsigned lanes [N, P, B, W]."""
    num_blocks, num_layers, _, size = kv.shape[:4]
    signed = kv.view(torch.int16 if kv.element_size() == 2 else torch.int32).numpy()
    unsigned = signed.view({2: np.uint16, 4: np.uint32}[kv.element_size()])
    slots: Lanes = unsigned.reshape(num_blocks, 2 * num_layers, size, -1)
    return slots


def _running_hashes(previous: int, token_ids: SequenceOf[int]) -> Words:
    """h[i] = h[i-1] * STEP + token[i] + 1 mod 2^64, with h[-1] = `previous`."""
    hashes = np.empty(len(token_ids), dtype=np.uint64)
    for index, token in enumerate(token_ids):
        previous = (previous * _STEP + token + 1) & _MASK
        hashes[index] = previous
    return hashes


def _mix(word: int) -> int:
    """The finaliser of splitmix64."""
    word = (word + _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def _mixed(count: int, *, salt: int) -> Words:
    """`_mix` of `count` words in one go."""
    words = np.arange(count, dtype=np.uint64) + np.uint64(((salt << 40) + _GOLDEN) & _MASK)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
