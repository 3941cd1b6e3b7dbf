"""A server with a host tier that answers one prompt after the other."""

from __future__ import annotations

import pytest
import torch

from engine.engine import Engine
from engine.sequence import Sequence
from tests.fakes.copier import HandCopier
from tests.unit.engine import hybrid_windows
from tests.unit.engine.families import hybrids
from tests.unit.engine.families.exact import prompt_of
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.poisoned_pool import PoisonedPool
from worker.tier.host_memory import HostMemory
from worker.tier.host_store import HostStore, PrivateStore
from worker.tier.host_tier import HostTier

BLOCK = 16
NUM_PROMPTS = 5
LENGTH = 100  # tokens of a prompt
MODELS = {
    "grouped heads": ("llama", {}),
    "int4": ("llama", {"kv_cache_dtype": "int4"}),
    "latents": ("deepseek_v3", {}),
    "windows": ("gemma3", {}),
    "states": (hybrids.QWEN_3_5.name, {}),
    "windows and states": (hybrid_windows.CASE.name, {}),
}
# Copies that are late, fail or find no room are alike for every kind of KV: one of all parts. Others are `long`.
FEW = ("windows and states",)
of_few_kinds = pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=[] if name in FEW else [pytest.mark.long]) for name in MODELS],
    indirect=True,
    scope="module",
)


class Server:
    """Answers one prompt after the other, with a pool for two of them and a tier for all."""

    def __init__(self, engine: Engine, *, slots_of_pool: int = 4, store: HostStore | None = None) -> None:
        self.generator = Generator(engine, chunk_size=48)
        self.pool = self.generator.pool = PoisonedPool.of(engine.layout)
        assert isinstance(self.pool, PoisonedPool)
        self.pool.lanes = engine.kv.view(len(engine.kv), -1).view(torch.uint8)
        self.num_slots = slots_of_pool * self.pool.num_blocks
        self.memory = HostMemory(engine.kv, engine.layout, store or PrivateStore(self.num_slots))
        self.copier = HandCopier()
        self.woken = 0
        self.tier = HostTier(self.pool, self.memory, copier=self.copier, wake=self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def answer(self, number: int) -> tuple[list[int], int]:
        """The answer to this prompt, and the tokens of the prompt that were found."""
        sequence = ask(number)
        while self.tier.is_loading(sequence, has_room=lambda: True):
            self.copier.land()
        return self._answered(sequence)

    def _answered(self, sequence: Sequence) -> tuple[list[int], int]:
        self.generator.admit(sequence)
        num_cached = sequence.num_cached
        self.generator.go_on([sequence])
        self.generator.release(sequence)
        self.tier.left(sequence)
        self.tier.store_ahead()
        self.settle()
        assert self.pool.num_used == 0
        return sequence.token_ids[LENGTH:], num_cached

    def settle(self) -> None:
        """Let what is stored land."""
        self.copier.land()

    def flip_a_bit_of_each_slot(self) -> None:
        for slot in range(self.num_slots):
            self.memory.slot(slot)[5] ^= 4


def ask(number: int) -> Sequence:
    return new_sequence(f"r{number}", prompt_of(LENGTH, seed=number), max_tokens=6)
