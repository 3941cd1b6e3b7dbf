"""Ranks or stages as threads of one process, over the memory that processes would share: an engine of several."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from common.messages import Grammar
from engine.config import EngineConfig
from engine.engine import Allocate, Engine
from engine.lockstep import decode_config
from engine.parallel.group import ALONE
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.sequence import Sequence
from engine.weights.sleeping import storages_of
from tests.models import EOS_TOKEN_ID
from tests.unit.engine.families.exact import prompt_of
from tests.unit.engine.generate import Generator, new_sequence

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
JSON = Grammar(text=f"start: %json {json.dumps(SCHEMA)}")
WAYS: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 1.0, "seed": 2**63 + 5},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 3, "logprobs": 2},
    {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "seed": 4},
    {"temperature": 0.8, "typical_p": 0.9, "min_p": 0.01, "seed": 6},
    {"presence_penalty": 0.5, "logit_bias": {8: 2.0}, "logprobs": 0, "min_tokens": 5, "stop_token_ids": [EOS_TOKEN_ID]},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": [EOS_TOKEN_ID], "max_tokens": 30},
)
PROMPTS = [prompt_of(length) for length in (1, 16, 70, 41)]


class Threads:
    """Followers that are threads. They execute each message before the leader's next one. `allocate`: see `Engine`."""

    def __init__(
        self, size: int, *, are_stages: bool = False, width: int = 1, allocate: Allocate | None = None
    ) -> None:
        """`width`: the ranks of each stage."""
        memory = mmap.mmap(-1, SharedMemoryGroup.num_bytes(size))
        groups = [SharedMemoryGroup(memory, rank=rank, size=size, lost=self.problem) for rank in range(size)]
        ranks = [
            Ranks(group.within(width) if width > 1 else ALONE, stage=group.stage(width=width), exchange=group.exchange)
            if are_stages
            else Ranks(group, exchange=group.exchange)
            for group in groups
        ]
        self.group, self.others, self._allocate = groups[0], ranks[1:], allocate
        self.leader = replace(ranks[0], followers=self)
        self.engines = list[Engine]()
        self._threads = [ThreadPoolExecutor(1) for _ in self.others]
        self.failed = ""

    def problem(self) -> str:
        return self.failed

    def send(self, *frames: bytes) -> None:
        self.tell(*frames)

    def tell(self, *frames: bytes) -> None:
        for frame in frames:
            if not self.engines:
                config = decode_config(frame)
                self.engines = [Engine(config, allocate=self._allocate, ranks=ranks) for ranks in self.others]
                continue
            for thread, engine in zip(self._threads, self.engines, strict=True):
                thread.submit(self._follow, engine, frame)

    def _follow(self, engine: Engine, frame: bytes) -> None:
        if self.failed:
            return  # a process would have ended
        try:
            engine.follow(frame)
        except BaseException as error:
            self.failed = self.failed or f"rank {engine._ranks.number} failed ({error})"
            raise

    def by_turns(self, follow: Callable[[bytes], None], frame: bytes) -> None:
        """Have the first follower take a frame behind all that were sent, and wait. Raises what it does."""
        self._threads[0].submit(follow, frame).result()

    def wait(self) -> None:
        pass

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


def engine_of_ranks(config: EngineConfig, size: int, *, allocate: Allocate | None = None) -> Engine:
    """An engine whose model so many ranks share."""
    threads = torch.get_num_threads()
    followers = Threads(size, allocate=allocate)
    engine = Engine(replace(config, tensor_parallel_size=size), allocate=allocate, ranks=followers.leader)
    torch.set_num_threads(threads)
    return engine


def engine_of_stages(config: EngineConfig, count: int, *, width: int = 1, allocate: Allocate | None = None) -> Engine:
    """An engine whose layers so many stages share, and `width` ranks each of these."""
    threads = torch.get_num_threads()
    ranks = Threads(count * width, are_stages=True, width=width, allocate=allocate).leader
    engine = Engine(replace(config, tensor_parallel_size=width), allocate=allocate, ranks=ranks)
    torch.set_num_threads(threads)
    return engine


def threads_of(engine: Engine) -> Threads:
    """The followers of an engine of ranks."""
    followers = engine._ranks.followers
    assert isinstance(followers, Threads)
    return followers


def asked() -> list[Sequence]:
    """One of each way to sample, the last one inside a grammar."""
    sequences = [
        new_sequence(str(row), [3 + row, 9, 11 + 2 * row] * (1 + 4 * row), **way) for row, way in enumerate(WAYS)
    ]
    sequences[-1].grammar = JSON
    return sequences


def generated(engine: Engine, *, shortest: int = 1, chunk_size: int = 23) -> list[list[int]]:
    """Tokens behind prompts that are computed in chunks beside one another, then again behind cached blocks, then preempted."""
    generator = Generator(engine, chunk_size=chunk_size)
    prompts = [prompt for prompt in PROMPTS if len(prompt) >= shortest]
    first = generator.run([new_sequence(str(number), prompt) for number, prompt in enumerate(prompts)])
    again = new_sequence("again", PROMPTS[2])
    return [*first, *generator.run([again]), [again.num_cached], _preempted(generator)]


def _preempted(generator: Generator) -> list[int]:
    """Tokens of a sequence that loses its blocks on the way, to another one that is computed beside it."""
    sequence, other = new_sequence("preempted", PROMPTS[3]), new_sequence("other", PROMPTS[1][::-1])
    generator.admit(sequence)
    generator.go_on([sequence], num_tokens=5)
    generator.release(sequence)
    generator.admit(other)
    generator.go_on([other], num_tokens=3)
    generator.admit(sequence)
    generator.go_on([sequence, other])
    for each in (sequence, other):
        generator.release(each)
    return sequence.token_ids[len(PROMPTS[3]) :]


def allocated(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A pool of torch's own memory, as a GPU's is."""
    return torch.zeros(shape, dtype=dtype, device=device)


def left_of(engine: Engine) -> int:
    """Bytes that one rank's layers and pool have; what is reached through its group is the others'."""
    stays = (engine._ranks.group, engine._ranks.stage)
    return sum(one.nbytes() for one in storages_of((engine._decoder, engine._head, engine.kv), engine.kv.device, stays))
