"""Speculation is exact: with drafts of any quality an answer is the one without, whatever was asked of the sampler."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from common.messages import Grammar
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine, InvalidChunkError, Sampled
from engine.fake.engine import FakeEngine
from engine.passes import Finished
from engine.sampling.verifying import VerifyingPass
from engine.sequence import Sequence
from tests.models import EOS_TOKEN_ID, VOCAB_SIZE
from tests.unit.engine.drafts import Drafts
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.layouts import HYBRIDS, STATES

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
GRAMMARS = (
    Grammar(text=f"start: %json {json.dumps(SCHEMA)}"),
    Grammar(text='start: ("yes" | "no")+'),
    Grammar(banned=[[7], [9, 11]], allowed=list(range(5, 300))),
    Grammar(text='start: "done"', after=[5, 6], budget=9),
)
MAX_TOKENS = 24


@pytest.fixture(scope="module", params=["float32", "int8", "fake", "fake, with states"])
def engine(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Engine:
    cache = CacheConfig(num_blocks=256, kv_cache_dtype="int8" if request.param == "int8" else "auto")
    config = EngineConfig(model=tiny_model("mistral"), cache=cache)  # windows of 24
    if not request.param.startswith("fake"):
        return Engine(config)
    parts = HYBRIDS[STATES] if request.param.endswith("states") else None
    return FakeEngine(config, vocab_size=VOCAB_SIZE, parts=parts, sleep=None)


def _sequences(draw: random.Random) -> list[Sequence]:
    """Sequences with any parameters; half of them inside a grammar."""
    sequences = []
    for number in range(draw.randint(1, 6)):
        sequence = new_sequence(
            str(number),
            [draw.randrange(3, 40) for _ in range(draw.randint(1, 50))],
            temperature=draw.choice([0.0, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            seed=draw.randrange(2**64),
            repetition_penalty=draw.choice([1.0, 1.3]),
            frequency_penalty=draw.choice([0.0, 0.5]),
            logit_bias=draw.choice([{}, {8: 2.0}]),
            logprobs=draw.choice([None, 2]),
            min_tokens=draw.choice([0, 5]),
            max_tokens=draw.randint(1, MAX_TOKENS),
            stop_token_ids=[EOS_TOKEN_ID, *draw.sample(range(3, VOCAB_SIZE), 12)],
        )
        sequence.grammar = draw.choice([None, None, None, None, *GRAMMARS])
        sequences.append(sequence)
    return sequences


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(10))
def test_drafts_of_any_quality_change_nothing(engine: Engine, seed: int) -> None:
    plain = Generator(engine)
    answers = plain.run(_sequences(random.Random(seed)))
    sequences = _sequences(random.Random(seed))
    known = {tuple(sequence.token_ids): answer for sequence, answer in zip(sequences, answers, strict=True)}
    drafting = Generator(engine, draft=Drafts(known, wrong=random.Random(seed).choice([0.0, 0.2, 1.0]), seed=seed))
    assert drafting.run(sequences) == answers
    for request_id, results in plain.results.items():
        for one, other in zip(results, drafting.results[request_id], strict=True):
            assert one is not None
            assert other is not None
            assert (one.problem, one.token_id) == (other.problem, other.token_id)
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs is not None and other.logprobs is not None:
                assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


def test_right_drafts_save_passes(engine: Engine) -> None:
    prompt = [5, 6, 7, 8]
    (answer,) = Generator(engine).run([new_sequence("plain", prompt)])
    drafting = Generator(engine, draft=Drafts({tuple(prompt): answer}, wrong=0.0))
    assert drafting.run([new_sequence("drafted", prompt)]) == [answer]
    assert len(drafting.accepted) + sum(drafting.accepted) < len(answer)
    assert sum(drafting.accepted) > len(answer) // 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_forces_is_drafted(engine: Engine, temperature: float) -> None:
    names = ["shipping_address_of_the_customer", "telephone_number_of_the_customer"]
    properties = {name: {"enum": ["yes", "no"]} for name in names}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    grammar = Grammar(text=f"start: %json {json.dumps(schema | {'x-guidance': {'whitespace_flexible': False}})}")

    def asked(name: str) -> Sequence:
        sequence = new_sequence(name, [5, 6, 7], temperature=temperature, seed=3, max_tokens=80, stop_token_ids=[2])
        sequence.grammar = grammar
        return sequence

    (answer,) = Generator(engine).run([asked("plain")])
    engine.grammars.looks_ahead = True
    drafting = Generator(engine, draft=lambda sequence: engine.grammars.forced(sequence)[:8])
    assert drafting.run([asked("drafted")]) == [answer]
    assert drafting.accepted
    if temperature == 0:
        assert len(drafting.accepted) + sum(drafting.accepted) <= len(answer)


def test_a_draft_is_accepted_up_to_its_first_wrong_token() -> None:
    sequence = new_sequence("a", [1, 2, 3])
    sequence.restart(2)
    chunk = sequence.schedule(1, (10, 11, 12))
    rows = [Sampled(token, None) for token in (10, 11, 99, 13)]
    (result,) = VerifyingPass([chunk], Finished(list(rows))).wait()
    assert result is not None
    assert [each and each.token_id for each in (result, *result.further)] == [10, 11, 99]
    assert sequence.num_unscheduled <= 0  # nothing follows until it is known
    sequence.finish(chunk, len(result.further))
    for each in (result, *result.further):
        assert each is not None
        sequence.append(each.token_id)
    assert (sequence.num_computed, sequence.num_scheduled, sequence.num_unscheduled) == (5, 5, 1)


def test_unusable_logits_behind_a_draft_end_it_there() -> None:
    sequence = new_sequence("a", [1, 2, 3])
    sequence.restart(2)
    chunk = sequence.schedule(1, (10, 11))
    (result,) = VerifyingPass([chunk], Finished([Sampled(10, None), None, Sampled(12, None)])).wait()
    assert result is not None
    assert result.further == (None,)


def test_a_draft_outside_the_vocabulary_is_refused(engine: Engine) -> None:
    generator = Generator(engine, draft=lambda _: [VOCAB_SIZE])
    sequence = new_sequence("a", [1, 2, 3])
    generator.admit(sequence)
    generator.go_on([sequence], num_tokens=1)
    with pytest.raises(InvalidChunkError):
        generator.go_on([sequence])
    generator.release(sequence)
