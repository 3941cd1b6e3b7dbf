"""Stages on GPUs answer as one process does: their rows go through pinned memory, in the order of the cards' streams.

    python -m pytest -q tests/gpu/test_stages.py

On one card the processes take turns by the driver's time slices: what is checked is that tokens are right, never how fast.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.ranks.leading import leading
from decode.micro_batches import LEAST_ROWS
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.collectives import Peers, allocate_inbox
from engine.parallel.group import RankLostError
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import SharedMemoryGroup
from kvtransfer.cuda.signals import StreamSignals
from tests.e2e.wide import check
from tests.gpu.several import BOTH, PROMPTS, cards_of, config, devices, generated, model_of
from tests.unit.engine.drafts import Drafts
from tests.unit.engine.families.case import Case
from tests.unit.engine.generate import Generator, new_sequence, said_in_flight, scored
from tests.unit.engine.ranks import asked
from tests.unit.engine.streams import decoded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("freed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_decoded = partial(decoded, number=4 * LEAST_ROWS, tokens=20, token_budget=128)

# A plain one, windows in blocks of their own, latents, and states beside keys and values.
MODELS = [("llama", 4), ("gpt_oss", 6), ("deepseek_v3", 5), ("qwen3_next", 8), ("falcon_h1", 5)]
PLACES = pytest.mark.parametrize("places", ["0 0 0 0", "0 0 1 1", "0 1 0 1", "0 1 2 3"])
HANDOVERS = [((True, True), 2, 1), ((True, True), 1, 2), ((True, True), 2, 2), ((True, False), 2, 2)]
KINDS = [("gpt_oss", 6, ["--block-size", "8"]), ("deepseek_v3", 5, []), ("qwen3_next", 16, [])]
GPU = {"device": "cuda:0", "transport": "cuda_ipc", "dtype": "float32"}  # the first of a worker's GPUs


def _four(places: str) -> list[int]:
    """Each process's card, those of a stage one behind another; the test is skipped where there are too few."""
    cards = [int(card) for card in places.split()]
    devices(max(cards) > 0, max(cards) + 1)
    return cards


@BOTH
@pytest.mark.parametrize(("name", "layers"), MODELS)
def test_two_stages_generate_what_one_process_does(name: str, layers: int, apart: bool, tmp_path: Path) -> None:
    cards, alone = devices(apart), config(name, tmp_path, layers, dtype="float32")
    wanted = generated(Engine(alone))
    with leading(cards, are_stages=True) as ranks:
        assert generated(Engine(alone, ranks=ranks)) == wanted


def _said(engine: Engine) -> list[object]:
    """Answers of each way to sample, also behind drafts, scores of a prompt, and a stream with two passes in flight."""
    generator = Generator(engine, chunk_size=23)
    answers = generator.run(asked())
    known = {tuple(sequence.token_ids): answer for sequence, answer in zip(asked(), answers, strict=True)}
    drafting = Generator(engine, draft=Drafts(known, wrong=0.2))
    scores = [new_sequence("scored", PROMPTS[2], prompt_logprobs=3), new_sequence("plain", PROMPTS[1])]
    return [
        answers,
        drafting.run(asked()),
        drafting.accepted,
        scored(engine, scores, chunk_size=33),
        said_in_flight(engine, PROMPTS[2]),
    ]


def test_three_stages_sample_score_and_verify_what_one_process_does(tmp_path: Path) -> None:
    alone = config("llama", tmp_path, 5, dtype="float32")
    wanted = _said(Engine(alone))
    with leading(cards_of(3), are_stages=True) as ranks:
        assert _said(Engine(alone, ranks=ranks)) == wanted


@PLACES
@pytest.mark.parametrize(("name", "layers"), MODELS)
def test_two_stages_of_two_ranks_generate_what_one_process_does(
    name: str, layers: int, places: str, tmp_path: Path
) -> None:
    cards, alone = _four(places), config(name, tmp_path, layers, dtype="float32")
    wanted = generated(Engine(alone))
    with leading(cards, are_stages=True, width=2) as ranks:
        assert generated(Engine(replace(alone, tensor_parallel_size=2), ranks=ranks)) == wanted


def test_stages_of_ranks_sample_score_and_verify_what_one_process_does(tmp_path: Path) -> None:
    alone = config("llama", tmp_path, 5, dtype="float32")
    wanted = _said(Engine(alone))
    with leading(cards_of(4), are_stages=True, width=2) as ranks:
        assert _said(Engine(replace(alone, tensor_parallel_size=2), ranks=ranks)) == wanted


