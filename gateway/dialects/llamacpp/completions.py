"""POST /completion and /infill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask, Constraint, ContextFit, DraftWish, Infill, Prompt, Sampling, Terms, TextRules
from gateway.dialects.described import described
from gateway.dialects.dialect import Events
from gateway.dialects.llamacpp.bodies import InfillRequest, LlamaCompletionRequest, LlamaRequest
from gateway.dialects.llamacpp.objects import Chunks, whole
from gateway.http.streaming import EVENTS

Body = TypeVar("Body", bound=LlamaRequest)
BodyIn = TypeVar("BodyIn", bound=LlamaRequest, contravariant=True)


class PromptsOf(Protocol[BodyIn]):
    """The prompts of a body."""

    def __call__(self, body: BodyIn) -> Sequence[Prompt]: ...


class Completion(Generic[Body]):
    """Prompts in, texts out."""

    operation = "text_completion"
    stream_type = EVENTS
    is_batchable = False

    def __init__(self, body: type[Body], prompts: PromptsOf[Body], field: str) -> None:
        """`field`: the client's name of its prompt."""
        self.body = body
        self._prompts = prompts
        self._field = field

    def ask(self, body: Body) -> Ask:
        return Ask(
            model=body.model,
            answer_prefix="cmpl-",
            prompts=self._prompts(body),
            stream=body.stream,
            sampling=Sampling(
                params=body.sampling,
                left_open=body.left_open,
                n=body.n_cmpl,
                seed=body.wanted_seed,
                ignore_eos=body.ignore_eos,
                drafts=DraftWish.of(body.speculation),
            ),
            text=TextRules(stops=body.stop or [], is_wanted=body.is_wanted),
            constraint=Constraint(grammar=body.followed),
            fit=ContextFit(ends_with_context=True),
            terms=Terms(keep=body.keep),
            field_names={"max_tokens": "n_predict", "prompt": self._field},
        )

    def events(self, body: Body, answer: Answer) -> Events:
        return Chunks(body, answer)

    async def whole(self, body: Body, answer: Answer) -> object:
        return await whole(body, answer)

    def describe(self, body: Body) -> Attributes:
        return described(
            model=body.model,
            stream=body.stream,
            choices=body.n_cmpl,
            max_tokens=body.n_predict,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
        )


def _of_completion(body: LlamaCompletionRequest) -> Sequence[Prompt]:
    prompts: Sequence[Prompt] = body.prompt
    return prompts


def _of_infill(body: InfillRequest) -> Sequence[Prompt]:
    files = [(extra.filename, extra.text) for extra in body.input_extra]
    return [
        Infill(before=body.input_prefix, after=body.input_suffix, begun=body.prompt, files=files, field="input_suffix")
    ]


COMPLETION = Completion(LlamaCompletionRequest, _of_completion, "prompt")
INFILL = Completion(InfillRequest, _of_infill, "input_prefix")
