"""instructor: its modes."""

from __future__ import annotations

import instructor
import openai
from cases import BASE_URL, MODEL, PERSON, case, run
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def extracted(mode: instructor.Mode) -> Person:
    client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": PERSON}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, response_model=Person, temperature=0, max_retries=0
    )


@case("tools (its default)")
def tools() -> None:
    assert isinstance(extracted(instructor.Mode.TOOLS), Person)


@case("tools, strict")
def strict() -> None:
    assert isinstance(extracted(instructor.Mode.TOOLS_STRICT), Person)


@case("json_schema")
def schema() -> None:
    assert isinstance(extracted(instructor.Mode.JSON_SCHEMA), Person)


@case("json")
def json_mode() -> None:
    assert isinstance(extracted(instructor.Mode.JSON), Person)


run()
