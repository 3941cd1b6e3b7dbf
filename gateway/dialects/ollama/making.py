"""Ollama's changes of models: pull, create, copy, delete. All but the pull of a served model need an admin key."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StrictBool, StrictStr, model_validator

from common.errors import InvalidRequestError, ServingError
from gateway.answers.catalogue import LATEST, of_hub
from gateway.answers.changes import MadeAliases, ModelFiles
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked
from gateway.dialects.foreign import Foreign, as_ours, ignored, refused
from gateway.dialects.local_sampling import SAMPLING
from gateway.dialects.ollama.lines import LINES, line
from gateway.dialects.ollama.options import OllamaOptions
from gateway.dialects.ollama.verbs import NAME, NamedModel
from gateway.http.fields import StrictFields
from gateway.http.problem import ConflictError, Content, Json, ModelNotFoundError, UnauthorizedError, problem_of
from gateway.http.streaming import ByteStream
from gateway.tenants.shares import Preset
from gateway.tenants.tenants import BEARER, needed

audit = logging.getLogger("baton.audit")

DONE = {"status": "success"}
MAX_MESSAGES = 64
OFFER_S, LOOK_EACH_S = 10.0, 0.05
NOT_OFFERED = "no host offers {name} yet: their logs say why (host.model_refused), or they have another cache"
NO_FILES = "this gateway keeps no models' files: `baton pull` fetches them on the machine of the workers"
NO_ALIASES = "this gateway can't keep names: it has no NATS with a disk"


class PullRequest(NamedModel):
    """Body of POST /api/pull."""

    foreign: ClassVar[Mapping[str, Foreign]] = {
        **NAME,
        **ignored("HF_TOKEN and HF_ENDPOINT of the gateway hold", "insecure", "username", "password"),
    }

    stream: StrictBool = True


class KeptMessage(StrictFields):
    """A message that every conversation with the model begins with."""

    role: Literal["system", "user", "assistant"]
    content: StrictStr


class CreateRequest(NamedModel):
    """Body of POST /api/create."""

    foreign: ClassVar[Mapping[str, Foreign]] = {
        **NAME,
        **as_ours("source", "from", schema={"type": "string"}),
        **refused("give `from` a served model: weights come by /api/pull or `baton pull`", "files"),
        **refused("adapters are not served", "adapters"),
        **refused("templates are Jinja here, and the gateway's: --chat-template MODEL=FILE", "template"),
        **refused("weights are quantised when workers load them: --quantization", "quantize", "quantization"),
        **refused("write it as from, system, parameters and messages", "modelfile", "path"),
        **ignored("it is the model's", "license"),
    }

    source: StrictStr = ""
    system: StrictStr = ""
    parameters: OllamaOptions = Field(default_factory=OllamaOptions)
    messages: Annotated[list[KeptMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    stream: StrictBool = True

    @model_validator(mode="after")
    def _is_from_one(self) -> Self:
        if not self.source:
            raise ValueError("from: is missing: name the served model that it is made of")
        if self.parameters.speculation is not None:
            raise ValueError("parameters.speculation: give it with each request's options")
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        return (*self._ignored, *(f"parameters.{name}" for name in self.parameters.ignored))

    @property
    def preset(self) -> Preset:
        """The defaults of its requests."""
        given, params = self.parameters, self.parameters.sampling(None)
        said = [name for name in SAMPLING.values() if name not in given.left_open]
        return Preset(
            system=self.system,
            messages=[message.model_dump() for message in self.messages],
            sampling={name: getattr(params, name) for name in said},
            stops=given.stop or [],
            seed=given.wanted_seed,
            max_tokens=params.max_tokens,
        )


class CopyRequest(StrictFields):
    """Body of POST /api/copy."""

    source: Annotated[StrictStr, Field(min_length=1)]
    destination: Annotated[StrictStr, Field(min_length=1)]


class Pull:
    """Pulling: a served model is present already; another one is fetched to this gateway's machine."""

    body = PullRequest

    async def answer(self, body: PullRequest, answers: Answers, asked: Asked) -> Any:
        name = of_hub(body.model)
        if body.model in answers.catalogue or _is_served(name, answers):
            return Content(body=line(DONE), media_type=LINES) if body.stream else DONE
        _check_admin(asked)
        steps = _until_served(_files(answers).fetch(name), name, answers)
        first = await anext(steps)  # a name that can't be one has a status of its own
        _audit(asked, "models.pulled", name)
        if body.stream:
            return ByteStream(_lines(first, steps), close=steps.aclose, headers={}, media_type=LINES)
        async for _ in steps:
            pass
        return DONE


