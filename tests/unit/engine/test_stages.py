"""Stages of a model generate what one process does, with a pass in each of them."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from decode.micro_batches import LEAST_ROWS
from engine.batch.layout import Packed
from engine.cache.pages import page_parts, plan_layout
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import read_model_spec
from engine.kernels.attention import HeadShape
from engine.lockstep import _Kind, decode_config, planned
from engine.parallel.group import RankLostError
from engine.parallel.ranks import Ranks
from engine.sequence import Sequence
from engine.spec.attention import AttentionSpec
from engine.spec.model import DraftSpec, LayerSpec, ModelSpec, UnsupportedModelError
from engine.spec.stages import FLAG, for_stage
from engine.step.runner import Runner
from tests.models import build_tiny_model
from tests.unit.engine.drafts import Drafts
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.generate import Generator, new_sequence, said_in_flight, scored
from tests.unit.engine.ranks import Threads, asked, engine_of_stages, generated, threads_of
from tests.unit.engine.streams import decoded

PATIENCE_S = 60.0
_decoded = partial(decoded, number=3 * LEAST_ROWS, tokens=10, token_budget=512)
FIRST = ("llama", "mixtral", "gpt_oss", "deepseek_v3")  # all other cases are `long`
# Layers and stages. Cohere ties one table to both ends; Gemma has a norm behind each half, and one layer in six sees everything.
DEEP = [
    ("llama", 6, 4),
    ("gpt_oss", 6, 2),
    ("gpt_oss", 7, 3),
    ("llama", 5, 3),
    ("mixtral", 6, 4),
    ("gemma3", 12, 2),
    ("olmo3", 9, 2),
    ("cohere2", 8, 2),
    ("deepseek_v3", 5, 3),
]
# The first layer of Qwen3-Next that keeps keys and values is the fourth of four; Falcon-H1 has both in each layer. Where Jamba
# is cut, one stage has two layers with states, and the other one.
HYBRID = [("falcon_h1", 5, 4), ("qwen3_next", 8, 2), ("qwen3_next", 16, 4), ("jamba", 5, 2)]
WIDE = [
    ("llama", 4, 2, 2),
    ("gpt_oss", 6, 2, 2),
    ("qwen3_next", 8, 2, 2),
    ("deepseek_v3", 5, 2, 2),
    ("llama", 5, 3, 4),
    ("mixtral", 6, 2, 2),
]
ALIKE = {"disable_hybrid_kv_cache_manager": True}  # layers with a window keep all


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _config(case: Case, folder: Path) -> EngineConfig:
    cache = CacheConfig(num_blocks=160, **ALIKE)  # type: ignore[arg-type]
    return EngineConfig(model=case.build(folder), max_model_len=case.max_model_len, cache=cache)


def _refused(config: EngineConfig, count: int) -> str:
    """The error for a model that can't be cut into so many stages."""
    try:
        for_stage(read_model_spec(config.model), 0, count)
    except UnsupportedModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in FIRST else [pytest.mark.long])
        for case in CASES
        if not case.name.startswith("by ")
    ],
)
def test_two_stages_generate_what_one_does(case: Case, tmp_path: Path) -> None:
    config = _config(case, tmp_path)
    if refused := _refused(config, 2):
        assert refused.startswith(f"{FLAG} 2: ")
        assert case.name not in FIRST
        return
    stages = engine_of_stages(config, 2)
    assert generated(stages, shortest=case.shortest) == generated(Engine(config), shortest=case.shortest)


@pytest.mark.parametrize(
    ("name", "layers", "count"),
    [pytest.param(*each, marks=[] if number < 2 else [pytest.mark.long]) for number, each in enumerate(DEEP)],
)
def test_more_layers_and_stages_generate_what_one_does(name: str, layers: int, count: int, tmp_path: Path) -> None:
    """Layers with a window have blocks of their own, of which the stage that needs most decides how many an entry has."""
    config = _deep(name, layers, tmp_path, block_size=8)
    stages, alone = engine_of_stages(config, count), Engine(config)
    assert generated(stages) == generated(alone)
    _check_layouts(stages, alone)


