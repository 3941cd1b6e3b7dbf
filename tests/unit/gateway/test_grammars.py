"""Grammars at the gateway: every form becomes text that matches what it should, or a refusal that names the field."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidRequestError
from gateway.grammars import forms
from gateway.grammars.maker import GrammarMaker
from gateway.grammars.wanted import (
    Tag,
    Wanted,
    Whitespace,
    choice,
    ebnf,
    json_object,
    json_schema,
    of_text,
    regex,
    structural_tag,
)
from tests.models import SPECIAL_TOKENS, VOCAB_SIZE, build_tokenizer

AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
TAGS = [
    Tag(begin="<call=a>", schema=AGE, end="</call>"),
    Tag(begin="<|im_start|>b", schema={"type": "null"}, end="<|endoftext|>"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return (folder / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def maker(text: str) -> Iterator[GrammarMaker]:
    maker = GrammarMaker(text, vocab_size=VOCAB_SIZE, eos_ids=[2], specials=SPECIAL_TOKENS)
    yield maker
    maker.close()


def matches(tokenizer: LLTokenizer, grammar: str, answer: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    tokens = tokenizer.tokenize_str(answer, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


CASES: list[tuple[Wanted, list[str], list[str]]] = [
    (json_schema("f", AGE), ['{"age":1}', '{ "age": 1 }'], ['{"age":"1"}', "{}", '{"age":1,"b":2}', '{"age":' + 65 * " " + "1}"]),
    (json_schema("f", '{"type": "null"}'), ["null"], ["{}"]),
    (json_schema("f", True), ["[1, {}]"], ["[1"]),
    (json_schema("f", AGE, whitespace=Whitespace(is_allowed=False)), ['{"age":1}'], ['{"age": 1}']),
    (json_schema("f", AGE | {"if": {}}, strict=False), ['{"age":1}'], ["{}"]),
    (json_object("f"), ["{}", '{"a": [1]}'], ["[]", "1"]),
    (regex("f", r"^\d{3}$"), ["123"], ["12", "1234"]),
    (regex("f", r"a/\$"), ["a/$"], ["a/"]),
    (choice("f", ["yes", "né", 'q"\\']), ["yes", "né", 'q"\\'], ["no", "yesyes"]),
    (ebnf("f", 'start: "a" B\nB: /b+/'), ["abb"], ["a"]),
    (ebnf("f", 'root ::= "a" [0-9]{2}'), ["a12"], ["a1"]),
    (of_text("f", 'start: <|im_start|> "x"'), ["<|im_start|>x"], ["x"]),
    (
        structural_tag("f", TAGS, ["<call", "<|im_start|>"]),
        ["no call", 'so <call=a>{"age":1}</call> then <|im_start|>bnull<|endoftext|>!'],
        ["<call=b>", '<call=a>{"age":', "<|im_start|>x"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "right", "wrong"), CASES, ids=range(len(CASES)))
async def test_each_form_matches_what_it_says(
    wanted: Wanted, right: list[str], wrong: list[str], maker: GrammarMaker, text: str
) -> None:
    tokenizer = LLTokenizer(text, n_vocab=VOCAB_SIZE, eos_token=2)
    grammar = await maker.make(wanted)
    assert [answer for answer in right if not matches(tokenizer, grammar.text, answer)] == []
    assert [answer for answer in wrong if matches(tokenizer, grammar.text, answer)] == []


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (json_schema("response_format", {"type": "strng"}), "response_format: Invalid type: strng"),
        (json_schema("f", AGE | {"if": {}}), 'f: Unimplemented keys: ["if"]'),
        (json_schema("f", "{"), "f: Expecting property name"),
        (json_schema("f", 3), "f: must be a JSON schema"),
        (json_schema("f", {"const": 2**70}), "f: has a number"),
        (json_schema("f", {"enum": ["x" * 70_000]}), "f: is too large"),
        (json_schema("f", {"type": "integer", "multipleOf": 99991}), "f: multipleOf: its values together take 99991"),
        (regex("f", "["), "unclosed character class"),
        (regex("f", r"(?=a)b"), "look-around"),
        (ebnf("f", 'start: "a'), "lexer error"),
        (ebnf("f", "root ::= " + "(" * 5_000), "f: Failed to convert the grammar from GBNF to Lark: maximum recursion"),
        (of_text("f", "start: <|nobody|>"), 'unknown special token: "<|nobody|>"'),
        (structural_tag("f", TAGS, ["<call"]), "begin '<|im_start|>b' starts with none of the triggers"),
    ],
)
async def test_what_can_not_be_followed_is_refused_in_the_librarys_words(
    wanted: Wanted, words: str, maker: GrammarMaker
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await maker.make(wanted)
    assert words in refused.value.message
    assert refused.value.param == wanted.field


HOSTILE = "start: A\nA: " + " & ".join(
    f"/(.*b{index}.*)/" for index in range(300)
)  # 8 GB, and then the end of the process


async def test_a_hostile_grammar_costs_its_child_alone(maker: GrammarMaker) -> None:
    with pytest.raises(InvalidRequestError, match=r"takes (too much memory|more than 5 s) to build"):
        await maker.make(ebnf("grammar", HOSTILE))
    assert (await maker.make(choice("f", ["next"]))).text


async def test_an_endless_check_ends(maker: GrammarMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.grammars.maker.LONGEST_CHECK_S", 0.01)
    with pytest.raises(InvalidRequestError, match="to build: make it simpler"):
        await maker.make(json_schema("f", {"type": "array", "items": {"type": "integer", "multipleOf": 19997}}))


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("", 1),
        ('"multipleOf": 0.01', 1),
        ('"multipleOf":6, "multipleOf" : 10', 30),
        ('"multipleOf":100,"multipleOf":0.5', 1000),
    ],
)
def test_multiples_cost_their_remainders(text: str, cost: int) -> None:
    assert forms.cost_of_multiples(text) == cost
