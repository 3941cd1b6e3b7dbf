"""Every family answers as `transformers` does in float32, token for token, however the work is cut up and moved."""

from __future__ import annotations

import pytest

from engine.sequence import Sequence
from tests.unit.engine.drafts import Drafts
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.families.exact import TAKEN, Bench, asked, prompt_of
from tests.unit.engine.generate import new_sequence

LENGTHS = (1, 16, 17, 33)
# Batches, drafts, prefixes and losses meet what a layer keeps, not its products and norms: one family for each kind.
KEEPING = """
llama; llama4-chunks; gemma2; gemma3; gemma3n; gemma4; gpt_oss; mimo_v2_flash; laguna; minicpm3; deepseek_v3; deepseek_v32;
glm_moe_dsa; longcat_flash; qwen3_next; qwen3_5; granite4; falcon_h1; jamba; lfm2; kimi_linear; olmo_hybrid; nemotron_h;
bamba; qwen2_vl; by transformers: gpt_neox
"""


def _drawn(name: str, prompts: list[list[int]]) -> list[Sequence]:
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 24}
    return [new_sequence(f"{name} {number}", prompt, **sampling) for number, prompt in enumerate(prompts)]


def _parameter(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.is_long else [])


def _if_it_keeps_more(case: Case) -> object:
    is_first = case.name in {name.strip() for name in KEEPING.split(";")}
    return _parameter(case) if is_first else pytest.param(case, id=case.name, marks=pytest.mark.long)


# Drafts take back what a kind of layer has written: one family for each kind of layer.
TAKING_BACK = """
llama; gemma3; gpt_oss; deepseek_v3; glm_moe_dsa; qwen3_next; falcon_h1; jamba; lfm2; kimi_linear; by transformers: gpt_neox
"""
of_each_way_to_take_back = pytest.mark.quick(*(name.strip() for name in TAKING_BACK.split(";")))
of_each_way_to_keep = pytest.mark.parametrize(
    "bench", [_if_it_keeps_more(case) for case in CASES], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=[_parameter(case) for case in CASES])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(request.param, tmp_path_factory.mktemp("family"))


def _read_by(bench: Case, chunk_size: int) -> tuple[str, str, str]:
    """The code that reads a case: a configuration's class, where its text is within it, and a way to rotate."""
    rotated = bench.fields.get("rope_parameters") or bench.fields.get("rope_scaling") or {}
    return bench.config, bench.text_in, str(rotated.get("rope_type", ""))


# Chunks are handed over beside sequences that decode, too: below.
@pytest.mark.quick(of=_read_by)
@pytest.mark.parametrize("chunk_size", [512, pytest.param(23, marks=pytest.mark.long)])
def test_a_prompt_is_handed_over_and_goes_on(bench: Bench, chunk_size: int) -> None:
    bench.check_handed_over(chunk_size=chunk_size)


@of_each_way_to_keep
def test_a_prompt_begins_with_another_ones_blocks(bench: Bench) -> None:
    generator, _ = bench.generators()
    first, prompt = asked("first", prompt_of(70)), prompt_of(70)
    generator.run([first])
    again, branched = asked("again", prompt), asked("branched", prompt[:40] + prompt_of(9, seed=5))
    generator.run([again, branched])
    other = asked("branched again", prompt[:40] + prompt_of(9, seed=6))
    generator.run([other])
    bench.check([first, again, branched, other], generator)
    # A state is left where somebody branched: for who comes next. Small ones are left more often.
    known = 40 // bench.checkpoint_every * bench.checkpoint_every
    assert (again.num_cached, branched.num_cached, other.num_cached) == (64, known, 32)


@of_each_way_to_keep
def test_prompts_arrive_beside_sequences_that_decode(bench: Bench) -> None:
    prefill, decode = bench.generators(chunk_size=13)
    moved = [asked(f"moved {length}", prompt_of(max(length, bench.shortest), seed=1)) for length in LENGTHS]
    for sequence in moved:
        prefill.start(sequence)
        bench.hand_over(sequence, prefill, decode)
    local = [asked(f"local {length}", prompt_of(max(length, bench.shortest), seed=2)) for length in LENGTHS]
    for sequence in local:
        decode.admit(sequence)
    decode.go_on([*moved, *local])
    bench.check([*moved, *local], prefill, decode)


@of_each_way_to_take_back
@of_each_way_to_keep
def test_drafts_of_any_quality_change_nothing(bench: Bench) -> None:
    plain, _ = bench.generators()
    prompts = [prompt_of(max(length, bench.shortest), seed=3) for length in LENGTHS]
    answers = plain.run([asked(f"plain {number}", prompt) for number, prompt in enumerate(prompts)])
    prefill, decode = bench.generators(draft=Drafts(dict(zip(map(tuple, prompts), answers, strict=True))))
    drafted = [asked(f"drafted {number}", prompt) for number, prompt in enumerate(prompts)]
    for sequence in drafted:
        prefill.start(sequence)
        bench.hand_over(sequence, prefill, decode)
    decode.go_on(drafted)
    bench.check(drafted, prefill, decode)
    assert 0 < sum(decode.accepted) < len(decode.accepted) * Drafts.LONGEST


@of_each_way_to_take_back
@of_each_way_to_keep
def test_drafts_go_on_from_copies_checkpoints_and_after_a_loss(bench: Bench) -> None:
    plain, _ = bench.generators()
    prompts = [prompt_of(max(length, bench.shortest), seed=4) for length in (17, 33, 44)]
    answers = dict(zip(map(tuple, prompts), plain.run(_drawn("plain", prompts)), strict=True))
    further = [*prompts[0], *answers[tuple(prompts[0])], *prompt_of(bench.checkpoint_every, seed=5)]
    (answers[tuple(further)],) = plain.run(_drawn("plain further", [further]))
    prefill, decode = bench.generators(draft=Drafts(answers))
    sequences = _drawn("drafted", prompts)
    for sequence in sequences:
        prefill.start(sequence)
        bench.hand_over(sequence, prefill, decode)
    decode.go_on(sequences, num_tokens=15)
    bench.lose(sequences[1], decode)
    decode.admit(sequences[1])
    decode.go_on(sequences)
    for sequence in sequences:
        decode.release(sequence)
    later = [*_drawn("first", [further]), *_drawn("second", [further])]
    for sequence in later:
        decode.run([sequence])
    for sequence in (*sequences, *later):
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        assert answer == answers[tuple(sequence.token_ids[: sequence.num_prompt_tokens])], sequence.request_id
    assert later[1].num_cached
    assert decode.pool.num_used == TAKEN


@of_each_way_to_keep
def test_a_sequence_that_lost_its_blocks_is_computed_again(bench: Bench) -> None:
    prefill, decode = bench.generators()
    lost, other = asked("lost", prompt_of(33)), asked("other", prompt_of(20))
    for sequence in (lost, other):
        prefill.start(sequence)
        bench.hand_over(sequence, prefill, decode)
    decode.go_on([lost, other], num_tokens=3)
    bench.lose(lost, decode)
    decode.admit(lost)
    assert lost.num_computed == 0
    decode.go_on([lost, other])
    bench.check([lost, other], prefill, decode)
