"""One choice of an answer: token events in, text out, until it stops."""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import UnavailableError
from common.messages import PromptLogprobs, SamplingParams, TokenLogprobs
from common.words import Finish
from gateway.answers.ask import TextRules
from gateway.answers.detokenizer import Detokenizer
from gateway.answers.stop import StopMatcher
from gateway.answers.tokenizer import ChatTokenizer
from gateway.request.spec import Generation, TokenEvent
from gateway.request.timeline import STOP_STRING


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """How likely a choice's prompt was, token by token: nothing is known of the first one."""

    choice: int
    token_ids: Sequence[int]
    logprobs: PromptLogprobs

    def entries(self) -> Iterator[tuple[int, int, TokenLogprobs]]:
        """Each token from the second on, its rank (1: none was likelier) and its logprobs."""
        scores = self.logprobs
        width = len(scores.top_ids) // 4 // max(1, scores.count)
        values, ranks = _unpacked("f", scores.logprobs), _unpacked("I", scores.ranks)
        ids, tops = _unpacked("I", scores.top_ids), _unpacked("f", scores.top_logprobs)
        for at, token_id in enumerate(self.token_ids[1:]):
            row = slice(at * width, (at + 1) * width)
            yield (
                token_id,
                ranks[at],
                TokenLogprobs(logprob=values[at], top_ids=list(ids[row]), top_logprobs=list(tops[row])),
            )


def _unpacked(kind: str, packed: bytes) -> tuple[Any, ...]:
    return struct.unpack(f"<{len(packed) // 4}{kind}", packed)


@dataclass(slots=True, kw_only=True)
class Piece:
    """What one event adds to a choice."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish = Finish.NONE
    offset: int = 0  # characters before these tokens, for logprobs
    prompt: ScoredPrompt | None = None  # with the first piece, if its logprobs were asked for


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
        scored_prompt: Sequence[int] | None = None,  # if its logprobs are wanted
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
        self._scored_prompt = scored_prompt
        self._is_wanted = rules.is_wanted

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield pieces; the last one has `finish`. A stop string cancels the rest on the workers."""
        async for event in self.generation:
            if event.cached_tokens >= 0:
                self.cached_tokens = event.cached_tokens
            piece = Piece(text="", offset=self._offset, prompt=self._scores(event))
            if not self._is_wanted:
                self.finish = piece.finish = Finish.LENGTH
                yield piece
                return
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

    def _scores(self, event: TokenEvent) -> ScoredPrompt | None:
        """The first event's logprobs of the prompt."""
        if self._scored_prompt is None or event.position:
            return None
        scores = event.prompt_logprobs or PromptLogprobs(logprobs=b"", ranks=b"", top_ids=b"", top_logprobs=b"")
        if scores.count != len(self._scored_prompt) - 1:
            raise UnavailableError("a worker of an older release can't tell a prompt's logprobs: upgrade all workers")
        return ScoredPrompt(choice=self.index, token_ids=self._scored_prompt, logprobs=scores)

    def _add(self, piece: Piece, token_id: int, *, stops_here: bool) -> None:
        self.completion_tokens += 1
        piece.token_ids.append(token_id)
        if stops_here and token_id in self._stop_token_ids:
            return  # a stop token is not part of the text
        text = self._detokenizer.push([token_id])
        piece.text += text if self.completion_tokens <= self._min_tokens else self._stop.push(text)
