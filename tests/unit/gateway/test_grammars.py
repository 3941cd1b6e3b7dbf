"""Grammars at the gateway: every form becomes text that matches what it should, or a refusal that names the field."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidRequestError
from gateway.grammars import forms
from gateway.grammars.maker import GrammarMaker
from gateway.grammars.wanted import (
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
PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
}
NULL = {"type": "json_schema", "json_schema": {"type": "null"}}
TAGS = [
    {"begin": "<call=a>", "content": {"type": "json_schema", "json_schema": AGE}, "end": "</call>"},
    {"begin": "<|im_start|>b", "content": NULL, "end": "<|endoftext|>"},
]
ANY, ONE = {"type": "any_text"}, {"type": "tag", "begin": "<a>", "content": NULL, "end": "</a>"}
WORD, DIGITS = {"type": "const_string", "value": "so:"}, {"type": "regex", "pattern": r"\d+/?"}


def tagged(kind: str, **fields: Any) -> Wanted:
    return structural_tag("f", {"type": kind} | fields)


def triggered(*triggers: str, tags: Any = TAGS, **fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "tags": tags, "triggers": triggers} | fields


def around(content: Any, end: Any = "</o>") -> dict[str, Any]:
    return {"type": "tag", "begin": "<o>", "content": content, "end": end}


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
    (json_schema("f", AGE), ['{"age":1}', '{"age": 1}'], ['{"age":"1"}', "{}", '{"age":1,"b":2}', '{"age":  1}', '{\n"age":1}']),
    (json_schema("f", PAIR), ['{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}'], ['{"a":1 ,"b":[]}', '{"a":1,"b":[1,  2]}']),
    (json_schema("f", AGE, whitespace=Whitespace(pattern=r"[ \n]{1,4}")), ['{"age":1}', '{\n  "age": 1\n}'], ['{"age":     1}']),
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
]  # fmt: skip
TAG_CASES: list[tuple[Wanted, list[str], list[str]]] = [
    (
        structural_tag("f", triggered("<call", "<|im_start|>")),
        ["no call", 'so <call=a>{"age":1}</call> then <|im_start|>bnull<|endoftext|>!'],
        ["<call=b>", '<call=a>{"age":', "<|im_start|>x"],
    ),
    (
        structural_tag("f", triggered("<call", "<|im_start|>", at_least_one=True)),
        ['<call=a>{"age":1}</call>', '<|im_start|>bnull<|endoftext|> and <call=a>{"age":1}</call>!'],
        ["", "no call", 'so <call=a>{"age":1}</call>'],
    ),
    (
        structural_tag("f", triggered("<call", "<|im_start|>", stop_after_first=True)),
        ["none", 'so <call=a>{"age":1}</call>'],
        ['<call=a>{"age":1}</call>!', '<call=a>{"age":1}</call><call=a>{"age":1}</call>'],
    ),
    (
        structural_tag("f", triggered("<call", "<|im_start|>", stop_after_first=True, at_least_one=True)),
        ['<call=a>{"age":1}</call>'],
        ["", 'so <call=a>{"age":1}</call>', '<call=a>{"age":1}</call>!'],
    ),
    (
        structural_tag("f", triggered("<a", tags=[ONE], excludes=["bad", "<b/"])),
        ["good <b>", "x<a>null</a>y"],
        ["a bad one", "x<b/>", "<a>null</a>bad", "bad<a>null</a>"],
    ),
    (tagged("const_string", value='a"<|im_start|>b'), ['a"<|im_start|>b'], ["a", 'a"b']),
    (tagged("json_schema", json_schema=AGE), ['{"age": 1}'], ["{}", '{"age":  1}', '{\n"age":1}']),
    (
        structural_tag("f", {"type": "json_schema", "json_schema": AGE}, whitespace=Whitespace(pattern=r"\n")),
        ['{\n"age":1}'],
        ['{"age": 1}'],
    ),
    (tagged("regex", pattern="a+|b/"), ["aa", "b/"], ["ab/"]),
    (tagged("grammar", grammar='root ::= "x" [0-9]'), ["x1"], ["x"]),
    (tagged("any_text"), ["", "any\ntext"], ["<|im_start|>"]),
    (tagged("any_text", excludes=["no", "a.b"]), ["yes axb"], ["I know", "a.b"]),
    (tagged("sequence", elements=[WORD, DIGITS, NULL]), ["so:12/null", "so:1null"], ["so:null", "12/null", "so:12/"]),
    (
        tagged("sequence", elements=[around(ANY), triggered("<a", tags=[ONE])]),
        ["<o>x</o>y<a>null</a>z", "<o></o>"],
        ["", "<o>x", "<o></o><a>1"],
    ),
    (tagged("or", elements=[WORD, DIGITS, around(ANY)]), ["so:", "7", "<o>x<o></o>"], ["so:7", "<o>x</o>y"]),
    (structural_tag("f", around(ANY)), ["<o>a\n<b></o>"], ["<o>a</o>b</o>", "a</o>"]),
    (
        structural_tag("f", around(ANY, ["</o>", "<|im_start|>"])),
        ["<o>a</o>", "<o>a<|im_start|>"],
        ["<o>a", "<o>a<|endoftext|>"],
    ),
    (
        structural_tag("f", around({"type": "or", "elements": [WORD, ANY]}, "; <|im_start|>!")),
        ["<o>so:; <|im_start|>!", "<o>x; <|im_start|>!"],
        ["<o>so:"],
    ),
    (
        structural_tag("f", around(triggered("<a", tags=[ONE, around(ONE) | {"begin": "<a2>"}]))),
        ["<o>x<a>null</a>y</o>", "<o></o>", "<o>x<a2><a>null</a></o></o>"],
        ["<o>x<a>1</a></o>", "<o>x</o>y", "<o>x<a>null</a>"],
    ),
    (
        tagged("tags_with_separator", tags=[ONE, around(DIGITS)], separator=", "),
        ["", "<a>null</a>", "<o>7</o>, <a>null</a>, <o>7</o>"],
        ["<a>null</a>, ", "x"],
    ),
    (
        tagged("tags_with_separator", tags=[ONE], separator="", at_least_one=True),
        ["<a>null</a><a>null</a>"],
        ["", "<a>null</a>,"],
    ),
    (
        tagged("tags_with_separator", tags=[ONE], separator=",", stop_after_first=True),
        ["", "<a>null</a>"],
        ["<a>null</a>,<a>null</a>"],
    ),
    (
        structural_tag("f", around({"type": "tags_with_separator", "tags": [ONE], "separator": ","})),
        ["<o></o>", "<o><a>null</a></o>"],
        ["<o>", "<o><a>null</a>"],
    ),
]


@pytest.mark.parametrize(("wanted", "right", "wrong"), [*CASES, *TAG_CASES])
async def test_each_form_matches_what_it_says(
    wanted: Wanted, right: list[str], wrong: list[str], maker: GrammarMaker, text: str
) -> None:
    tokenizer = LLTokenizer(text, n_vocab=VOCAB_SIZE, eos_token=2)
    grammar = await maker.make(wanted, "t")
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
        (
            structural_tag("f", triggered("<call")),
            "f: format.tags[1]: begin '<|im_start|>b' starts with none of the triggers",
        ),
        (structural_tag("f", triggered()), "f: format: must have 1 to 256 tags and as many triggers"),
        (structural_tag("f", []), "f: format: type must be one of const_string, json_schema, regex"),
        (tagged("or", elements=[WORD, {"type": "qwen_xml_parameter"}]), "f: format.elements[1]: type must be one of"),
        (tagged("or", elements=[{"type": "token"}]), "tags_with_separator, not token"),
        (tagged("sequence", elements=[ANY, WORD]), "f: format.elements[0]: free text may only come last"),
        (
            tagged("sequence", elements=[triggered("<", tags=[ONE]), WORD]),
            "f: format.elements[0]: free text may only come last",
        ),
        (
            tagged("tags_with_separator", tags=[around(ANY, "")], separator=","),
            "format.tags[0].content: free text may only",
        ),
        (tagged("tags_with_separator", tags=[ANY], separator=","), "format.tags[0]: must be a tag"),
        (tagged("tag", begin=1, content=ANY, end=""), "f: format: begin must be a string"),
        (tagged("tag", begin="", content=ANY, end=[1]), "f: format: end must be a list of strings"),
        (tagged("tag", begin="", end="x"), "f: format.content: type must be one of"),
        (tagged("regex", pattern="["), "unclosed character class"),
        (tagged("json_schema", json_schema={"type": "strng"}), "Invalid type: strng"),
        (tagged("json_schema", json_schema=AGE, style="qwen_xml"), "json_schema must be an object, and style json"),
        (tagged("or", elements=[WORD] * 300), "elements must be a list of at most 256"),
        (tagged("const_string", value="x" * 70_000), "f: is too large"),
        (structural_tag("f", functools.reduce(lambda inner, _: around(inner), range(700), WORD)), "is too deep"),
    ],
)
async def test_what_can_not_be_followed_is_refused_in_the_librarys_words(
    wanted: Wanted, words: str, maker: GrammarMaker
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await maker.make(wanted, "t")
    assert words in refused.value.message
    assert refused.value.param == wanted.field


HOSTILE = "start: A\nA: " + " & ".join(
    f"/(.*b{index}.*)/" for index in range(300)
)  # 8 GB, and then the end of the process


async def test_a_hostile_grammar_costs_its_child_alone(maker: GrammarMaker) -> None:
    with pytest.raises(InvalidRequestError, match=r"takes (too much memory|more than 5 s) to build"):
        await maker.make(ebnf("grammar", HOSTILE), "t")
    assert (await maker.make(choice("f", ["next"]), "t")).text


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
