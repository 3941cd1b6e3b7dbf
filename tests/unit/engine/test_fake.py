"""The fake engine answers what its oracle says, if every byte that it reads is what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.messages import SamplingParams
from common.pages import PagePart
from engine.cache.pages import entry_views
from engine.config import CacheConfig, EngineConfig
from engine.engine import Chunk, InvalidChunkError
from engine.fake.engine import FakeCosts, FakeEngine
from engine.sequence import Sequence
from tests.unit.engine.layouts import HYBRIDS, STATES
from tests.unit.engine.tables import blocks_of_tokens, entries_table, table_of

PROMPT = [(7 * index + 3) % 512 for index in range(45)]  # three blocks, the last one partial
LAYOUTS = ("float32", "bfloat16", "float16")


def new_engine(dtype: str = "float32", **changes: object) -> FakeEngine:
    config = EngineConfig(model=Path("fake"), dtype=dtype, cache=CacheConfig(num_blocks=32, block_size=16))
    return FakeEngine(config, **({"sleep": None} | changes))  # type: ignore[arg-type]


def new_sequence(prompt: list[int], blocks: list[int], **sampling: object) -> Sequence:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 20} | sampling))  # type: ignore[arg-type]
    sequence = Sequence(
        request_id="r", attempt=1, token_ids=list(prompt), num_prompt_tokens=len(prompt), sampling=params, hash_root=b""
    )
    sequence.tables = [table_of(blocks)]
    return sequence


def with_state(engine: FakeEngine, sequence: Sequence) -> Sequence:
    """The same, with the last blocks of the pool for its state if there is one."""
    if engine.layout.groups:
        last = engine.layout.num_blocks - engine.layout.groups[0].blocks_per_entry
        state = tuple(range(last, engine.layout.num_blocks))
        sequence.tables = [sequence.tables[0], entries_table([state] * len(sequence.tables[0].entries))]
    return sequence


def advance(engine: FakeEngine, sequence: Sequence, num_tokens: int) -> None:
    """One pass of this sequence alone, and what a worker does with its result."""
    chunk = sequence.schedule(num_tokens)
    (sampled,) = engine.launch([chunk]).wait()
    sequence.finish(chunk)
    if sampled is not None:
        sequence.append(sampled.token_id)


def generate(engine: FakeEngine, sequence: Sequence, *, chunk: int = 512) -> list[int]:
    while not sequence.finish_reason():
        advance(engine, sequence, min(chunk, sequence.num_unscheduled))
    return sequence.token_ids[sequence.num_prompt_tokens :]


@pytest.mark.parametrize("dtype", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_the_answer_is_the_oracles_however_the_prompt_is_cut(dtype: str, chunk: int) -> None:
    engine = new_engine(dtype)
    sequence = new_sequence(PROMPT, [9, 4, 30, 1, 0])

    assert generate(engine, sequence, chunk=chunk) == engine.expected(PROMPT, 20, sequence.sampling)


def test_sequences_of_one_pass_do_not_disturb_each_other() -> None:
    engine = new_engine()
    sequences = [
        new_sequence(PROMPT[:length], [3 * index, 3 * index + 1, 3 * index + 2])
        for index, length in enumerate((5, 16, 33))
    ]

    results = engine.launch([sequence.schedule(sequence.num_unscheduled) for sequence in sequences]).wait()

    expected = [engine.expected(sequence.token_ids, 1, sequence.sampling)[0] for sequence in sequences]
    assert [result.token_id for result in results if result is not None] == expected


@pytest.mark.parametrize("dtype", LAYOUTS)
def test_blocks_copied_into_another_pool_continue_the_sequence_there(dtype: str) -> None:
    prefill, decode = new_engine(dtype), new_engine(dtype)
    sequence = new_sequence(PROMPT, [5, 6, 7])
    advance(prefill, sequence, len(PROMPT))

    decode.kv[[20, 3, 11, 12]] = prefill.kv[[5, 6, 7, 8]]
    sequence.tables = [table_of([20, 3, 11, 12, 13])]

    assert generate(decode, sequence) == decode.expected(PROMPT, 20, sequence.sampling)


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_other_kinds_of_pages_answer_as_the_oracle_however_the_prompt_is_cut(kind: str, chunk: int) -> None:
    engine = new_engine(parts=HYBRIDS[kind])
    sequence = with_state(engine, new_sequence(PROMPT, [9, 4, 20, 1, 0]))

    assert generate(engine, sequence, chunk=chunk) == engine.expected(PROMPT, 20, sequence.sampling)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_other_kinds_of_pages_continue_a_sequence_in_another_pool(kind: str) -> None:
    prefill, decode = new_engine(parts=HYBRIDS[kind]), new_engine(parts=HYBRIDS[kind])
    sequence = with_state(prefill, new_sequence(PROMPT, [5, 6, 7]))
    advance(prefill, sequence, len(PROMPT))

    decode.kv[[20, 3, 11, 29, 30, 31]] = prefill.kv[[5, 6, 7, 29, 30, 31]]
    sequence.tables = [table_of([20, 3, 11, 12, 13])]
    with_state(decode, sequence)

    assert generate(decode, sequence) == decode.expected(PROMPT, 20, sequence.sampling)


@pytest.mark.parametrize("byte", [0, 33, -1])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_wrong_byte_of_any_part_changes_the_answer(kind: str, byte: int) -> None:
    engine = new_engine(parts=HYBRIDS[kind])
    sequence = with_state(engine, new_sequence(PROMPT[:32], [5, 6, 7, 8]))
    advance(engine, sequence, 32)

    engine.kv[6].view(torch.uint8).reshape(-1)[byte] ^= 1

    assert generate(engine, sequence) != engine.expected(PROMPT[:32], 20, sequence.sampling)


WINDOW = 20
WINDOWED = [
    PagePart(layers=1, planes=2, heads=2, dim=4, dtype="bfloat16"),
    PagePart(layers=3, planes=2, heads=2, dim=2, dtype="bfloat16", window=WINDOW),
    PagePart(layers=3, planes=2, heads=2, dim=1, dtype="float32", window=WINDOW),
]


def with_window(sequence: Sequence, *entries: tuple[int, ...]) -> Sequence:
    sequence.tables = [sequence.tables[0], entries_table(entries)]
    return sequence


def test_what_windows_see_is_in_entries_which_may_go() -> None:
    engine = new_engine(parts=WINDOWED)
    [group] = engine.layout.groups
    assert (group.blocks_per_entry, group.window) == (3, WINDOW)
    sequence = with_window(new_sequence(PROMPT, [5, 6, 7, 8, 9]), (20, 21, 22), (23, 24, 25), (26, 27, 28))
    advance(engine, sequence, 40)
    expected = engine.expected(PROMPT, 20, sequence.sampling)
    with_window(sequence, (), (23, 24, 25), (26, 27, 28), (10, 11, 12), (20, 21, 22))

    assert generate(engine, sequence) == expected


def test_a_chunk_with_too_few_entries_is_refused() -> None:
    engine = new_engine(parts=WINDOWED)
    sequence = with_window(new_sequence(PROMPT, [5, 6, 7, 8, 9]), (20, 21, 22), (23, 24, 25))
    with pytest.raises(InvalidChunkError, match="2 entries of KV group 1 don't cover 45 positions"):
        engine.launch([sequence.schedule(45)])
    sequence.restart(34)
    with_window(sequence, (), (23, 24, 25), (26, 27, 28))
    with pytest.raises(InvalidChunkError, match="entry 0 of KV group 1 is gone, which the token at 34 reads"):
        engine.launch([sequence.schedule(11)])
    sequence.restart(35)
    engine.launch([sequence.schedule(10)])
    sequence.restart(35)
    sequence.tables.pop()
    with pytest.raises(InvalidChunkError, match="1 tables for 2 KV groups"):
        engine.launch([sequence.schedule(10)])


def test_each_layer_of_a_window_changes_the_answer() -> None:
    engine = new_engine(parts=WINDOWED)
    answers = set()
    for layers in entry_views(engine.kv, engine.layout):
        for kept in layers:
            entries = [(20, 21, 22), (23, 24, 25), (26, 27, 28), (29, 30, 31), (10, 11, 12)]
            sequence = with_window(new_sequence(PROMPT, [5, 6, 7, 8, 9]), *entries)
            advance(engine, sequence, len(PROMPT))
            kept.kept[entries[2][kept.number]].view(torch.uint8).reshape(-1)[0] ^= 1
            answers.add(tuple(generate(engine, sequence)))
    assert len(answers) == 6
    assert tuple(engine.expected(PROMPT, 20, sequence.sampling)) not in answers


def test_each_layers_state_changes_the_answer() -> None:
    engine = new_engine(parts=HYBRIDS[STATES])
    assert engine.layout.groups[0].blocks_per_entry == 3
    answers = set()
    for layers in entry_views(engine.kv, engine.layout):
        for kept in layers:
            sequence = with_state(engine, new_sequence(PROMPT, [5, 6, 7, 8, 9]))
            advance(engine, sequence, len(PROMPT))
            kept.kept[29 + kept.number].view(torch.uint8).reshape(-1)[-1] ^= 1
            answers.add(tuple(generate(engine, sequence)))
    assert len(answers) == 6
    assert tuple(engine.expected(PROMPT, 20, sequence.sampling)) not in answers


def test_a_checkpoint_is_gone_on_from_and_never_changes() -> None:
    engine = new_engine(parts=HYBRIDS[STATES])
    first = new_sequence(PROMPT, [5, 6, 7, 8, 9])
    first.tables.append(entries_table([(20, 21, 22)] * 2 + [(23, 24, 25)] * 3))
    assert generate(engine, first, chunk=41) == engine.expected(PROMPT, 20, first.sampling)
    kept = engine.kv[[5, 6, 20, 21, 22]].view(torch.uint8)
    again = new_sequence([*PROMPT[:32], 9], [5, 6, 10, 11])
    again.restart(32)
    again.tables.append(entries_table([(), (20, 21, 22), (29, 30, 31), (29, 30, 31)], num_shared=2))
    assert generate(engine, again) == engine.expected([*PROMPT[:32], 9], 20, again.sampling)
    assert torch.equal(engine.kv[[5, 6, 20, 21, 22]].view(torch.uint8), kept)


@pytest.mark.parametrize(
    ("entries", "num_shared", "problem"),
    [
        ([], 0, "0 entries of KV group 1 don't cover 45 positions"),
        ([(), (), (29, 30, 31)], 0, "entry 1 of KV group 1 is gone, which the token at 32 reads"),
        ([(), (20, 21, 22)], 2, "2 entries of KV group 1 don't cover 45 positions"),
        ([(), (20, 21, 22), (20, 21, 22)], 3, "entry 2 of KV group 1 is others', too, and the token at 32 changes it"),
        ([(), (20, 21), (20, 21)], 0, "not 3 in"),
        ([(), (20, 21, 32), (20, 21, 32)], 0, "not 3 in"),
    ],
)
def test_a_chunk_without_its_states_is_refused(entries: list[tuple[int, ...]], num_shared: int, problem: str) -> None:
    engine = new_engine(parts=HYBRIDS[STATES])
    sequence = new_sequence(PROMPT, [5, 6, 7, 8])
    sequence.restart(32)
    sequence.tables.append(entries_table(entries, num_shared=num_shared))
    with pytest.raises(InvalidChunkError, match=problem):
        engine.launch([sequence.schedule(13)])
    assert not engine.kv.any()


def test_a_fingerprint_without_parts_is_what_release_010_says() -> None:
    """Fake workers of two releases hand sequences to each other only if their fingerprints are equal."""
    assert new_engine().fingerprint == "dd2000df0ea83cb96505ee7802f2bf12"


@pytest.mark.parametrize("lane", [(0, 0, 0, 0, 0), (1, 1, 12, 0, 7), (0, 1, 5, 0, 3)])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_single_wrong_value_changes_the_answer(block: int, lane: tuple[int, ...]) -> None:
    engine = new_engine()
    sequence = new_sequence(PROMPT, [5, 6, 7, 8, 9])
    advance(engine, sequence, len(PROMPT))

    engine.kv.view(torch.int32)[(blocks_of_tokens(sequence)[block], *lane)] ^= 1

    assert generate(engine, sequence) != engine.expected(PROMPT, 20, sequence.sampling)


def test_swapped_blocks_change_the_answer() -> None:
    engine = new_engine()
    sequence = new_sequence(PROMPT, [5, 6, 7, 8, 9])
    advance(engine, sequence, len(PROMPT))

    sequence.tables = [table_of([6, 5, 7, 8, 9])]

    assert generate(engine, sequence) != engine.expected(PROMPT, 20, sequence.sampling)


def test_a_sequence_resumed_elsewhere_goes_on_as_it_would_have() -> None:
    engine = new_engine()
    sampling = SamplingParams(temperature=1.0, seed=2**63 + 5, max_tokens=20)
    whole = engine.expected(PROMPT, 20, sampling)

    rest = engine.expected(PROMPT + whole[:8], 20, sampling, num_generated=8)

    assert whole[:8] + rest == whole


def test_the_seed_matters_only_with_a_temperature() -> None:
    engine = new_engine()

    def answer(**sampling: object) -> list[int]:
        return engine.expected(PROMPT, 8, SamplingParams(max_tokens=8, **sampling))  # type: ignore[arg-type]

    assert answer(temperature=0.0, seed=1) == answer(temperature=0.0, seed=2)
    assert answer(temperature=1.0, seed=1) != answer(temperature=1.0, seed=2)


def test_a_stop_token_ends_the_answer_but_not_before_min_tokens() -> None:
    engine = new_engine()
    free = engine.expected(PROMPT, 20, SamplingParams(temperature=0.0, max_tokens=20))

    stopped = new_sequence(PROMPT, [1, 2, 3, 4, 5], stop_token_ids=[free[3]])
    held = new_sequence(PROMPT, [6, 7, 8, 9, 10], stop_token_ids=[free[3]], min_tokens=6)

    assert generate(engine, stopped) == free[:4]
    assert stopped.finish_reason() == "stop"
    answer = generate(engine, held)
    assert answer == engine.expected(PROMPT, 20, held.sampling)
    assert len(answer) >= 6


def test_a_pass_costs_what_it_was_told() -> None:
    slept: list[float] = []
    costs = FakeCosts(step_ms=10, prefill_token_ms=2, decode_sequence_ms=1)
    engine = new_engine(costs=costs, sleep=slept.append)
    sequence = new_sequence(PROMPT, [1, 2, 3, 4])

    advance(engine, sequence, 40)
    advance(engine, sequence, 5)
    advance(engine, sequence, 1)

    assert slept == pytest.approx([0.09, 0.02, 0.011])


@pytest.mark.parametrize(
    ("tokens", "blocks"), [([1, 2, 512], [0]), ([1, -1], [0]), (PROMPT, [0, 1]), ([1, 2], [32]), ([1, 2], [-1])]
)
def test_a_wrong_chunk_is_refused_before_anything_is_written(tokens: list[int], blocks: list[int]) -> None:
    engine = new_engine()
    good, bad = new_sequence([1, 2, 3], [9]), new_sequence(tokens, blocks)

    with pytest.raises(InvalidChunkError):
        engine.launch([Chunk(good, 0, 3, sample=True), Chunk(bad, 0, len(tokens), sample=True)])

    assert not engine.kv.any()


def test_logprobs_have_the_shape_that_was_asked_for() -> None:
    engine = new_engine()
    sequence = new_sequence(PROMPT, [1, 2, 3], logprobs=3)

    (sampled,) = engine.launch([sequence.schedule(len(PROMPT))]).wait()

    assert sampled is not None
    assert sampled.logprobs is not None
    assert sampled.logprobs.top_ids[0] == sampled.token_id
    assert len(sampled.logprobs.top_ids) == len(sampled.logprobs.top_logprobs) == 3


def test_a_pass_begins_with_tokens_that_nobody_was_told_yet() -> None:
    engine = new_engine()
    sequence = new_sequence(PROMPT, [5, 6, 7, 8, 9])

    passes = [engine.launch([sequence.schedule(sequence.num_unscheduled)]) for _ in range(2)]
    for launched in passes:
        (sampled,) = launched.wait()
        assert sampled is not None
        sequence.append(sampled.token_id)

    assert sequence.token_ids[len(PROMPT) :] == engine.expected(PROMPT, 2, sequence.sampling)


def test_a_token_that_no_pass_samples_is_refused() -> None:
    engine = new_engine()
    sequence, other = new_sequence(PROMPT, [5, 6, 7, 8]), new_sequence(PROMPT, [9, 10, 11])
    engine.launch([sequence.schedule(len(PROMPT))])
    engine.launch([other.schedule(len(PROMPT))])  # the pass directly before the next one

    with pytest.raises(InvalidChunkError, match="a chunk of 1 at 45 of 45 tokens"):
        engine.launch([sequence.schedule(1)])


def test_a_token_that_was_not_sampled_is_refused() -> None:
    engine = new_engine()
    sequence = new_sequence(PROMPT, [5, 6, 7, 8])
    (sampled,) = engine.launch([sequence.schedule(len(PROMPT))]).wait()
    assert sampled is not None
    sequence.append((sampled.token_id + 1) % 512)

    with pytest.raises(InvalidChunkError, match=f"{sampled.token_id} was sampled"):
        engine.launch([sequence.schedule(1)])


def test_after_a_refused_launch_nothing_is_pending() -> None:
    engine = new_engine()
    sequence, bad = new_sequence(PROMPT, [5, 6, 7, 8]), new_sequence([1], [99])
    engine.launch([sequence.schedule(len(PROMPT))])
    with pytest.raises(InvalidChunkError, match="a block outside the pool"):
        engine.launch([sequence.schedule(1), bad.schedule(1)])

    with pytest.raises(InvalidChunkError, match="a chunk of 1 at 46 of 45 tokens"):
        engine.launch([sequence.schedule(1)])
