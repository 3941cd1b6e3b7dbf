"""llama.cpp's answers: a chunk for each piece, and a final object about each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.messages import TokenLogprobs
from common.words import Finish
from gateway.answers.answer import Answer
from gateway.answers.ask import Text
from gateway.answers.choice import Choice, Piece
from gateway.answers.tokenizer import ChatTokenizer
from gateway.dialects.llamacpp.bodies import LlamaRequest
from gateway.dialects.local_sampling import SAMPLING
from gateway.dialects.openai.framing import MIN_LOGPROB
from gateway.dialects.timings import timings_object
from gateway.http.problem import Json, Problem
from gateway.http.streaming import event, said

NO_SLOT = -1  # sequences have no fixed slots here
_PLAIN = (
    b'data: {"index":%d,"content":%b,"tokens":[],"stop":false,"id_slot":-1,'
    b'"tokens_predicted":%d,"tokens_evaluated":%d}\n\n'
)
_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class Chunks:
    """Events of a stream; several choices are interleaved by `index`."""

    def __init__(self, body: LlamaRequest, answer: Answer) -> None:
        self._body = body
        self._answer = answer
        self._has_new_line = [False] * len(answer.choices)
        self.tell_text_alone = not (
            body.return_tokens or body.n_probs or body.timings_per_token or body.response_fields
        )

    def opening(self) -> bytes:
        return b""

    def text(self, choice: Choice, text: str) -> bytes:
        if "\n" in text:
            self._has_new_line[choice.index] = True
        return _PLAIN % (choice.index, said(text), choice.completion_tokens, len(_prompt(self._answer, choice)))

    def event(self, choice: Choice, piece: Piece) -> bytes:
        body, answer = self._body, self._answer
        self._has_new_line[choice.index] |= "\n" in piece.text
        told = b""
        if piece.text or (body.return_tokens and piece.token_ids) or (body.n_probs and piece.logprobs):
            chunk = {
                "index": choice.index,
                "content": piece.text,
                "tokens": piece.token_ids if body.return_tokens else [],
                "stop": False,
                "id_slot": NO_SLOT,
                "tokens_predicted": choice.completion_tokens,
                "tokens_evaluated": len(_prompt(answer, choice)),
            }
            told = event(chunk | _probabilities(body, answer, piece) | _timings(body, answer, choice))
        if piece.finish:
            ended = _ended(body, answer, choice, Piece(text="", finish=piece.finish))
            told += event(_of_fields(body, ended | {"has_new_line": self._has_new_line[choice.index]}))
        return told

    def closing(self) -> bytes:
        return b""

    def failed(self, problem: Problem) -> bytes:
        return event(error_object(problem))


async def whole(body: LlamaRequest, answer: Answer) -> Json | list[Json]:
    """An object, or a list of them for several choices."""
    pieces = await answer.whole()
    told = [
        _of_fields(body, _ended(body, answer, choice, piece) | _probabilities(body, answer, piece))
        for choice, piece in zip(answer.choices, pieces, strict=True)
    ]
    return told[0] if len(told) == 1 else told


def error_object(problem: Problem) -> Json:
    """llama.cpp's form of errors."""
    kind = "exceed_context_size_error" if problem.code == "context_length_exceeded" else _KINDS.get(problem.status)
    if kind is None:
        kind = "unavailable_error" if problem.status in (429, 503) else "server_error"
    return {"error": {"code": problem.status, "message": problem.message, "type": kind, "param": problem.param}}


def settings_of(defaults: Mapping[str, Any], body: LlamaRequest | None = None) -> Json:
    """Sampling settings: the body's, else the model's, else plain defaults."""
    chosen = {
        name: given if (given := getattr(body, name, None)) is not None else defaults.get(ours, _OFF.get(name, 0.0))
        for name, ours in SAMPLING.items()
    }
    body = body or LlamaRequest()
    return chosen | {
        "seed": body.wanted_seed if body.wanted_seed is not None else -1,
        "n_predict": body.n_predict if body.n_predict is not None else -1,
        "stop": body.stop or [],
        "ignore_eos": body.ignore_eos,
        "stream": body.stream,
        "n_probs": body.n_probs,
        "grammar": body.grammar,
        "logit_bias": [[token, bias] for token, bias in (body.logit_bias or {}).items()],
        "timings_per_token": body.timings_per_token,
    }


def _ended(body: LlamaRequest, answer: Answer, choice: Choice, piece: Piece) -> Json:
    """The final object of a choice."""
    prompt = _prompt(answer, choice)
    kinds = {Finish.STOP: "eos" if choice.stop_string is None else "word", Finish.LENGTH: "limit"}
    return {
        "index": choice.index,
        "content": piece.text,
        "tokens": piece.token_ids if body.return_tokens else [],
        "id_slot": NO_SLOT,
        "stop": True,
        "model": answer.model,
        "tokens_predicted": choice.completion_tokens,
        "tokens_evaluated": len(prompt),
        "generation_settings": settings_of(answer.tokenizer.defaults, body),
        "prompt": _prompt_text(body, answer, choice),
        "has_new_line": "\n" in piece.text,
        "truncated": False,
        "stop_type": kinds.get(piece.finish, "none"),
        "stopping_word": choice.stop_string or "",
        "tokens_cached": choice.cached_tokens,
        "timings": timings_object(answer, choice),
    }


def _prompt_text(body: LlamaRequest, answer: Answer, choice: Choice) -> str:
    """A prompt as its client wrote it, or decoded. Decoding a long text would block the event loop."""
    asked = getattr(body, "prompt", None)
    prompt = asked[choice.index // answer.choices_per_prompt] if isinstance(asked, list) else None
    return (
        prompt.text
        if isinstance(prompt, Text)
        else answer.tokenizer.decode(_prompt(answer, choice), skip_special_tokens=False)
    )


def _of_fields(body: LlamaRequest, told: Json) -> Json:
    """Return the fields in `response_fields`: `a/b` is b of a, named `b`."""
    if body.response_fields is None:
        return told
    found: Json = {}
    for path in body.response_fields:
        value: Any = told
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path.rpartition("/")[2]] = value
    return found


def _probabilities(body: LlamaRequest, answer: Answer, piece: Piece) -> Json:
    if not body.n_probs:
        return {}
    return {"completion_probabilities": _probable(answer.tokenizer, piece.token_ids, piece.logprobs)}


def _probable(tokenizer: ChatTokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Json]:
    def one(token_id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(token_id)
        return {
            "id": token_id,
            "token": raw.decode("utf-8", "replace"),
            "bytes": list(raw),
            "logprob": max(logprob, MIN_LOGPROB),
        }

    return [
        one(token_id, entry.logprob)
        | {"top_logprobs": [one(other, value) for other, value in zip(entry.top_ids, entry.top_logprobs, strict=True)]}
        for token_id, entry in zip(ids, logprobs, strict=False)
    ]


def _timings(body: LlamaRequest, answer: Answer, choice: Choice) -> Json:
    return {"timings": timings_object(answer, choice)} if body.timings_per_token else {}


def _prompt(answer: Answer, choice: Choice) -> Sequence[int]:
    return answer.prompts[choice.index // answer.choices_per_prompt]
