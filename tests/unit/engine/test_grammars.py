"""Answers inside a grammar: the matcher's state, masks, and engines that sample by them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from common.messages import Grammar
from common.words import Finish
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine, Sampled
from engine.fake.engine import FakeEngine
from engine.grammars import grammars as kept_grammars
from engine.grammars.grammars import KEPT, NO_MASKS, Grammars
from engine.kernels.sampling import RowWord, SamplingInputs, choose, mask_words
from engine.sampling.host import SampledRow, sample
from engine.sequence import Sequence
from modelfiles.files import TOKENIZER, read_file
from tests.models import EOS_TOKEN_ID, VOCAB_SIZE, build_tiny_model
from tests.unit.engine.generate import Generator, new_sequence

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
JSON = Grammar(text=f"start: %json {json.dumps(SCHEMA | {'x-guidance': {'whitespace_flexible': False}})}")
WORDS = Grammar(text='start: ("yes" | "no")+')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=[Engine, FakeEngine], ids=["model", "fake"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Engine:
    config = EngineConfig(model=folder, cache=CacheConfig(num_blocks=256))
    return Engine(config) if request.param is Engine else FakeEngine(config, vocab_size=VOCAB_SIZE, sleep=None)


def constrained(name: str, grammar: Grammar, **sampling: object) -> Sequence:
    options = {"max_tokens": 80, "temperature": 1.0, "seed": 7, "stop_token_ids": [EOS_TOKEN_ID]}
    sequence = new_sequence(name, [5, 6, 7, 8], **(options | sampling))
    sequence.grammar = grammar
    return sequence


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode(tokens)  # without EOS, a special token


def test_an_answer_follows_its_schema_and_stops(engine: Engine, tokenizer: Tokenizer) -> None:
    sequences = [constrained(f"json-{seed}", JSON, seed=seed) for seed in range(6)]
    answers = Generator(engine).run(sequences)
    for sequence, answer in zip(sequences, answers, strict=True):
        assert sequence.finish_reason() == Finish.STOP
        jsonschema.validate(json.loads(text_of(tokenizer, answer)), SCHEMA)
    assert len({tuple(answer) for answer in answers}) > 1


def test_rows_without_a_grammar_are_as_without_the_others(engine: Engine) -> None:
    def free() -> list[Sequence]:
        return [new_sequence(f"free-{index}", [9, index, 3], temperature=0.9, seed=index) for index in range(3)]

    alone = Generator(engine).run(free())
    mixed = Generator(engine).run([*free(), *(constrained(f"json-{index}", JSON, seed=index) for index in range(3))])
    assert mixed[:3] == alone


def test_an_answer_goes_on_elsewhere_token_for_token(engine: Engine) -> None:
    """As after a worker's death: the generated tokens alone say how far the grammar is."""
    whole = Generator(engine).run([constrained("whole", JSON, top_p=0.9)])[0]
    for cut in (1, 4, len(whole) - 1):
        resumed = constrained(f"cut-{cut}", JSON, top_p=0.9)
        resumed.token_ids += whole[:cut]
        assert Generator(engine).run([resumed])[0] == whole


def test_min_tokens_bans_the_end_until_only_the_end_is_left(engine: Engine, tokenizer: Tokenizer) -> None:
    longer = constrained("longer", WORDS, min_tokens=9, max_tokens=12)
    answer = Generator(engine).run([longer])[0]
    assert len(answer) >= 9
    assert EOS_TOKEN_ID not in answer[:9]
    over = constrained("over", Grammar(text='start: "yes"'), min_tokens=50)
    answer = Generator(engine).run([over])[0]
    assert (text_of(tokenizer, answer), over.finish_reason()) == ("yes", Finish.STOP)


def test_any_stop_token_ends_an_answer_that_may_end(engine: Engine, tokenizer: Tokenizer) -> None:
    """Several EOS ids, or the client's own: none of them is part of the text."""
    stop = 1  # <|im_start|>, which the grammar knows nothing of
    sequence = constrained("other", Grammar(text='start: "yes"'), stop_token_ids=[stop])
    assert Generator(engine).run([sequence])[0][-1] == stop
    assert sequence.finish_reason() == Finish.STOP