@pytest.mark.quick(first=1)
@pytest.mark.parametrize(
    ("name", "layers", "count"),
    [pytest.param(*each, marks=[] if number < 2 else [pytest.mark.long]) for number, each in enumerate(HYBRID)],
)
def test_states_are_in_the_stages_of_their_layers(name: str, layers: int, count: int, tmp_path: Path) -> None:
    """Through chunks, checkpoints that others go on from, preemption, and drafts, which leave a state behind each token."""
    config = _deep(name, layers, tmp_path, block_size=32)
    stages, alone = engine_of_stages(config, count), Engine(config)
    answers = generated(alone)
    assert generated(stages) == answers
    assert answers[-2] != [0], "it went on from a checkpoint"
    _check_layouts(stages, alone)
    said = Generator(alone).run(asked())
    known = {tuple(sequence.token_ids): answer for sequence, answer in zip(asked(), said, strict=True)}
    drafting = Generator(stages, draft=Drafts(known, wrong=0.2))
    assert drafting.run(asked()) == said
    assert sum(drafting.accepted) > 9


@pytest.mark.quick(first=1)
@pytest.mark.parametrize(
    ("name", "layers", "count", "width"),
    [pytest.param(*each, marks=[] if number < 3 else [pytest.mark.long]) for number, each in enumerate(WIDE)],
)
def test_stages_of_several_ranks_generate_what_one_process_does(
    name: str, layers: int, count: int, width: int, tmp_path: Path
) -> None:
    """Each rank has some heads of some layers: together they have all."""
    config = replace(
        _deep(name, layers, tmp_path, block_size=8 if name == "gpt_oss" else 32),
        enable_expert_parallel=name != "mixtral",
    )
    stages, alone = engine_of_stages(config, count, width=width), Engine(config)
    assert generated(stages) == generated(alone)
    engines = [stages, *threads_of(stages).engines]
    assert [(engine._ranks.stage.number, engine._ranks.group.rank) for engine in engines] == [
        (stage, rank) for stage in range(count) for rank in range(width)
    ]
    assert all(engine.layout.same_model(alone.layout) for engine in engines)


def test_ranks_of_the_first_stage_sample_while_later_passes_are_in_flight(config: EngineConfig, alone: Engine) -> None:
    """In all ways, with tokens that the next pass begins with, drafts and scores."""
    stages = engine_of_stages(config, 2, width=2)
    wanted, found = Generator(alone, chunk_size=23), Generator(stages, chunk_size=23)
    answers = wanted.run(asked())
    assert found.run(asked()) == answers
    known = {tuple(sequence.token_ids): answer for sequence, answer in zip(asked(), answers, strict=True)}
    drafting = Generator(stages, draft=Drafts(known, wrong=0.2))
    assert drafting.run(asked()) == answers
    assert sum(drafting.accepted) > 9
    assert said_in_flight(stages, [7, 8, 9]) == said_in_flight(alone, [7, 8, 9])
    prompt = [5 + 7 * at % 90 for at in range(70)]
    scoring = [[new_sequence("s", prompt, prompt_logprobs=3), new_sequence("p", prompt[:20])] for _ in range(2)]
    assert scored(stages, scoring[0], chunk_size=33) == scored(alone, scoring[1], chunk_size=33)
    samplers = [engine for engine in (stages, *threads_of(stages).engines) if engine._ranks.stage.number == 0]
    assert len(samplers) == 2
    assert not any(engine._lockstep._later.are_some or engine._lockstep._unsampled for engine in samplers)


async def test_streams_are_in_all_stages_of_several_ranks(config: EngineConfig, alone: Engine) -> None:
    assert await _decoded(engine_of_stages(config, 2, width=2), stages=2) == await _decoded(alone)


def test_a_message_of_sampling_out_of_step_is_refused(config: EngineConfig) -> None:
    """A rank of the first stage gets each pass's sampling once, and in order."""
    stages = engine_of_stages(config, 2, width=2)

    def send(self: Threads, *frames: bytes) -> None:
        for frame in frames:
            self.tell(*[frame] * (2 if frame[0] == _Kind.SAMPLING else 1))

    with mock.patch.object(Threads, "send", send), pytest.raises(RankLostError):
        Generator(stages).run([new_sequence("a", [5, 6, 7])])
    assert re.match(r"rank 1 failed \(rank 1 is at pass \d+.*message 2 of pass \d+: they are out of step", stages.lost)