def test_rows_larger_than_a_ring_arrive_whole(tmp_path: Path) -> None:
    """1,500 rows of 4 KiB."""
    fields = {"hidden_size": 1024, "head_dim": 64, "max_position_embeddings": 4096}
    model = Case(name="llama", config="LlamaConfig", fields=fields).build(tmp_path)
    sizes = {"num_blocks": 300, "max_sequences": 4, "max_batch_tokens": 2048, "dtype": "float32"}
    alone = EngineConfig.of(model=model, device="cuda", **sizes)
    prompts = [[(seed + 7 * at * at) % 400 + 5 for at in range(1500)] for seed in range(4)]

    def said(engine: Engine) -> list[list[list[int]]]:
        generator = Generator(engine, chunk_size=2048)
        return [generator.run([new_sequence("a", prompt)]) for prompt in prompts]

    wanted = said(Engine(alone))
    with leading(cards_of(), are_stages=True) as ranks:
        assert said(Engine(alone, ranks=ranks)) == wanted


@pytest.mark.parametrize("width", [1, 2])
async def test_streams_are_in_all_stages_at_a_time(width: int, tmp_path: Path) -> None:
    """The worker's pipeline and scheduler launch passes of a part of the streams."""
    alone = config("llama", tmp_path, 4, dtype="float32", num_blocks=400, max_sequences=32)
    wanted = await _decoded(Engine(alone))
    assert [len(answer) for answer in wanted] == [9 + 20] * 4 * LEAST_ROWS
    with leading(cards_of(2 * width), are_stages=True, width=width) as ranks:
        assert await _decoded(Engine(replace(alone, tensor_parallel_size=width), ranks=ranks), stages=2) == wanted


def test_a_pool_has_as_many_blocks_as_the_stage_with_the_least_room(tmp_path: Path) -> None:
    """Here that is the first one, which has a layer more: each may take 64 MiB."""
    alone = config("llama", tmp_path, 5, dtype="bfloat16", num_blocks=None, kv_memory_bytes=64 << 20)
    with leading(cards_of(), are_stages=True) as ranks:
        engine = Engine(alone, ranks=ranks)
        assert engine.layout.num_blocks == (64 << 20) // engine.layout.block_bytes
        assert len(Generator(engine).run([new_sequence("a", PROMPTS[2])])[0]) == 12


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_pools_of_what_is_free_are_as_large_in_all_stages(tmp_path: Path) -> None:
    alone = config("llama", tmp_path, 4, dtype="bfloat16", num_blocks=None)
    with leading(cards_of(), are_stages=True) as ranks:
        engine = Engine(alone, ranks=ranks)
        assert engine.kv.nbytes > torch.cuda.get_device_properties(0).total_memory // 2
        assert len(Generator(engine).run([new_sequence("a", PROMPTS[2])])[0]) == 12


def test_a_pass_apart_is_over_when_it_was_waited_for(tmp_path: Path) -> None:
    """Else costs are those of launching alone: nothing comes from another stage that would tell."""
    alone = config("llama", tmp_path, 4, dtype="bfloat16", num_blocks=400)
    with leading(cards_of(), are_stages=True) as ranks:
        engine = Engine(alone, ranks=ranks)
        with ranks.stage.apart():
            torch.cuda._sleep(200_000_000)  # the stream of passes is busy for a tenth of a second
            Generator(engine).start(new_sequence("a", PROMPTS[2]))
            assert torch.cuda.current_stream().query()


def _process(ranks: Ranks, rank: int = 1) -> int:
    return int(ranks.followers.pids[rank - 1])  # type: ignore[attr-defined]