class Create:
    """Making a model of a served one: a name with a system message, messages and parameters."""

    body = CreateRequest

    async def answer(self, body: CreateRequest, answers: Answers, asked: Asked) -> Any:
        _check_admin(asked)
        await _aliases(answers).copy(_plain(body.model), answers.find(body.source).asked_as, body.preset)
        _audit(asked, "models.created", body.model, source=body.source)
        return (
            Content(body=line({"status": "writing manifest"}) + line(DONE), media_type=LINES) if body.stream else DONE
        )


class Copy:
    """Another name for a model."""

    body = CopyRequest

    async def answer(self, body: CopyRequest, answers: Answers, asked: Asked) -> Any:
        _check_admin(asked)
        source = answers.catalogue.pooled_name(body.source) or answers.find(body.source).asked_as
        await _aliases(answers).copy(_plain(body.destination), source)
        _audit(asked, "models.copied", body.destination, source=body.source)


class Delete:
    """Dropping a name that was made, or the files of a model that nobody serves."""

    body = NamedModel

    async def answer(self, body: NamedModel, answers: Answers, asked: Asked) -> Any:
        _check_admin(asked)
        made = answers.changes.aliases
        name = next((each for each in (body.model, _plain(body.model)) if made is not None and each in made), "")
        if made is not None and name:
            await made.drop(name)
        elif (own := _own_name(body.model, answers)) in answers.catalogue.came:
            await _removed(answers, own)
        elif own in answers.catalogue.own_names:
            raise ConflictError(f"{body.model!r} is served: stop its workers first, or unload it with keep_alive 0")
        else:
            await _removed(answers, of_hub(body.model))
        _audit(asked, "models.deleted", body.model)


def _own_name(name: str, answers: Answers) -> str:
    return answers.catalogue.pooled_name(name) or answers.catalogue.own_name(name)


def _is_served(name: str, answers: Answers) -> bool:
    return name in answers.catalogue or bool(answers.catalogue.pooled_name(name))


async def _removed(answers: Answers, name: str) -> None:
    files = answers.changes.files
    if files is None:
        answers.find(name)  # raises
        return
    try:
        await files.remove(name)
    except InvalidRequestError as error:
        if error.code != "not_found":
            raise
        raise ModelNotFoundError(error.message, param="model") from None


async def _until_served(steps: AsyncGenerator[Json, None], name: str, answers: Answers) -> AsyncGenerator[Json, None]:
    """The steps of a download, of which the last one comes when requests may name the model, if hosts load such ones."""
    async with aclosing(steps):
        async for step in steps:
            if step == DONE and answers.catalogue.may_come(name):
                yield {"status": "waiting for a host to offer it"}
                give_up_at = time.monotonic() + OFFER_S
                while not _is_served(name, answers) and time.monotonic() < give_up_at:
                    await asyncio.sleep(LOOK_EACH_S)
                if not _is_served(name, answers):
                    yield {"status": NOT_OFFERED.format(name=name)}
            yield step


async def _lines(first: Json, steps: AsyncGenerator[Json, None]) -> AsyncGenerator[bytes, None]:
    """The steps of a download as lines. An error ends them with one."""
    yield line(first)
    try:
        async for step in steps:
            yield line(step)
    except ServingError as error:
        yield line({"error": problem_of(error).message})


def _check_admin(asked: Asked) -> None:
    """Raises UnauthorizedError."""
    if not asked.tenant.is_admin:
        text = f"{needed('admin key', BEARER)} (OLLAMA_API_KEY sets it; `baton up` keeps its own in .baton/users/admin.key)"
        raise UnauthorizedError(text, challenge=BEARER.challenge)


def _aliases(answers: Answers) -> MadeAliases:
    if answers.changes.aliases is None:
        raise InvalidRequestError(NO_ALIASES)
    return answers.changes.aliases


def _files(answers: Answers) -> ModelFiles:
    if answers.changes.files is None:
        raise InvalidRequestError(NO_FILES)
    return answers.changes.files


def _plain(name: str) -> str:
    return name.removesuffix(LATEST)


def _audit(asked: Asked, event: str, name: str, **what: Any) -> None:
    audit.info(event, extra=what | {"model": name, "by": asked.tenant.key, "request_id": asked.request_id})