def test_a_grammar_begins_behind_the_reasoning(engine: Engine, tokenizer: Tokenizer) -> None:
    closing = tokenizer.encode("</think>", add_special_tokens=False).ids
    thinking = constrained("thinking", Grammar(text='start: "yes"', after=closing, budget=5), temperature=1.5)
    answer = Generator(engine).run([thinking])[0]
    assert answer[5 : 5 + len(closing)] == closing
    assert EOS_TOKEN_ID not in answer[:-1]
    assert text_of(tokenizer, answer[5 + len(closing) :]) == "yes"


def test_a_budget_alone_leaves_the_answer_free(engine: Engine) -> None:
    bounded = constrained("bounded", Grammar(after=[40, 41], budget=3), max_tokens=12, stop_token_ids=[])
    answer = Generator(engine).run([bounded])[0]
    assert (answer[3:5], len(answer)) == ([40, 41], 12)


def test_only_allowed_tokens_come(engine: Engine) -> None:
    sequence = constrained("r", Grammar(allowed=[40, 41, EOS_TOKEN_ID]), temperature=2.0)
    (tokens,) = Generator(engine).run([sequence])
    assert tokens
    assert set(tokens) <= {40, 41, EOS_TOKEN_ID}


def test_banned_runs_never_come(engine: Engine) -> None:
    """A token alone is banned everywhere; the last one of a run only behind the others."""
    allowed = [40, 41, 42, 43]
    sequence = constrained("r", Grammar(allowed=allowed, banned=[[43], [40, 41], [41, 42, 41]]), temperature=5.0)
    (tokens,) = Generator(engine).run([sequence])
    assert len(tokens) == sequence.sampling.max_tokens
    assert set(tokens) == {40, 41, 42}
    assert (40, 41) not in set(itertools.pairwise(tokens))
    assert (41, 42, 41) not in set(zip(tokens, tokens[1:], tokens[2:], strict=False))
    moved = constrained("r", sequence.grammar, temperature=5.0)
    moved.token_ids += tokens[:30]
    assert Generator(engine).run([moved])[0] == tokens, "a new attempt goes on as it would have"


def test_limits_and_a_grammar_hold_together(engine: Engine, tokenizer: Tokenizer) -> None:
    yes = tokenizer.encode("y", add_special_tokens=False).ids
    sequence = constrained("r", Grammar(text=WORDS.text, banned=[yes[:1]]), temperature=1.0, max_tokens=9)
    (tokens,) = Generator(engine).run([sequence])
    assert set(text_of(tokenizer, tokens)) <= set("no")


@pytest.mark.parametrize("text", ['start: "a', "start: <|nobody|>"])
def test_what_can_not_be_built_fails_its_own_sequence_alone(engine: Engine, text: str) -> None:
    generator = Generator(engine)
    broken, fine = constrained("broken", Grammar(text=text)), new_sequence("fine", [3, 4, 5])
    chunks = []
    for sequence in (broken, fine):
        generator.admit(sequence)
        chunks.append(sequence.schedule(len(sequence.token_ids)))
    first, second = engine.launch(chunks).wait()
    assert first is not None
    assert "can't be built" in first.problem
    assert second is not None
    assert not second.problem


def test_unlike_grammars_do_not_fill_the_memory(folder: Path) -> None:
    kept = Grammars(folder, VOCAB_SIZE)
    for number in range(KEPT + 10):
        building = kept.prepare(constrained(str(number), Grammar(text=f'start: "{number}"')))
        assert building is not None
        assert not building.result(60).problem
    assert len(kept._built) == KEPT


def test_tokens_that_leave_the_grammar_are_a_problem(engine: Engine) -> None:
    sequence = constrained("left", WORDS)
    sequence.token_ids += [300]
    generator = Generator(engine)
    generator.admit(sequence)
    (result,) = engine.launch([sequence.schedule(len(sequence.token_ids))]).wait()
    assert result is not None
    assert "can't be followed" in result.problem


def test_without_a_tokenizer_no_grammar_is_followed(tmp_path: Path) -> None:
    grammars = Grammars(tmp_path, VOCAB_SIZE)
    assert not grammars.available
    sequence = constrained("x", WORDS)
    chunk = sequence.schedule(4)
    masks = grammars.masks([chunk], lambda _: 0)
    assert "can't follow grammars" in masks.problems[chunk]


