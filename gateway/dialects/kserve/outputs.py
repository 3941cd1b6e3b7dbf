"""An answer as tensors: text, finish reason, logprobs and counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from common.messages import TokenLogprobs
from gateway.answers.answer import Answer
from gateway.answers.choice import Piece
from gateway.answers.tokenizer import ChatTokenizer
from gateway.dialects.kserve.tensors import Tensor
from gateway.dialects.kserve.wish import FINISH, LOGPROBS, OUTPUTS, SUM, TEXT_OUTPUT, Wish
from gateway.dialects.openai.framing import MIN_LOGPROB
from gateway.http.problem import Json

VERSION = "1"  # a model has one
NOTHING = Piece(text="")


def head(answer: Answer, request_id: str | None) -> Json:
    """Fields of every response of an answer."""
    named = {"model_name": answer.model, "model_version": VERSION}
    return named if request_id is None else {"id": request_id} | named


class Outputs:
    """The tensors of one answer, piece by piece or whole: an element for each choice."""

    def __init__(self, wish: Wish, answer: Answer, *, includes_input: bool = False) -> None:
        self._wish = wish
        self._answer = answer
        self._before = str(wish.text.prompts[0]) if includes_input else ""
        self._sums = [0.0] * len(answer.choices)

    def of(self, pieces: Mapping[int, Piece]) -> list[Tensor]:
        """Return the tensors of pieces, by choice; other choices add nothing."""
        for index, piece in pieces.items():
            self._sums[index] += sum(entry.logprob for entry in piece.logprobs)
        return [
            Tensor(name, OUTPUTS[name], self._values(name, [pieces.get(i, NOTHING) for i in range(len(self._sums))]))
            for name in self._wish.outputs
        ]

    def _values(self, name: str, pieces: list[Piece]) -> list[Any]:
        answer = self._answer
        if name == TEXT_OUTPUT:
            return [f"{self._before}{piece.text}" for piece in pieces]
        if name == FINISH:
            return [str(piece.finish or None) for piece in pieces]
        if name == SUM:
            return [max(logprob, MIN_LOGPROB) for logprob in self._sums]
        if name == LOGPROBS:
            return [_logprobs(answer.tokenizer, piece) for piece in pieces]
        if name == "num_input_tokens":
            return [len(answer.prompts[0])]
        return [len(piece.token_ids) for piece in pieces]


def _logprobs(tokenizer: ChatTokenizer, piece: Piece) -> str:
    """Logprobs in vLLM's form, as JSON: for each token the likeliest ones and itself, by id."""

    def one(token_id: int, logprob: float, rank: int | None) -> Json:
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    def entry(token_id: int, scores: TokenLogprobs) -> Json:
        tops = enumerate(zip(scores.top_ids, scores.top_logprobs, strict=True), 1)
        likely = {str(other): one(other, logprob, rank) for rank, (other, logprob) in tops}
        return {str(token_id): one(token_id, scores.logprob, None)} | likely

    told = [entry(token_id, scores) for token_id, scores in zip(piece.token_ids, piece.logprobs, strict=False)]
    return msgspec.json.encode(told).decode()


def as_fields(tensors: list[Tensor]) -> Json:
    """Outputs as fields of Triton's generate: by name, a value or a list of several."""
    return {one.name: one.values[0] if len(one.values) == 1 else one.values for one in tensors}