def _deep(name: str, layers: int, folder: Path, *, block_size: int) -> EngineConfig:
    case = _case(name)
    fields = {key: value for key, value in case.fields.items() if key != "layer_types"} | {"num_hidden_layers": layers}
    cache = CacheConfig(num_blocks=400, block_size=block_size)
    model = replace(case, fields=fields).build(folder)
    return EngineConfig(model=model, max_model_len=case.max_model_len, cache=cache)


def _check_layouts(stages: Engine, alone: Engine) -> None:
    """An entry has as many blocks in each stage, and together they keep what one process does."""
    layouts = [stages.layout, *(engine.layout for engine in threads_of(stages).engines)]
    assert {tuple(group.blocks_per_entry for group in layout.groups) for layout in layouts} == {
        tuple(group.blocks_per_entry for group in stages.layout.groups)
    }
    assert all(layout.same_model(alone.layout) for layout in layouts)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = build_tiny_model(tmp_path_factory.mktemp("stages"), "mistral", num_hidden_layers=3)
    return EngineConfig(model=model, cache=CacheConfig(num_blocks=160, **ALIKE))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> Engine:
    return Engine(config)


@pytest.fixture(scope="module")
def stages(config: EngineConfig) -> Engine:
    return engine_of_stages(config, 2)


def test_the_first_stage_samples_what_one_process_does(alone: Engine, stages: Engine) -> None:
    wanted, found = Generator(alone, chunk_size=23), Generator(stages, chunk_size=23)
    answers = wanted.run(asked())
    assert found.run(asked()) == answers
    assert found.results == wanted.results  # log probabilities, too


def test_drafts_change_nothing(alone: Engine, stages: Engine) -> None:
    answers = Generator(alone).run(asked())
    known = {tuple(sequence.token_ids): answer for sequence, answer in zip(asked(), answers, strict=True)}
    drafting = Generator(stages, draft=Drafts(known, wrong=0.2))
    assert drafting.run(asked()) == answers
    assert sum(drafting.accepted) > 9


def test_prompts_are_scored_beside_others(alone: Engine, stages: Engine) -> None:
    def scored_ones() -> list[Sequence]:
        prompt = [5 + 7 * at % 90 for at in range(70)]
        return [new_sequence("scored", prompt, prompt_logprobs=3), new_sequence("plain", prompt[:20])]

    one, several = scored_ones(), scored_ones()
    assert scored(stages, several, chunk_size=33) == scored(alone, one, chunk_size=33)
    assert several[0].prompt_logprobs == one[0].prompt_logprobs


def test_a_pass_that_begins_with_an_unknown_token_waits_for_it(alone: Engine, stages: Engine) -> None:
    assert said_in_flight(stages, [7, 8, 9]) == said_in_flight(alone, [7, 8, 9])


def test_chunks_of_a_prompt_are_in_all_stages_at_a_time(config: EngineConfig, alone: Engine) -> None:
    """Each stage begins a pass only when the one before has begun the next: without a pass in each nothing would go on."""
    stages = engine_of_stages(config, 3)
    engines, prompt = [stages, *threads_of(stages).engines], [5 + 7 * at % 90 for at in range(70)]
    begun = {(stage, number): threading.Event() for stage in range(3) for number in range(4)}
    passes = dict.fromkeys([engine._runner for engine in engines], 0)
    execute = Runner.execute

    def gated(runner: Runner, packed: Packed) -> torch.Tensor | None:
        stage, number = list(passes).index(runner), passes[runner]
        passes[runner] += 1
        if stage and number + 1 < 4:
            assert begun[stage - 1, number + 1].wait(PATIENCE_S)
        begun[stage, number].set()
        return execute(runner, packed)

    generator, sequence = Generator(stages), new_sequence("a", prompt, max_tokens=1)
    generator.admit(sequence)
    with mock.patch.object(Runner, "execute", gated):
        chunks = [[sequence.schedule(num_tokens)] for num_tokens in (20, 20, 20, 10)]
        in_flight = [stages.launch(each) for each in chunks]
        for each, pass_ in zip(chunks, in_flight, strict=True):
            generator.deliver(each, pass_)
    assert [sequence.token_ids[70:]] == Generator(alone).run([new_sequence("a", prompt, max_tokens=1)])


