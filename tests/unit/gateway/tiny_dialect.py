"""A second dialect, with a little of all that one may have: paths, a key's header, errors, calls, views, a stream of lines."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import StrictBool, StrictStr

from common.messages import SamplingParams
from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask, Sampling, Text
from gateway.answers.choice import Choice, Piece
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked, Dialect, DialectPaths, Events
from gateway.http.api import JSON, ApiPart, fields, get, post
from gateway.http.fields import Count, StrictFields
from gateway.http.problem import Content, Json, Problem
from gateway.tenants.tenants import KeyForm

SAY, SAY_BY_PATH = "/tiny/say", "/tiny/{model}/say"
COUNT = "/tiny/count/{model}"
NAMES, NAME, ALIVE, SHARED = "/tiny/names", "/tiny/names/{model:path}", "/tiny/alive", "/v1/models/{model:path}"
LINES = "application/x-ndjson"
IDLE = b'{"idle":true}\n'
KEY = KeyForm(
    read=lambda headers: headers.get("x-tiny-key", ""),
    hint="`x-tiny-key: KEY`",
    scheme={"type": "apiKey", "in": "header", "name": "x-tiny-key"},
)


class SayRequest(StrictFields):
    """Body of POST /tiny/say."""

    model: StrictStr
    text: StrictStr
    words: Count | None = None
    flowing: StrictBool = False


class Lines:
    """A line a piece, and one for the usage."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def opening(self) -> bytes:
        return b""

    tell_text_alone = True

    def text(self, choice: Choice, text: str) -> bytes:
        return line({"part": text})

    def event(self, choice: Choice, piece: Piece) -> bytes:
        return line({"part": piece.text})

    def closing(self) -> bytes:
        return line({"used": self._answer.usage().completion_tokens})

    def failed(self, problem: Problem) -> bytes:
        return line({"trouble": problem.message})


class Say:
    """A text in, a text out."""

    body = SayRequest
    operation = "say"
    stream_type = LINES
    is_batchable = True

    def ask(self, body: SayRequest) -> Ask:
        return Ask(
            model=body.model,
            answer_prefix="tiny-",
            prompts=[Text(body.text)],
            stream=body.flowing,
            sampling=Sampling(params=SamplingParams(max_tokens=body.words or 0)),
            field_names={"prompt": "text", "max_tokens": "words"},
        )

    def events(self, body: SayRequest, answer: Answer) -> Events:
        return Lines(answer)

    async def whole(self, body: SayRequest, answer: Answer) -> Json:
        return {"said": [piece.text for piece in await answer.whole()]}

    def describe(self, body: SayRequest) -> Attributes:
        return {"tiny.words": body.words or 0}


class CountRequest(StrictFields):
    """Body of POST /tiny/count/{model}."""

    model: StrictStr
    text: StrictStr = ""


class Letters:
    """A text in, how long it is out."""

    body = CountRequest

    async def answer(self, body: CountRequest, answers: Answers, asked: Asked) -> Any:
        if body.text == "quota":
            return Content(body=b"no", media_type="text/tiny", status=202, headers={"x-tiny-quota": asked.tenant.name})
        return [answers.model(body.model).name, len(body.text), asked.query.get("unit", "letters")]


class Forget:
    """Nothing is kept here."""

    body = CountRequest

    async def answer(self, body: CountRequest, answers: Answers, asked: Asked) -> Any:
        answers.find(body.model)


def _names(answers: Answers, asked: Asked) -> Any:
    return {"names": [model.name for model in answers.models()]}


def _name(answers: Answers, asked: Asked) -> Any:
    return answers.model(asked.parameters["model"]).name


def _alive(answers: Answers, asked: Asked) -> Any:
    return None


def _model(answers: Answers, asked: Asked) -> Any:
    if asked.headers["x-tiny"] == "crash":
        raise ZeroDivisionError
    return {"tiny": answers.model(asked.parameters["model"]).name, "asked": asked.headers["x-tiny"]}


def _error(problem: Problem, request_id: str) -> tuple[int, Json]:
    status = 529 if problem.status == 429 else problem.status
    return status, {"trouble": problem.message, "field": problem.param, "id": request_id}


def line(value: Json) -> bytes:
    return msgspec.json.encode(value) + b"\n"


TINY = Dialect(
    name="tiny",
    key=KEY,
    paths=DialectPaths(
        endpoints={SAY: Say(), SAY_BY_PATH: Say()},
        calls={COUNT: Letters()},
        deletes={COUNT: Forget()},
        views={NAMES: _names, NAME: _name, ALIVE: _alive, SHARED: _model},
        open_paths=(ALIVE,),
        prefixes=("/tiny",),
    ),
    recognises=lambda headers: "x-tiny" in headers,
    id_header="x-tiny-id",
    idle_event=IDLE,
    error=_error,
    api=ApiPart(
        paths={
            SAY: {"post": post(SayRequest, fields({"said": {"type": "array"}}), stream_type=LINES)},
            SAY_BY_PATH: {"post": post(SayRequest, fields({"said": {"type": "array"}}), stream_type=LINES)},
            COUNT: {"post": post(CountRequest, {"type": "array", "items": {}}), "delete": post(CountRequest, {})},
            NAMES: {"get": get(NAMES, "Names.", JSON)},
            "/v1/models/{model}": {"get": get("/v1/models/{model}", "A name.", JSON, answer=fields({"tiny": {}}))},
        },
        bodies=(SayRequest, CountRequest),
    ),
)
