"""TGI's stream: an event a token; the last one has the whole text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.messages import TokenLogprobs
from gateway.answers.answer import Answer
from gateway.answers.choice import Choice, Piece
from gateway.dialects.tgi.bodies import TgiParameters
from gateway.dialects.tgi.errors import error_object
from gateway.dialects.tgi.objects import TokenTexts, finish_reason, top_tokens
from gateway.http.problem import Json, Problem
from gateway.http.streaming import event


class TokenEvents:
    """The events of one text. `before`: the prompt, if the whole text begins with it."""

    tell_text_alone = False  # each token has its logprob

    def __init__(self, parameters: TgiParameters, answer: Answer, before: str) -> None:
        self._parameters = parameters
        self._answer = answer
        self._before = before
        self._texts = TokenTexts(answer.tokenizer)
        self._text = ""
        self._index = 0
        self._last_id = 0

    def opening(self) -> bytes:
        return b""

    def text(self, choice: Choice, text: str) -> bytes:
        return self.event(choice, Piece(text=text))

    def event(self, choice: Choice, piece: Piece) -> bytes:
        self._text += piece.text
        told = list(zip(piece.token_ids, piece.logprobs, strict=False))
        if not piece.finish:
            return b"".join([self._event(token_id, entry, self._texts.token) for token_id, entry in told])
        if not told:  # only the end is left: its event repeats the last token
            told = [(self._last_id, TokenLogprobs(logprob=0.0, top_ids=[], top_logprobs=[]))]
        end = {
            "generated_text": self._before + self._text,
            "details": {
                "finish_reason": finish_reason(self._answer.tokenizer, piece.finish, told[-1][0]),
                "generated_tokens": choice.completion_tokens,
                "input_length": len(self._answer.prompts[0]),
                "seed": self._parameters.used_seed,
            },
        }
        whole = partial(self._texts.last_token, text=self._text)
        firsts = [self._event(token_id, entry, self._texts.token) for token_id, entry in told[:-1]]
        return b"".join([*firsts, self._event(*told[-1], whole, end)])

    def closing(self) -> bytes:
        return b""

    def failed(self, problem: Problem) -> bytes:
        return event(error_object(problem))

    def _event(
        self, token_id: int, entry: TokenLogprobs, token: Callable[[int, float], Json], end: Json | None = None
    ) -> bytes:
        self._index += 1
        self._last_id = token_id
        top = {"top_tokens": top_tokens(self._answer.tokenizer, entry)} if self._parameters.top_n_tokens else {}
        told = {"index": self._index, "token": token(token_id, entry.logprob)} | top
        return event(told | (end or {"generated_text": None, "details": None}))
