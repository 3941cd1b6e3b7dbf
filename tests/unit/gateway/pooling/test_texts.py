"""Texts as tokens: pairs, what is cut, and what every text gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.blocks import unpack_tokens
from common.errors import InvalidRequestError
from gateway.http.problem import ContextLengthError
from gateway.pooling.texts import Fitting, PooledText, TextTokenizer
from tests.late_models import DOCUMENT, MASK, QUERY, build_colbert, build_pylate
from tests.pooling_models import VOCAB, build_word_tokenizer

CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 8,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
CLS, SEP = 2, 3
THE, CAT, DOG, SAT = (VOCAB.index(word) for word in ("the", "cat", "dog", "sat"))


def tokenizer(folder: Path, **config: Any) -> TextTokenizer:
    build_word_tokenizer(folder, longest=64)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return TextTokenizer.read(folder)


async def ids(one: TextTokenizer, *given: PooledText, most: int = 64, **fitting: Any) -> list[list[int]]:
    found = await one.texts(given, Fitting(**fitting), longest=most, name="input")
    return [unpack_tokens(each.packed) for each in found.inputs]


async def test_texts_pairs_and_tokens_keep_their_order(tmp_path: Path) -> None:
    one = tokenizer(tmp_path)
    found = await one.texts(["The cat", ("cat", "dog sat"), [7, 8]], Fitting(), longest=64, name="input")
    assert [unpack_tokens(each.packed) for each in found.inputs] == [
        [CLS, THE, CAT, SEP],
        [CLS, CAT, SEP, DOG, SAT, SEP],
        [7, 8],
    ]
    assert [each.second for each in found.inputs] == [0, 3, 0]
    assert found.tokens == 12


async def test_a_long_text_loses_an_end_and_keeps_what_every_text_gets(tmp_path: Path) -> None:
    one = tokenizer(tmp_path)
    assert await _cut(one, "the cat sat", 4) == [CLS, THE, CAT, SEP]
    assert await _cut(one, "the cat sat", 4, from_left=True) == [CLS, CAT, SAT, SEP]
    assert await _cut(one, ("the cat", "dog sat"), 6) == [CLS, THE, CAT, SEP, DOG, SEP]
    assert await _cut(one, [5, 6, 7], 2, from_left=True) == [6, 7]


async def test_documents_are_cut_and_queries_kept_whole(tmp_path: Path) -> None:
    one = tokenizer(tmp_path)
    given = (("the cat sat", "the dog sat"), "cat  dog sat", "dog")
    assert await ids(one, *given, document=2) == [
        [CLS, THE, CAT, SAT, SEP, THE, DOG, SEP],
        [CLS, CAT, DOG, SEP],
        [CLS, DOG, SEP],
    ]
    assert await ids(one, *given[:2], document=2, from_left=True) == [
        [CLS, THE, CAT, SAT, SEP, DOG, SAT, SEP],
        [CLS, DOG, SAT, SEP],
    ]
    assert await ids(one, "cat dog", document=1, prompt="the ") == [[CLS, THE, CAT, SEP]]
    both = await one.texts([("cat", "dog sat the")], Fitting(longest=-1, document=2), longest=5, name="documents")
    assert unpack_tokens(both.inputs[0].packed) == [CLS, CAT, SEP, DOG, SEP]


async def _cut(one: TextTokenizer, text: PooledText, most: int, *, from_left: bool = False) -> list[int]:
    found = await one.texts([text], Fitting(longest=most, from_left=from_left), longest=64, name="input")
    return unpack_tokens(found.inputs[0].packed)


async def test_what_is_too_long_or_unknown_is_named(tmp_path: Path) -> None:
    one = tokenizer(tmp_path)
    with pytest.raises(ContextLengthError, match="input 1 has 5"):
        await ids(one, "cat", "the cat sat", most=4)
    with pytest.raises(InvalidRequestError, match="not below 100"):
        await ids(one, [100])


async def test_a_prompt_stands_before_each_text_and_may_be_left_out_of_the_vector(tmp_path: Path) -> None:
    one = tokenizer(tmp_path)
    assert await ids(one, "cat", prompt="the ") == [[CLS, THE, CAT, SEP]]
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}])
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean", "include_prompt": False}))
    found = await TextTokenizer.read(tmp_path).texts(["cat"], Fitting(prompt="the "), longest=64, name="input")
    assert found.skipped == 2, "what every text begins with, and the prompt"


@pytest.mark.parametrize(
    ("around", "skipped"), [(["[CLS]", "$A", "[SEP]"], 2), (["$A", "[SEP]"], 1), (["[CLS]", "$A"], 2), (["$A"], 1)]
)
async def test_what_is_left_out_of_the_vector_ends_before_what_every_text_gets_behind_it(
    around: list[str], skipped: int, tmp_path: Path
) -> None:
    tokenizer(tmp_path)
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    specials = {name: {"id": name, "ids": [at], "tokens": [name]} for name, at in (("[CLS]", CLS), ("[SEP]", SEP))}
    whole = [
        {"Sequence": {"id": "A", "type_id": 0}} if one == "$A" else {"SpecialToken": {"id": one, "type_id": 0}}
        for one in around
    ]
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    written["post_processor"] = {
        "type": "TemplateProcessing",
        "single": whole,
        "pair": pair,
        "special_tokens": specials,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}])
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean", "include_prompt": False}))
    found = await TextTokenizer.read(tmp_path).texts(["cat"], Fitting(prompt="the "), longest=64, name="input")
    assert found.skipped == skipped


@pytest.mark.parametrize(("eos", "end"), [("[MASK]", [4]), ({"content": "[SEP]"}, [])])
async def test_the_end_that_the_configuration_asks_for_is_added_once(eos: Any, end: list[int], tmp_path: Path) -> None:
    one = tokenizer(tmp_path, add_eos_token=True, eos_token=eos)
    assert await ids(one, "cat") == [[CLS, CAT, SEP, *end]]
    assert (await _cut(one, "the cat sat", 4))[-1:] == (end or [SEP])
    assert len(await _cut(one, "the cat sat", 4)) == 4


async def test_queries_and_documents_of_colbert_are_marked_and_queries_padded(tmp_path: Path) -> None:
    one = TextTokenizer.read(build_colbert(tmp_path))
    padded = [CLS, QUERY, THE, CAT, SEP, *[MASK] * 7]
    assert await ids(one, "the cat", side="query") == [padded]
    assert await ids(one, "the cat", side="query", most=8) == [padded[:8]]
    assert await ids(one, "the cat", side="document") == [[CLS, DOCUMENT, THE, CAT, SEP]]
    assert await ids(one, "the cat", [7, 8]) == [[CLS, THE, CAT, SEP], [7, 8]]
    found = await one.texts(
        [("the cat", "dog"), ("the cat", "dog sat")], Fitting(sides_are_apart=True), longest=16, name="documents"
    )
    assert [unpack_tokens(each.packed)[: each.second] for each in found.inputs] == [padded, padded]
    assert unpack_tokens(found.inputs[1].packed)[12:] == [CLS, DOCUMENT, DOG, SAT, SEP]


async def test_sides_of_colbert_are_cut_to_their_own_lengths_and_named_where_they_are_too_long(tmp_path: Path) -> None:
    one = TextTokenizer.read(build_colbert(tmp_path))
    long = "cat " * 30
    [whole] = await ids(one, long, side="query")
    [query] = await ids(one, long, side="query", longest=-1, most=64)
    [document] = await ids(one, long, side="document", longest=-1, most=64)
    assert (len(whole), len(query), len(document)) == (33, 12, 20)
    assert query == [CLS, QUERY, *[CAT] * 9, SEP]
    pairs = Fitting(sides_are_apart=True)
    with pytest.raises(ContextLengthError, match="documents 1 has 33"):
        await one.texts([("cat", "dog"), ("cat", long)], pairs, longest=32, name="documents")


async def test_a_prompt_of_pylate_stands_behind_the_marker(tmp_path: Path) -> None:
    folder = build_pylate(tmp_path, "BertModel", prompts={"query": "the "}, do_query_expansion=False)
    one = TextTokenizer.read(folder)
    assert await ids(one, "cat", side="query", prompt="the ") == [[CLS, QUERY, THE, CAT, SEP]]
    pairs = await one.texts([("cat", "dog")], Fitting(sides_are_apart=True), longest=64, name="documents")
    assert unpack_tokens(pairs.inputs[0].packed) == [CLS, QUERY, THE, CAT, SEP, CLS, DOCUMENT, DOG, SEP]