@pytest.mark.parametrize("stops", [False, True], ids=["between passes", "within a pass"])
def test_a_killed_stage_is_named(stops: bool, tmp_path: Path) -> None:
    """The streams that wait for it go on, so that the device can be used again."""
    alone = config("llama", tmp_path, 4, dtype="bfloat16")
    with leading(cards_of(), are_stages=True) as ranks:
        engine = Engine(alone, ranks=ranks)
        generator, sequence = Generator(engine), new_sequence("a", PROMPTS[2], max_tokens=200)
        generator.start(sequence)
        if stops:
            os.kill(_process(ranks), signal.SIGSTOP)
            chunks = [sequence.schedule(1)]
            launched = engine.launch(chunks)
            os.kill(_process(ranks), signal.SIGKILL)
            with pytest.raises(RankLostError, match="rank 1"):
                launched.wait()
        else:
            os.kill(_process(ranks), signal.SIGKILL)
            with pytest.raises(RankLostError, match="rank 1"):
                generator.go_on([sequence])
        assert "rank 1" in engine.lost
        torch.cuda.synchronize()


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_killed_rank_of_a_stage_is_named(rank: int, tmp_path: Path) -> None:
    alone = config("llama", tmp_path, 4, dtype="bfloat16", tensor_parallel_size=2)
    with leading(cards_of(4), are_stages=True, width=2) as ranks:
        engine = Engine(alone, ranks=ranks)
        generator, sequence = Generator(engine), new_sequence("a", PROMPTS[2], max_tokens=200)
        generator.start(sequence)
        os.kill(_process(ranks, rank), signal.SIGKILL)
        with pytest.raises((RankLostError, RuntimeError), match=rf"rank {rank}|CUDA"):  # the device may say it first
            generator.go_on([sequence])
        assert f"rank {rank}" in engine.lost


def test_a_rank_that_another_stage_misses_is_named(tmp_path: Path) -> None:
    """Words in the memory of all, which a kernel writes: the process that waits for tokens has another group."""
    memory, device = mmap.mmap(-1, SharedMemoryGroup.num_bytes(4)), torch.device("cuda:0")
    group, leader = (SharedMemoryGroup(memory, rank=rank, size=4) for rank in (2, 0))
    stage = group.stage(lambda pinned: StreamSignals(pinned, device), width=2)
    within, (inbox, other) = group.within(2), (allocate_inbox(device, 1 << 20) for _ in range(2))
    addresses = [inbox.data_ptr(), other.data_ptr()]
    peers = Peers(inbox, addresses, within.rank, longest_wait_s=0.2, missing=within.missing())
    assert stage.place == (1, 2)
    assert not leader.within(2).missed()
    torch.cuda.synchronize()
    peers.all_reduce(torch.ones(4, 512, dtype=torch.bfloat16, device=device))
    torch.cuda.synchronize()
    assert leader.within(2).missed() == "rank 3 sent nothing to rank 2 in time: what was computed since is wrong"


def test_a_rank_of_another_stage_that_stands_still_is_named(tmp_path: Path) -> None:
    alone = config("llama", tmp_path, 4, dtype="bfloat16", tensor_parallel_size=2)
    with leading(cards_of(4), are_stages=True, width=2) as ranks:
        engine = Engine(alone, ranks=ranks)
        generator, sequence = Generator(engine), new_sequence("a", PROMPTS[2], max_tokens=200)
        generator.start(sequence)
        still = _process(ranks, 3)
        os.kill(still, signal.SIGSTOP)
        launched = engine.launch([sequence.schedule(1)])
        try:
            with pytest.raises(RankLostError, match="rank 3"):
                launched.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):  # killed, since it gave no sign of life
                os.kill(still, signal.SIGCONT)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
@pytest.mark.parametrize(
    ("are_stages", "prefill", "decode"), [((True, False), 2, 1), ((False, True), 1, 2), ((False, True), 2, 2)]
)
async def test_workers_of_stages_of_ranks_hand_over(
    are_stages: tuple[bool, bool], prefill: int, decode: int, tmp_path: Path
) -> None:
    await check(tmp_path, prefill=prefill, decode=decode, are_stages=are_stages, within=2, **GPU)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("are_stages", "prefill", "decode"), HANDOVERS)
async def test_workers_of_stages_hand_over(
    are_stages: tuple[bool, bool], prefill: int, decode: int, tmp_path: Path
) -> None:
    await check(tmp_path, prefill=prefill, decode=decode, are_stages=are_stages, **GPU)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("name", "layers", "flags"), KINDS)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
async def test_windows_latents_and_states_are_handed_over(
    name: str, layers: int, flags: list[str], prefill: int, decode: int, tmp_path: Path
) -> None:
    model, longest = model_of(name, tmp_path / "model", layers)
    options = {} if longest is None else {"max_model_len": longest}
    await check(
        tmp_path, prefill=prefill, decode=decode, model=model, are_stages=(True, True), flags=flags, **GPU, **options
    )
