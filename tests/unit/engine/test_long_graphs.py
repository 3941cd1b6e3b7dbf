"""Graphs of long prompts, captured where launching takes longest. A launch and a wait move a made-up clock."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from common.messages import KVLayout
from engine.batch.layout import GraphSize
from engine.passes import Sampled
from engine.sequence import Chunk
from engine.step import warm
from engine.step.graphs import LONG_PROMPT_GRAPHS, PROMPT_GRAPHS, graph_sizes


@dataclass
class Device:
    """A device beside a host that takes `launch_s` for a pass, whose kernels take `token_s` a token."""

    launch_s: float
    token_s: float
    now: float = 0.0
    passes: int = 0

    def perf_counter(self) -> float:
        return self.now

    def launch(self, chunks: list[Chunk]) -> Running:
        self.passes += 1
        over = self.now + self.token_s * sum(chunk.num_tokens for chunk in chunks)
        self.now += self.launch_s
        return Running(self, over)


@dataclass
class Running:
    device: Device
    over: float

    def wait(self) -> list[Sampled | None]:
        self.device.now = max(self.device.now, self.over)
        return []


LAYOUT = KVLayout(num_blocks=1024, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
SIZES = graph_sizes(max_sequences=8, longest=2048)


def _longest(device: Device, monkeypatch: pytest.MonkeyPatch, *others: int, layout: KVLayout = LAYOUT) -> int:
    """The longest prompt alone that is captured, where other ranks would capture these."""
    monkeypatch.setattr(warm, "time", device)
    sizes = warm.worth_capturing(
        SIZES,
        device.launch,
        layout,
        vocab_size=100,
        exchange=lambda own: [own, *(other.to_bytes(len(own), "little") for other in others)],
    )
    assert [size for size in sizes if size.decoding] == [size for size in SIZES if size.decoding]
    return max(size.prompts for size in sizes if not size.decoding)


@pytest.mark.parametrize(
    ("token_us", "longest"), [(1, 2048), (10, 2048), (12, 2048), (14, 1024), (26, 1024), (28, 512), (100, 512)]
)
def test_prompts_are_captured_while_launching_takes_longest(
    token_us: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host takes 20 ms; up to a quarter of a pass may be the device's alone."""
    assert _longest(Device(launch_s=0.02, token_s=token_us / 1e6), monkeypatch) == longest
    assert longest in (*PROMPT_GRAPHS, *LONG_PROMPT_GRAPHS)


def test_all_ranks_capture_what_each_finds_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(launch_s=0.02, token_s=1e-6)
    assert _longest(device, monkeypatch, 2048, 1024) == 1024
    assert device.passes == 4, "as many on every rank, whatever it finds: their sums wait for each other"


def test_prompts_longer_than_the_pool_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(launch_s=0.02, token_s=1e-6)
    assert _longest(device, monkeypatch, layout=msgspec.structs.replace(LAYOUT, num_blocks=100)) == 1024


def test_no_longer_prompt_than_the_model_reads_is_captured() -> None:
    assert max(size.prompts for size in graph_sizes(max_sequences=8, longest=1000)) == 768
    assert GraphSize(0, 640) in graph_sizes(max_sequences=8, longest=640)