async def test_streams_are_in_all_stages_at_a_time(config: EngineConfig, alone: Engine) -> None:
    """As above, by the worker's pipeline and scheduler, in passes of a third of the streams."""
    stages = engine_of_stages(config, 3)
    runners, rows = [engine._runner for engine in (stages, *threads_of(stages).engines)], list[int]()
    begun, gates = defaultdict[tuple[int, int], threading.Event](threading.Event), range(1, 12)
    passes, execute = dict.fromkeys(runners, 0), Runner.execute

    def gated(runner: Runner, packed: Packed) -> torch.Tensor | None:
        stage, number = runners.index(runner), passes[runner]
        passes[runner] += 1
        if not stage:
            rows.append(packed.size.num_sampled)
        elif number in gates:  # the first pass has the prompts
            assert begun[stage - 1, number + 1].wait(PATIENCE_S)
        begun[stage, number].set()
        return execute(runner, packed)

    answers = await _decoded(alone)
    with mock.patch.object(Runner, "execute", gated):
        assert await _decoded(stages, stages=3) == answers
    assert {rows[number] for number in gates} == {LEAST_ROWS}


def test_a_stage_has_its_layers_alone(config: EngineConfig, alone: Engine, stages: Engine) -> None:
    """The first has one more; only the first has the embedding, only the last the head."""
    layouts = [engine.layout for engine in (stages, threads_of(stages).engines[0])]
    assert [(part.first_layer, part.layers, part.all_layers) for layout in layouts for part in layout.pages] == [
        (0, 2, 3),
        (2, 1, 3),
    ]
    assert [layout.num_blocks for layout in layouts] == [alone.layout.num_blocks] * 2
    assert sum(layout.block_bytes for layout in layouts) == alone.layout.block_bytes
    assert all(layout.same_model(alone.layout) for layout in layouts)
    assert not stages.layout.compatible_with(alone.layout)
    assert stages.fingerprint == alone.fingerprint


def test_a_failed_pass_names_its_stage(config: EngineConfig) -> None:
    stages = engine_of_stages(config, 2)
    runner = threads_of(stages).engines[0]._runner
    with (
        mock.patch.object(runner, "execute", side_effect=MemoryError("no room")),
        pytest.raises(RankLostError, match=r"rank 1 failed \(no room\)"),
    ):
        Generator(stages).run([new_sequence("a", [5, 6, 7])])


def test_stages_out_of_step_are_refused(config: EngineConfig) -> None:
    """One that was told of no pass, and gets rows of the next."""
    stages, said = engine_of_stages(config, 2), list[bytes]()

    def send(self: Threads, *frames: bytes) -> None:
        said.extend(frames)
        if len(said) != 2:
            self.tell(*frames)

    generator, sequence = Generator(stages), new_sequence("a", [5] * 40)
    generator.admit(sequence)
    with mock.patch.object(Threads, "send", send):
        passes = [stages.launch([sequence.schedule(num_tokens)]) for num_tokens in (10, 12, 14)]
        with pytest.raises(RankLostError, match=r"rank 1 failed.*out of step"):
            passes[1].wait()
    assert "rank 1 is at pass 1" in stages.lost


def test_a_message_of_another_size_is_refused(config: EngineConfig) -> None:
    threads = Threads(2, are_stages=True)
    first, second = threads.leader.stage, threads.others[0].stage
    first.send(torch.arange(6.0))
    with pytest.raises(RankLostError, match=r"message 1 of 24 bytes.*waits for message 1 of 32: they are out of step"):
        second.receive(torch.empty(2, 4))


