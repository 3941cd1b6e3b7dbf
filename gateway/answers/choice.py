"""One choice of an answer: token events in, pieces of a message out, until it stops."""

from __future__ import annotations

import re
import struct
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import UnavailableError
from common.messages import PromptLogprobs, SamplingParams, TokenLogprobs
from common.words import Finish
from gateway.answers.ask import Reply, TextRules
from gateway.answers.detokenizer import Detokenizer, StopMatcher
from gateway.answers.tokenizer import ChatTokenizer
from gateway.parsing.parsed import CallDelta, Parsed, join_calls
from gateway.parsing.parser import Parser
from gateway.parsing.terminals import PlainTokens
from gateway.request.spec import Generation, TokenEvent

MAX_TAIL_TOKENS = 256  # at either end of a message
MAX_END_TOKENS = 64  # when no mark in the prompt begins the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """Logprobs of a choice's prompt, token by token: the first one has none."""

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
    """The text that an event adds to a choice. `text` is all of it, or a message's content."""

    text: str
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish = Finish.NONE
    has_calls: bool = False  # set with `finish`: the choice has calls
    offset: int = 0  # characters before these tokens, for logprobs
    prompt: ScoredPrompt | None = None  # with the first piece, if requested

    @property
    def calls_around(self) -> tuple[list[CallDelta], list[CallDelta]]:
        """Pieces of earlier calls, and calls that begin here. Text and reasoning of this piece are between them."""
        begun = next((at for at, call in enumerate(self.calls) if call.name), len(self.calls))
        return self.calls[:begun], self.calls[begun:]

    def add(self, other: Piece) -> None:
        """Append the next piece."""
        joined = Parsed(content=self.text, reasoning=self.reasoning, calls=self.calls)
        joined.add(Parsed(content=other.text, reasoning=other.reasoning, calls=other.calls))
        self.text, self.reasoning, self.calls = joined.content, joined.reasoning, joined.calls
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.finish, self.has_calls = other.finish, other.has_calls
        self.prompt = self.prompt or other.prompt


class MessageReader:
    """The conversion of tokens to a message: detokenizer, and for replies the parser of the model's format."""

    def __init__(self, tokenizer: ChatTokenizer, rules: TextRules, reply: Reply | None, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=rules.skip_special_tokens)
        self._shows_special = not rules.skip_special_tokens
        self._shows_reasoning = reply is None or reply.shows_reasoning
        self._parser = None if reply is None else _parser(tokenizer, reply)
        self.reasoning_tokens = 0
        if self._parser is not None:
            self._parser.read_prompt()
            for token_id in _tail(tokenizer, prompt) or _opened(tokenizer, prompt):
                self._parse(self._parser, token_id)
            self._parser.text(self._detokenizer.flush())
            self._parser.resume()

    @property
    def withheld(self) -> str:
        """Whitespace after content that is not sent yet: the following text decides if it belongs to it."""
        return "" if self._parser is None else self._parser.withheld

    @property
    def is_reasoning(self) -> bool:
        return self._parser is not None and self._parser.is_reasoning

    @property
    def has_reasoned(self) -> bool:
        """True if a block of reasoning was opened, even if it has ended."""
        return self._parser is not None and self._parser.has_reasoned

    @property
    def has_calls(self) -> bool:
        return self._parser is not None and self._parser.has_calls

    @property
    def plain(self) -> PlainTokens | None:
        """Tokens that only add text; None: every token must be pushed."""
        parser = self._parser
        if not self._detokenizer.is_clear:
            return None
        if parser is None:
            return self._tokenizer.plain(None)
        terminals = parser.plainly
        if terminals is None or (parser.is_reasoning and not self._shows_reasoning):
            return None
        return self._tokenizer.plain(terminals)

    def push(self, token_id: int) -> Parsed:
        parser = self._parser
        if parser is None:
            return Parsed(content=self._detokenizer.add(token_id))
        was_reasoning = parser.is_reasoning
        self._parse(parser, token_id)
        self.reasoning_tokens += was_reasoning or parser.is_reasoning
        return self._taken(parser)

    def finish(self, *, is_whole: bool) -> Parsed:
        rest = self._detokenizer.flush()
        if self._parser is None:
            return Parsed(content=rest)
        self._parser.text(rest)
        self._parser.finish(is_whole=is_whole)
        return self._taken(self._parser)

    def _parse(self, parser: Parser, token_id: int) -> None:
        if token_id not in parser.ids:
            parser.text(self._detokenizer.add(token_id))
            return
        parser.text(self._detokenizer.flush())
        is_shown = self._shows_special or token_id not in self._tokenizer.special_ids
        parser.token(token_id, self._tokenizer.added[token_id], is_shown=is_shown)

    def _taken(self, parser: Parser) -> Parsed:
        new = parser.take()
        if not self._shows_reasoning:
            new.reasoning = ""
        return new


def _parser(tokenizer: ChatTokenizer, reply: Reply) -> Parser:
    tools = reply.tools
    schemas = {tool.name: tool.parameters for tool in tools.tools} if tools.tools else None
    return Parser(tokenizer.format, schemas, parallel=tools.parallel)


def _tail(tokenizer: ChatTokenizer, prompt: Sequence[int]) -> Sequence[int]:
    """The end of the prompt that belongs to the answer's message: templates may open its reasoning."""
    known, turn = tokenizer.format.ids, tokenizer.format.turn
    for index in range(len(prompt) - 1, -1, -1):
        token = prompt[index]
        if token == turn:
            return _shortened(prompt[index:], known)
        if token in tokenizer.added and token not in known:
            return () if token in tokenizer.borders else _shortened(prompt[index + 1 :], known)
    return ()


