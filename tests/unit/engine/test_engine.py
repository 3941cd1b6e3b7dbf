"""The engine's promises around a pass: what it refuses, what it leaves alone, and that one bad request stays alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.cache import pages
from engine.config import CacheConfig, EngineConfig
from engine.engine import Chunk, Engine, InvalidChunkError, Pass
from engine.families import read_model_spec
from engine.model.decoder import Decoder
from engine.sequence import Sequence
from engine.step.warm import time_prompts
from tests.models import FAMILIES
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.tables import blocks_of_tokens, table_of


@pytest.fixture
def engine(tiny_engine: Callable[[str], Engine]) -> Engine:
    return tiny_engine("llama")


def test_the_pool_takes_the_given_memory(tiny_model: Callable[[str], Path]) -> None:
    asked = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        asked.append((shape, dtype, device))
        return torch.zeros(shape, dtype=dtype, device=device)

    engine = Engine(EngineConfig(model=tiny_model("qwen3"), cache=CacheConfig(num_blocks=3)), allocate=allocate)
    assert asked == [((3, 2, 2, 16, 2, 32), torch.float32, "cpu")]
    assert engine.kv.shape == (3, 2, 2, 16, 2, 32)
    assert engine.layout.block_bytes == engine.kv[0].nbytes


def test_the_pool_fills_the_memory_it_is_given(tiny_model: Callable[[str], Path]) -> None:
    engine = Engine(EngineConfig(model=tiny_model("llama"), cache=CacheConfig(kv_memory_bytes=100_000)))
    assert engine.layout.num_blocks == 100_000 // engine.layout.block_bytes
    with pytest.raises(ValueError, match="less than one block"):
        Engine(EngineConfig(model=tiny_model("llama"), cache=CacheConfig(kv_memory_bytes=1000)))


def test_a_pool_on_a_cpu_grows_to_hold_one_whole_context_where_memory_is_free(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "DEFAULT_CPU_BYTES", 100_000)
    monkeypatch.setattr(pages, "_free_memory", lambda: 1 << 40)
    layout = Engine(EngineConfig(model=tiny_model("llama"))).layout
    assert layout.num_blocks == pages.blocks_of_a_sequence(layout, 1024) == 1024 // layout.block_size
    monkeypatch.setattr(pages, "_free_memory", lambda: 4 * 200_000)
    assert Engine(EngineConfig(model=tiny_model("llama"))).layout.num_blocks == 200_000 // layout.block_bytes
    monkeypatch.setattr(pages, "_free_memory", lambda: 0)
    assert Engine(EngineConfig(model=tiny_model("llama"))).layout.num_blocks == 100_000 // layout.block_bytes
    assert (
        Engine(EngineConfig(model=tiny_model("llama"), cache=CacheConfig(kv_memory_bytes=50_000))).layout.num_blocks
        < layout.num_blocks
    )


def test_the_models_length_can_be_lowered_only(tiny_model: Callable[[str], Path], engine: Engine) -> None:
    assert engine.max_model_len == 1024
    assert (
        Engine(EngineConfig(model=tiny_model("llama"), max_model_len=50, cache=CacheConfig(num_blocks=1))).max_model_len
        == 50
    )
    with pytest.raises(ValueError, match="max_position_embeddings = 1024"):
        Engine(EngineConfig(model=tiny_model("llama"), max_model_len=2000, cache=CacheConfig(num_blocks=1)))


def test_nothing_to_do_is_nothing_done(engine: Engine) -> None:
    assert engine.launch([]).wait() == []


def test_a_pass_changes_no_sequence_and_answers_in_order(engine: Engine) -> None:
    sequence, other = new_sequence("a", list(range(3, 23))), new_sequence("b", [7])
    sequence.tables, other.tables = [table_of([0, 1])], [table_of([2])]
    results = engine.launch([Chunk(sequence, 0, 16, False), Chunk(other, 0, 1, True)]).wait()
    assert results[0] is None
    assert results[1] is not None
    assert (sequence.num_computed, sequence.num_scheduled, sequence.num_tokens, other.num_tokens) == (0, 0, 20, 1)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (lambda sequence: Chunk(sequence, 0, 0, False), "a chunk of 0"),
        (lambda sequence: Chunk(sequence, -1, 2, False), "a chunk of 2 at -1"),
        (lambda sequence: Chunk(sequence, 0, 21, True), "a chunk of 21 at 0 of 20 tokens"),
        (lambda sequence: Chunk(sequence, 20, 1, True), "a chunk of 1 at 20 of 20 tokens"),
        (lambda sequence: Chunk(sequence, 0, 5, True), "asked to sample at position 5 of 20"),
    ],
)
def test_a_chunk_that_contradicts_its_sequence_is_refused(
    engine: Engine, chunk: Callable[[Sequence], Chunk], message: str
) -> None:
    sequence = new_sequence("culprit", list(range(3, 23)))
    sequence.tables = [table_of([0, 1])]
    with pytest.raises(InvalidChunkError, match=f"request culprit: {message}"):
        engine.launch([chunk(sequence)])


@pytest.mark.parametrize(
    ("tokens", "blocks", "message"),
    [
        ([3] * 20, [0], "1 blocks don't cover 20"),
        ([3] * 20, [0, 160], r"block 160 is not in \[0, 160\)"),
        ([3, 512], [0], r"token id 512 is not in \[0, 512\)"),
        ([3, -1], [0], "token id -1"),
        ([3] * 1025, list(range(65)), "1025 tokens, the model takes 1024"),
    ],
)
def test_what_is_out_of_range_is_refused_before_anything_is_computed(
    engine: Engine, tokens: list[int], blocks: list[int], message: str
) -> None:
    fine, culprit = new_sequence("fine", [5]), new_sequence("culprit", tokens)
    fine.tables, culprit.tables = [table_of([100])], [table_of(blocks)]
    engine.kv[100] = 0
    with pytest.raises(InvalidChunkError, match=f"request culprit: .*{message}"):
        engine.launch([Chunk(fine, 0, 1, True), Chunk(culprit, 0, len(tokens), True)])
    assert engine.kv[100].count_nonzero() == 0


def test_a_sequence_with_broken_kv_fails_alone(engine: Engine) -> None:
    prompts = [list(range(first, first + 40)) for first in (10, 60, 110)]
    healthy = Generator(engine).run([new_sequence(f"r{index}", prompt) for index, prompt in enumerate(prompts)])
    generator = Generator(engine, chunk_size=40)
    sequences = [new_sequence(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    launch = engine.launch

    def break_second(chunks: list[Chunk]) -> Pass:
        if sequences[1].num_generated == 3:
            engine.kv[blocks_of_tokens(sequences[1])[0]] = math.nan
        return launch(chunks)

    generator.launch = break_second
    assert generator.run(sequences) == [healthy[0], healthy[1][:3], healthy[2]]
    assert generator.results["r1"][-1] is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_pass_launched_before_the_last_token_is_known_gives_the_same_answer(
    tiny_engine: Callable[[str], Engine], family: str, temperature: float
) -> None:
    """Two passes ahead of the host, in company that comes and goes, with a penalty that counts what is pending."""
    engine = tiny_engine(family)

    def requests() -> list[Sequence]:
        return [
            new_sequence(
                f"r{seed}", list(range(5, 30 + seed)), temperature=temperature, seed=seed, frequency_penalty=0.5
            )
            for seed in range(3)
        ]

    expected = Generator(engine).run(requests())
    generator, sequences = Generator(engine), requests()
    for sequence in sequences:
        generator.admit(sequence)
    in_flight: deque[tuple[list[Chunk], Pass]] = deque()
    for number in range(20):
        going = [s for s in sequences if s.num_generated + s.num_pending < 12 and hash((s.sampling.seed, number)) % 4]
        chunks = [sequence.schedule(sequence.num_unscheduled) for sequence in going]
        in_flight.append((chunks, engine.launch(chunks)))
        if len(in_flight) == 2:
            generator.deliver(*in_flight.popleft())
    generator.deliver(*in_flight.popleft())
    assert [s.token_ids[s.num_prompt_tokens :] for s in sequences] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_runs_everywhere(tiny_model: Callable[[str], Path], family: str) -> None:
    engine = Engine(EngineConfig(model=tiny_model(family), dtype="bfloat16", cache=CacheConfig(num_blocks=8)))
    assert engine.kv.dtype == torch.bfloat16
    assert engine.layout.dtype == "bfloat16"
    (tokens,) = Generator(engine).run([new_sequence("a", list(range(3, 40)))])
    assert len(tokens) == 12


def test_a_seeded_request_repeats_itself_in_any_company(engine: Engine) -> None:
    def request(name: str, seed: int) -> Sequence:
        return new_sequence(name, list(range(5, 30)), temperature=0.8, top_p=0.95, seed=seed, max_tokens=20)

    (alone,) = Generator(engine).run([request("a", 1)])
    crowd = [request(f"r{seed}", seed) for seed in range(6)]
    together = Generator(engine, chunk_size=9).run(crowd)
    assert together[1] == alone
    assert len({tuple(tokens) for tokens in together}) == 6


@pytest.mark.parametrize("max_tokens", [32, 512])
def test_warming_up_leaves_no_trace(tiny_model: Callable[[str], Path], max_tokens: int) -> None:
    launched: list[int] = []

    def generate(*, warm: bool) -> list[list[int]]:
        engine = Engine(
            EngineConfig(model=tiny_model("llama"), max_batch_tokens=max_tokens, cache=CacheConfig(num_blocks=80))
        )
        if warm:
            launch = engine.launch

            def counted(chunks: list[Chunk]) -> Pass:
                launched.append(sum(chunk.num_tokens for chunk in chunks))
                return launch(chunks)

            engine.launch = counted  # type: ignore[method-assign]
            engine.warm_up()
            engine.launch = launch  # type: ignore[method-assign]
        prompts = [new_sequence("a", list(range(40))), new_sequence("b", [5], temperature=0.9, seed=7)]
        return Generator(engine, chunk_size=max_tokens).run(prompts)

    assert generate(warm=True) == generate(warm=False)
    assert launched
    assert max(launched) <= max_tokens


def test_prompts_as_long_as_the_model_reads_are_timed(tiny_model: Callable[[str], Path]) -> None:
    engine = Engine(
        EngineConfig(
            model=tiny_model("llama"), max_model_len=512, max_batch_tokens=1024, cache=CacheConfig(num_blocks=64)
        )
    )
    times = time_prompts(engine.launch, engine.layout, vocab_size=engine.vocab_size, max_tokens=engine.max_model_len)
    assert list(times) == [256, 512]


def test_a_layer_of_each_half(tiny_model: Callable[[str], Path]) -> None:
    """The last mixer is another one's kind: behind it only sampled rows go on."""
    spec = read_model_spec(tiny_model("mistral"))
    mixer, mlp = replace(spec.layers[0], mlp=None), replace(spec.layers[0], mixer=None)
    spec = replace(spec, layers=(mlp, mixer, mlp, mixer, mixer, mlp, mlp))
    whole = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=16)
    numbers = {id(layer): number for number, layer in enumerate(whole._layers)}
    assert [numbers[id(layer)] for layer in whole.with_a_layer_of_each_kind()._layers] == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("windows", "kept"),
    [((0,), [0]), ((0, 0), [0, 1]), ((7,) * 5, [0, 1, 4]), ((0, 0, 7, 0, 7, 7), [0, 1, 2, 5]), ((7, 0, 0), [0, 1, 2])],
)
def test_a_layer_of_each_kind(windows: tuple[int, ...], kept: list[int], tiny_model: Callable[[str], Path]) -> None:
    spec = read_model_spec(tiny_model("mistral"))
    layer = spec.layers[0]
    layers = tuple(replace(layer, mixer=replace(layer.mixer, window=window)) for window in windows)
    whole = Decoder(replace(spec, layers=layers), dtype=torch.float32, device=torch.device("cpu"), max_model_len=16)
    part = whole.with_a_layer_of_each_kind()
    numbers = {id(layer): number for number, layer in enumerate(whole._layers)}
    assert [numbers[id(layer)] for layer in part._layers] == kept
    assert part.spec.windows == tuple(windows[index] for index in kept)
    assert len(whole._layers) == len(windows)
    assert whole.spec.windows == windows