def test_messages_larger_than_a_ring_arrive_whole() -> None:
    threads, sent = Threads(2, are_stages=True), torch.arange(2.0 * (1 << 20)).view(-1, 1024)
    writing = threading.Thread(target=threads.leader.stage.send, args=(sent,))
    writing.start()
    assert torch.equal(threads.others[0].stage.receive(torch.empty(2048, 1024)), sent)
    writing.join()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"cache": CacheConfig(num_blocks=8)},
            "only layers with a sliding window: take fewer, or --disable-hybrid-kv-cache",
        ),
    ],
)
def test_what_stages_do_not_have_is_refused(
    changed: dict[str, object], says: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    case = _case("gemma3")
    model = case.build(tmp_path) if "cache" in changed else tiny_model("llama")
    wanted = EngineConfig(model=model, max_model_len=case.max_model_len, cache=CacheConfig(num_blocks=8))
    stage = Threads(2, are_stages=True).leader.stage
    with pytest.raises(ValueError, match=f"{FLAG} 2: .*{says}"):
        Engine(replace(wanted, **changed), ranks=Ranks(stage=stage))  # type: ignore[arg-type]


def test_more_stages_than_layers_are_refused(config: EngineConfig) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{FLAG} 4: a stage of 0 of 3 layers keeps no keys and values"):
        for_stage(read_model_spec(config.model), 0, 4)


@pytest.mark.parametrize(
    ("layers", "count", "drafting", "wanted"),
    [
        (8, 2, 0, [4, 4]),
        (8, 2, 2, [3, 5]),
        (16, 4, 1, [4, 4, 4, 4]),
        (3, 2, 1, [1, 2]),
        (4, 2, 9, [1, 3]),  # the first one keeps a layer
        (64, 4, 6, [12, 17, 18, 17]),
    ],
)
def test_a_drafter_counts_as_layers_of_the_first_stage(
    layers: int, count: int, drafting: int, wanted: list[int]
) -> None:
    """A drafter's content comes before the model's layers in a block, so those of each stage follow one another."""
    layer = LayerSpec(mixer=AttentionSpec(heads=HeadShape(2, 1, 8), rope=None))
    draft = DraftSpec(layers=(layer,) * drafting, aux_layers=()) if drafting else None
    whole = ModelSpec(
        vocab_size=9, hidden_size=8, max_position_embeddings=64, layers=(layer,) * layers, dtype="float32", draft=draft
    )
    stages = [for_stage(whole, number, count) for number in range(count)]
    assert [len(stage.own_layers) for stage in stages] == wanted
    parts = [part for stage in stages for part in page_parts(stage, "float32")]
    kept = [wanted[0] + drafting, *wanted[1:]]
    assert [(part.first_layer, part.layers, part.all_layers) for part in parts] == [
        (sum(kept[:number]), kept[number], layers + drafting) for number in range(count)
    ]
    assert stages[0].draft_places == tuple(((0, number),) for number in range(drafting))
    assert stages[0].places == tuple(((0, number),) for number in range(drafting, kept[0]))
    assert all(stage.draft_places == () for stage in stages[1:])


@pytest.mark.parametrize("sized", [{}, {"num_blocks": 30}, {"kv_memory_bytes": 1 << 20}])
def test_pools_have_the_blocks_of_the_stage_with_the_least_room(config: EngineConfig, sized: dict[str, int]) -> None:
    """Where their sizes are those of what is free; else the leader's number is told."""
    said, asked_for = list[EngineConfig](), list[int]()

    class Followed:
        def send(self, *frames: bytes) -> None:
            said.extend(map(decode_config, frames))

        def wait(self) -> None: ...

        def problem(self) -> str:
            return ""

    def fewest(num_blocks: int) -> int:
        asked_for.append(num_blocks)
        return 12

    wanted = replace(config, cache=CacheConfig(**ALIKE, **sized))  # type: ignore[arg-type]
    spec, ranks = read_model_spec(config.model), Ranks(followers=Followed(), fewest=fewest)
    layout = planned(ranks, wanted, lambda its: plan_layout(spec, its, "float32"))
    assert [told.cache.num_blocks for told in said] == [layout.num_blocks if sized else None]
    assert bool(asked_for) == (not sized)
    assert sized or (layout.num_blocks == 12 < asked_for[0])
