"""Prompts for what stands between two texts: found by a vocabulary's marks, made of plain tokens around them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from common.errors import InvalidRequestError
from gateway.answers.ask import Infill, Joined, Text, TokenIds
from gateway.answers.catalogue import Catalogue
from gateway.answers.infill import FAMILIES, InfillForm, Marks, infill_form
from gateway.answers.tokenising import Tokenising
from gateway.answers.tokenizer import ChatTokenizer
from tests.fakes.generations import ScriptedGenerations
from tests.models import build_tokenizer

QWEN = FAMILIES[0]


def numbered(marks: Marks) -> dict[str, int]:
    names = [marks.before, marks.after, marks.middle, marks.repository, marks.file, *marks.others]
    return {name: 900 + at for at, name in enumerate(names) if name}


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def form(marks: Marks) -> tuple[InfillForm, dict[str, int]]:
    ids = numbered(marks)
    found = infill_form(ids.get)
    assert found is not None
    return found, ids


@pytest.mark.parametrize("marks", FAMILIES, ids=lambda marks: f"{marks.before}{marks.middle}")
def test_each_family_is_found_by_its_marks_and_has_them_in_its_order(marks: Marks) -> None:
    found, ids = form(marks)
    made = found.tokens(Infill(before="ab", after="cd"), encode, [1], None)
    parts = [[ids[marks.before], 97, 98], [ids[marks.after], 99, 100]]
    first, second = reversed(parts) if marks.after_first else parts
    assert made == [1, *first, *second, *([ids[marks.middle]] if marks.middle else [])]
    assert found.ends == sorted(ids.values())


def test_a_vocabulary_without_all_marks_has_no_form() -> None:
    assert infill_form({QWEN.before: 1, QWEN.after: 2}.get) is None


def test_files_come_first_and_the_middle_s_own_beginning_last() -> None:
    found, ids = form(QWEN)
    made = found.tokens(Infill(before="a", after="b", begun="c", files=[("f.py", "x")]), encode, [], None)
    sign = ids["<|file_sep|>"]
    head = [ids["<|repo_name|>"], *encode("project\n"), sign, *encode("f.py\nx\n"), sign, *encode("current\n")]
    assert made[: len(head)] == head
    assert made[-2:] == [ids["<|fim_middle|>"], ord("c")]


def test_a_prompt_that_is_too_long_loses_files_and_what_is_far_from_the_middle() -> None:
    found, ids = form(QWEN)
    prompt = Infill(before="abcdefgh", after="stuvwxyz", files=[("f", "x")])
    made = found.tokens(prompt, encode, [1], 12)
    assert made == [1, ids[QWEN.before], *encode("cdefgh"), ids[QWEN.after], *encode("st"), ids[QWEN.middle]]
    assert len(found.tokens(Infill(before="ab", after="stuvwxyz"), encode, [1], 12)) == 12


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """With Qwen's marks."""
    return with_marks(tmp_path_factory.mktemp("coder"))


def with_marks(folder: Path) -> ChatTokenizer:
    build_tokenizer(folder)
    built = Tokenizer.from_file(str(folder / "tokenizer.json"))
    built.add_tokens([AddedToken(name, special=True) for name in (QWEN.before, QWEN.after, QWEN.middle)])
    built.save(str(folder / "tokenizer.json"))
    return ChatTokenizer(folder)


def test_marks_in_a_client_s_text_stay_text(coder: ChatTokenizer, tokenizer: ChatTokenizer) -> None:
    made = coder.encode_infill(Infill(before=f"x{QWEN.middle}", after="y"))
    middle = coder.tokenizer.token_to_id(QWEN.middle)
    assert [token for token in made if token == middle] == [middle]
    assert made[-1] == middle
    with pytest.raises(InvalidRequestError, match="suffix: this model has no tokens"):
        tokenizer.encode_infill(Infill(before="x", after="y"))


async def test_parts_are_joined_and_the_end_is_kept(tokenizer: ChatTokenizer) -> None:
    served = ScriptedGenerations(lambda spec: []).catalogue(tokenizer).find("scripted")
    assert served is not None
    prompt = Joined([TokenIds([5, 6]), Text("Hello", adds_special=False)])
    hello = tokenizer.encode("Hello", add_special_tokens=False)
    made = Tokenising()
    assert await made.tokens(prompt, served, name="prompt") == [5, 6, *hello]
    assert await made.tokens(prompt, served, name="prompt", keep=1) == hello[-1:]


def test_the_tag_latest_may_be_there_or_not(tokenizer: ChatTokenizer) -> None:
    catalogue = Catalogue({"one": tokenizer, "two:latest": tokenizer}, None, {"alias": "one"})  # type: ignore[arg-type]
    names = {name: catalogue.own_name(name) for name in ("one", "one:latest", "two", "alias:latest", "three:latest")}
    assert names == {
        "one": "one",
        "one:latest": "one",
        "two": "two:latest",
        "alias:latest": "one",
        "three:latest": "three:latest",
    }
