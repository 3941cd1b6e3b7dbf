"""POST /api/generate."""

from __future__ import annotations

from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask, Conversation, Infill, Joined, Prompt, Reply, Text, TokenIds
from gateway.answers.choice import Choice, Piece
from gateway.dialects.dialect import Events
from gateway.dialects.ollama import asking, lines
from gateway.dialects.ollama.bodies import OllamaGenerateRequest
from gateway.http.problem import Json, Problem


class Generate:
    """A prompt in, a text out. Without a prompt the model is loaded: a no-op."""

    body = OllamaGenerateRequest
    operation = "text_completion"
    stream_type = lines.LINES
    is_batchable = False

    def ask(self, body: OllamaGenerateRequest) -> Ask:
        is_message = not (body.raw or body.suffix)
        is_empty = not (body.prompt or body.suffix or body.context)
        return asking.asked(
            body,
            answer_prefix="gen-",
            prompt=_prompt(body),
            prompt_name="prompt",
            reply=Reply(may_think=body.think is not False) if is_message else None,
            instead=_response("", "", []) if is_empty else None,
        )

    def events(self, body: OllamaGenerateRequest, answer: Answer) -> Events:
        return (
            lines.Lines(answer, _response, logprobs=body.logprobs, end=dict) if body.raw else _Remembered(body, answer)
        )

    async def whole(self, body: OllamaGenerateRequest, answer: Answer) -> Json:
        def end(piece: Piece) -> Json:
            return {} if body.raw else {"context": [*answer.prompts[0], *piece.token_ids]}

        return await lines.whole(answer, _response, logprobs=body.logprobs, end=end)

    def describe(self, body: OllamaGenerateRequest) -> Attributes:
        return asking.described(body)


def _prompt(body: OllamaGenerateRequest) -> Prompt:
    if body.suffix:
        return Infill(before=body.prompt, after=body.suffix)
    if body.raw:
        return Text(body.prompt)
    system = [{"role": "system", "content": body.system}] if body.system else []
    turn = Conversation(
        messages=[*system, {"role": "user", "content": body.prompt}],
        variables=body.variables,
        without_template=body.system + body.prompt,
    )
    return Joined([TokenIds(body.context), turn]) if body.context else turn


def _response(text: str, reasoning: str, calls: list[Json]) -> Json:
    return {"response": text} | ({"thinking": reasoning} if reasoning else {})


class _Remembered:
    """Lines whose last one has `context`: the tokens that the next request continues."""

    tell_text_alone = False  # the text's token ids are needed, too

    def __init__(self, body: OllamaGenerateRequest, answer: Answer) -> None:
        self._tokens = list(answer.prompts[0])
        self._lines = lines.Lines(answer, _response, logprobs=body.logprobs, end=lambda: {"context": self._tokens})

    def opening(self) -> bytes:
        return b""

    def text(self, choice: Choice, text: str) -> bytes:
        return self._lines.text(choice, text)

    def event(self, choice: Choice, piece: Piece) -> bytes:
        self._tokens += piece.token_ids
        return self._lines.event(choice, piece)

    def closing(self) -> bytes:
        return self._lines.closing()

    def failed(self, problem: Problem) -> bytes:
        return self._lines.failed(problem)
