"""One choice of an answer: token events in, text out, until it stops."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from common.messages import SamplingParams, TokenLogprobs
from common.words import Finish
from gateway.answers.ask import TextRules
from gateway.answers.detokenizer import Detokenizer
from gateway.answers.stop import StopMatcher
from gateway.answers.tokenizer import ChatTokenizer
from gateway.request.spec import Generation
from gateway.request.timeline import STOP_STRING


@dataclass(slots=True, kw_only=True)
class Piece:
    """What one event adds to a choice."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish = Finish.NONE
    offset: int = 0  # characters before these tokens, for logprobs


class Choice:
    """Runs one generation through the detokenizer and the stop strings."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: ChatTokenizer,
        *,
        index: int,
        rules: TextRules,
        sampling: SamplingParams,
    ) -> None:
        self.generation = generation
        self.index = index
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish = Finish.NONE
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=rules.skip_special_tokens)
        self._stop = StopMatcher(rules.stops, include=rules.include_stop)
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._offset = 0

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield pieces; the last one has `finish`. A stop string cancels the rest on the workers."""
        async for event in self.generation:
            if event.cached_tokens >= 0:
                self.cached_tokens = event.cached_tokens
            piece = Piece(text="", offset=self._offset)
            for offset, token_id in enumerate(event.token_ids):
                last = bool(event.finish) and offset == len(event.token_ids) - 1
                self._add(piece, token_id, stops_here=last and event.finish == Finish.STOP)
                if event.logprobs:
                    piece.logprobs.append(event.logprobs[offset])
                    self._offset += len(self._tokenizer.token_text(token_id))
                if self._stop.matched is not None:
                    piece.finish = Finish.STOP
                    break
            if not piece.finish and event.finish:
                piece.text += self._stop.push(self._detokenizer.flush()) + self._stop.flush()
                piece.finish = Finish.STOP if self._stop.matched is not None else event.finish
            self.finish = piece.finish
            yield piece
            if piece.finish:
                if not event.finish:
                    await self.generation.cancel(STOP_STRING)
                return

    def _add(self, piece: Piece, token_id: int, *, stops_here: bool) -> None:
        self.completion_tokens += 1
        piece.token_ids.append(token_id)
        if stops_here and token_id in self._stop_token_ids:
            return  # a stop token is not part of the text
        text = self._detokenizer.push([token_id])
        piece.text += text if self.completion_tokens <= self._min_tokens else self._stop.push(text)
