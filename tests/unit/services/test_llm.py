"""The class `LLM` and its child process: what can't be sent is named, and no answer is taken for another's."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import baton
from baton import LLM, BatonError

# Answers as the engine's process does, and what its ears make of a text.
CHILD = """
    import json, os, sys
    print(json.dumps({"ready": {"model": "m", "max_model_len": 8, "max_line": 4096}}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = asked["body"]["prompt"]
        if prompt == "end":
            print(json.dumps({"error": "the card is gone"}), flush=True)
            sys.exit(2)
        choice = {"index": 0, "text": f"re {prompt}", "finish_reason": "stop"}
        body = {"id": "x", "choices": [choice], "usage": {}}
        print(json.dumps({"id": asked["id"], "status": 200, "body": body}), flush=True)
"""


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    package = tmp_path / "services" / "offline"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setattr(baton, "FOLDER", tmp_path)
    with LLM("m") as llm:
        yield llm


def texts(llm: LLM, *prompts: str, **parameters: Any) -> list[str]:
    return [one.outputs[0].text for one in llm.generate(prompts, parameters, use_tqdm=False)]


@pytest.mark.parametrize(
    ("prompt", "parameters", "says"),
    [
        ("a", {"temperature": float("nan")}, "prompt 1: it and its parameters must be JSON"),
        ("a", {"stop": object()}, "prompt 1: it and its parameters must be JSON"),
        ("a\ud800", {}, "prompt 1: it and its parameters must be JSON: .*surrogates"),
        ("a" * 5000, {}, "prompt 1 has 5[0-9]{3} bytes of JSON: 4096 are possible"),
    ],
)
def test_what_cannot_be_sent_is_named_and_the_next_is_answered(
    llm: LLM, prompt: str, parameters: dict[str, Any], says: str
) -> None:
    with pytest.raises(BatonError, match=says):
        llm.generate(["b", prompt], [{}, parameters], use_tqdm=False)
    assert texts(llm, "c", "d") == ["re c", "re d"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, KeyError])
def test_a_call_that_was_left_leaves_no_answers_to_the_next(
    llm: LLM, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(body: Any, prompt: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(baton, "_output", left)
        with pytest.raises(error):
            texts(llm, *("old" for _ in range(2000)))  # more than its pipes hold
    with pytest.raises(BatonError, match="load the model again"):
        texts(llm, "new")


def test_the_end_of_the_process_is_told_with_its_reason(llm: LLM) -> None:
    with pytest.raises(BatonError, match="after 1 of 3 answers: the card is gone"):
        texts(llm, "a", "end", "b")
    with pytest.raises(BatonError, match="load the model again"):
        texts(llm, "c")


def test_what_is_no_prompt_is_named_with_what_is_needed(llm: LLM) -> None:
    for wrong in (5, None, {"prompt": "a"}, b"a"):
        with pytest.raises(BatonError, match=r"^prompts: a text, its token ids, or a list of such is needed, not "):
            llm.generate(wrong, use_tqdm=False)  # type: ignore[arg-type]
    for wrong in ("Hi", 5, {"role": "user"}):
        with pytest.raises(BatonError, match=r"^messages: a list of messages, or a list of such is needed, not "):
            llm.chat(wrong, use_tqdm=False)  # type: ignore[arg-type]
    assert texts(llm, *(one for one in "ab")) == ["re a", "re b"]
    assert [one.outputs[0].text for one in llm.generate((one for one in "ab"), use_tqdm=False)] == ["re a", "re b"]  # type: ignore[arg-type]
    assert [one.prompt for one in llm.generate([7, 8], use_tqdm=False)] == [[7, 8]]