def test_a_tokenizer_is_read_with_the_first_grammar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes long, and a worker would not be ready meanwhile."""
    read = []
    monkeypatch.setattr(kept_grammars, "read_file", lambda *asked: read.append(asked) or read_file(*asked))
    grammars = Grammars(folder, VOCAB_SIZE)
    assert grammars.available
    assert grammars.masks([new_sequence("free", [1, 2]).schedule(2)], lambda _: 0) is NO_MASKS
    assert not read
    for name in ("first", "second"):
        building = grammars.prepare(constrained(name, WORDS))
        assert building is not None
        assert not building.result(60).problem
    assert read == [(folder, TOKENIZER)]


def test_a_tokenizer_that_can_not_be_read_is_none_from_then_on(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER).write_text("{}")
    grammars = Grammars(tmp_path, VOCAB_SIZE)
    assert grammars.available
    building = grammars.prepare(constrained("x", WORDS))
    assert building is not None
    assert "can't follow grammars" in building.result(60).problem
    assert not grammars.available


def test_a_pass_without_grammars_is_asked_for_nothing(folder: Path) -> None:
    grammars = Grammars(folder, VOCAB_SIZE)
    assert grammars.masks([new_sequence("free", [1, 2]).schedule(2)], lambda _: 0) is NO_MASKS


def test_special_tokens_are_no_text(folder: Path, tokenizer: Tokenizer) -> None:
    grammars = Grammars(folder, VOCAB_SIZE)
    sequence = constrained("text", Grammar(text=r"start: /(.|\n)*/"))
    masks = grammars.masks([sequence.schedule(4)], lambda _: 0)
    allowed = masks.allowed(VOCAB_SIZE)[0]
    assert allowed[EOS_TOKEN_ID]
    assert not allowed[[0, 1]].any()
    assert allowed.sum() > VOCAB_SIZE // 2


def test_masks_are_as_wide_as_the_scores_whatever_the_tokenizer_has(folder: Path) -> None:
    """A tokenizer with ids beyond the model's vocabulary: their words would push the next row's aside on a GPU."""
    narrow = VOCAB_SIZE - 100
    grammars = Grammars(folder, narrow)
    chunks = [constrained(name, Grammar(allowed=[7, at])).schedule(4) for at, name in enumerate("ab", 20)]
    masks = grammars.masks(chunks, lambda _: 0)
    assert masks.words.shape == (2, mask_words(narrow))
    assert [row.nonzero()[0].tolist() for row in masks.allowed(narrow).values()] == [[7, 20], [7, 21]]


@pytest.mark.parametrize(
    "grammar", [Grammar(banned=[[5, 6]]), Grammar(allowed=[40, 41, EOS_TOKEN_ID]), Grammar(after=[9], budget=50)]
)
def test_min_tokens_hold_without_a_text(engine: Engine, grammar: Grammar) -> None:
    """Scores that favour the end: only the ban keeps it away."""
    options: dict[str, Any] = {"min_tokens": 6, "max_tokens": 8, "logit_bias": {EOS_TOKEN_ID: 100.0}}
    if isinstance(engine, FakeEngine):
        options.pop("logit_bias")
    (tokens,) = Generator(engine).run([constrained("r", grammar, **options)])
    assert EOS_TOKEN_ID not in tokens[:6]
    assert len(tokens) >= 6


def test_logprobs_are_among_allowed_tokens() -> None:
    logits = torch.tensor([[5.0, 1.0, 2.0, 4.0]])
    allowed = torch.tensor([False, True, True, False]).numpy()
    row = SampledRow(new_sequence("x", [1], temperature=0.0, logprobs=3).sampling, [1], 1, allowed)
    (sampled,) = sample(logits, [row])
    assert isinstance(sampled, Sampled)
    assert sampled.token_id == 2
    assert sampled.logprobs is not None
    assert sampled.logprobs.top_ids == [2, 1]
    assert sampled.logprobs.logprob == pytest.approx(-0.3133, abs=1e-3)
    assert logits[0, 0] == 5.0


def test_masked_rows_are_masked_before_anything_else() -> None:
    """In the sampler of devices: rows without a mask keep their logits."""
    logits = torch.tensor([[5.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
    words = torch.zeros(2 * len(RowWord) + 2, dtype=torch.int64)
    words[-2:] = torch.tensor([1, 0b110])  # row 1: tokens 1 and 2
    inputs = SamplingInputs(
        words=words, counts=None, filtered=0, filtered_at=0, random=False, extras=False, logprobs=False,
        masked=1, masked_at=2 * len(RowWord), masks_at=2 * len(RowWord) + 1,
    )  # fmt: skip
    report = torch.empty((2, 3), dtype=torch.int32)
    assert choose(logits, inputs, report).token_ids.tolist() == [0, 2]