def _shortened(tail: Sequence[int], known: Container[int]) -> Sequence[int]:
    """A shortened long message to be continued: beginning, end, and the marks between."""
    if len(tail) <= 2 * MAX_TAIL_TOKENS:
        return tail
    between = [token for token in tail[MAX_TAIL_TOKENS:-MAX_TAIL_TOKENS] if token in known]
    return [*tail[:MAX_TAIL_TOKENS], *between[-MAX_TAIL_TOKENS:], *tail[-MAX_TAIL_TOKENS:]]


def _opened(tokenizer: ChatTokenizer, prompt: Sequence[int]) -> Sequence[int]:
    """The reasoning state at the answer's start. Without a mark there, users' own words may precede: the last mark counts."""
    format_ = tokenizer.format.format
    if not format_.opens_reasoning:
        return ()
    opens, closes = re.escape(format_.opens_reasoning), re.escape(format_.closes_reasoning)
    end = tokenizer.decode(prompt[-MAX_END_TOKENS:], skip_special_tokens=False)
    found = re.search(rf"(?:{opens}\s*)?{closes}\s*\Z|{opens}\s*\Z", end)
    return tokenizer.encode(found[0], add_special_tokens=False) if found else ()


class Choice:
    """Runs one generation through its reader, and its content through the stop strings."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: ChatTokenizer,
        *,
        index: int,
        rules: TextRules,
        sampling: SamplingParams,
        scored_prompt: Sequence[int] | None = None,  # if its logprobs are wanted
        reply: Reply | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self.generation = generation
        self.index = index
        self.max_tokens = sampling.max_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish = Finish.NONE
        self._tokenizer = tokenizer
        self._reader = MessageReader(tokenizer, rules, reply, prompt)
        self._stop = StopMatcher(rules.stops, include=rules.include_stop)
        self._min_tokens = sampling.min_tokens
        self._exempt = ""  # withheld whitespace, exempt from stop strings
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._offset = 0
        self._scored_prompt = scored_prompt
        self._is_wanted = rules.is_wanted
        self._plain: PlainTokens | None = None
        self._has_stops = self._stop.has_any
        self.is_reasoning = False  # kind of the text that `plain` returns
        # Cached for observers: it would be computed at each token.
        self.told_at: float | None = None
        self.is_sent = False

    @property
    def reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens

    @property
    def is_thinking(self) -> bool:
        """True if the text read so far leaves reasoning open."""
        return not self.finish and self._reader.is_reasoning

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched

    def plain(self, token_ids: Sequence[int]) -> str:
        """Return the next tokens' text if they are plain text, content or reasoning. "": call `take`."""
        table = self._plain
        if table is None:
            return ""
        if len(token_ids) == 1:
            text = table[token_ids[0]]
        else:
            texts = [table[token_id] for token_id in token_ids]
            text = "".join(texts) if all(texts) else ""
        if not text or (self._has_stops and (self._exempt or not self._stop.lets_pass(text))):
            return ""
        self.completion_tokens += len(token_ids)
        if self.is_reasoning:
            self._reader.reasoning_tokens += len(token_ids)
        return text

    def take(self, event: TokenEvent) -> Piece:
        """Return the next tokens' piece; the last one has `finish`, possibly before the tokens' end, at a stop string."""
        if event.cached_tokens >= 0:
            self.cached_tokens = event.cached_tokens
        piece = Piece(text="", offset=self._offset, prompt=self._scores(event))
        if not self._is_wanted:
            self.finish = piece.finish = Finish.LENGTH
            return piece
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
            self._say(piece, self._reader.finish(is_whole=event.finish == Finish.STOP))
            piece.text += self._stop.flush()
            piece.finish = Finish.STOP if self._stop.matched is not None else event.finish
        self.finish = piece.finish
        self._plain, self.is_reasoning = self._reader.plain, self._reader.is_reasoning
        piece.has_calls = bool(piece.finish) and self._reader.has_calls
        if piece.has_calls and piece.finish == Finish.STOP:  # a call that was cut is no call
            self.generation.called()
        return piece

    def _scores(self, event: TokenEvent) -> ScoredPrompt | None:
        """The prompt's logprobs, from the first event."""
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
        self._say(piece, self._reader.push(token_id), looks_for_stops=self.completion_tokens > self._min_tokens)

    def _say(self, piece: Piece, new: Parsed, *, looks_for_stops: bool = True) -> None:
        if not self._stop.has_any:
            piece.text += new.content
            piece.reasoning += new.reasoning
            join_calls(piece.calls, new.calls)
            return
        content, withheld = new.content, self._reader.withheld
        if not looks_for_stops:
            piece.text += content
            self._exempt = withheld
        else:
            if content:
                exempt = self._exempt if content.startswith(self._exempt) else ""
                piece.text += exempt + self._stop.push(content.removeprefix(exempt))
                self._exempt = ""
            exempt = self._exempt if withheld.startswith(self._exempt) else ""
            rest = withheld.removeprefix(exempt)
            if rest and self._stop.matched is None and self._stop.foresees(rest):
                piece.text += exempt + self._stop.push(rest)
        if self._stop.matched is None:
            piece.reasoning += new.reasoning
            join_calls(piece.calls, new.calls)
