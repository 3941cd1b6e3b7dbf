"""One answer's parser: tokens and text in, pieces of a message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.parsing.format import Exit, Means
from gateway.parsing.parsed import CallWriter, Parsed
from gateway.parsing.readers import (
    BodyReader,
    CallsReader,
    HeaderReader,
    Message,
    Reader,
    TextReader,
    captured,
    reader_of,
)
from gateway.parsing.terminals import Bound, Found, Patience, Terminals
from gateway.parsing.values import Schema

MAX_CALLS = 128


class Parser:
    """Follows a format's states through an answer. The message doesn't depend on how the text is split.

    `schemas` are the parameters of the tools that may be called; None: calls are text like any other.
    """

    def __init__(self, bound: Bound, schemas: Mapping[str, Schema] | None = None, *, parallel: bool = True) -> None:
        self._bound = bound
        self._states = bound.format.states
        self._terminals = bound.terminals if schemas is None else bound.with_calls
        self._calls = CallWriter(bound.format.ids, MAX_CALLS if parallel else 1)
        self._message = Message(self._calls, schemas or {}, schemas or (), Patience(bound.share))
        self._buffer = ""
        self._num_known = 0  # characters of the buffer that belong to the prompt
        self._is_prompt = False
        self.has_reasoned = self.is_reasoning = False
        self._reader: Reader
        self._enter(bound.format.start, {})

    @property
    def has_calls(self) -> bool:
        return self._calls.count > 0

    @property
    def withheld(self) -> str:
        """Whitespace after content that isn't part of it yet."""
        return self._reader.withheld if isinstance(self._reader, TextReader) else ""

    @property
    def plainly(self) -> Terminals | None:
        """The exits of this state, if text far from any, without trailing whitespace, is only appended."""
        reader = self._reader
        is_plain = not self._buffer and type(reader) is TextReader and reader.is_clear
        return self._terminals[self._name] if is_plain else None

    @property
    def ids(self) -> frozenset[int]:
        """Token ids that must be passed to `token`."""
        return self._bound.ids

    def text(self, text: str) -> None:
        """Take a piece of text without tokens in `ids`."""
        if not text:
            return
        reader = self._reader
        if not self._buffer and type(reader) is TextReader and self._terminals[self._name].are_far_from(text):
            reader.push(text)  # a fast path with the same result: most tokens are plain
            return
        self._buffer += text
        self._scan(is_final=False)

    def token(self, token_id: int, text: str, *, is_shown: bool) -> None:
        """Take a token in `ids`. If it is no terminal it is text, in content only if `is_shown`."""
        if token_id in self._terminals[self._name].inner:
            self.text(text)
            return
        self._scan(is_final=True)
        exits = self._terminals[self._name].by_id.get(token_id, [])
        if self._take_one([Found(exit_, 0, 0, {}) for exit_ in exits], text, text):
            self._scan(is_final=False)
        elif is_shown or self._state.means not in (Means.CONTENT, Means.REASONING):
            self.text(text)

    def read_prompt(self) -> None:
        """Read the end of the prompt, until `resume`."""
        self._is_prompt = True

    def resume(self) -> None:
        """End the prompt: only the state that it leads to counts."""
        self._is_prompt = False
        self._message.new = Parsed()
        self._calls.resume()
        self._num_known = len(self._buffer)
        self._message.has_content = False
        self._message.gap = self._opener = ""
        if isinstance(self._reader, TextReader):
            self._reader = TextReader(self._message, self._state.means)
        elif isinstance(self._reader, CallsReader | BodyReader):
            self._reader.resume()

    def finish(self, *, is_whole: bool) -> None:
        """Finish the answer; `is_whole` if the model ended it."""
        self._scan(is_final=True)
        reader = self._reader
        rest = reader.finish(is_whole=is_whole)
        if isinstance(reader, TextReader) and not self._calls.count:
            reader.close()
        if rest:
            self._content(self._opener + rest)
        if is_whole:
            self._message.end_call()

    def take(self) -> Parsed:
        """Return the additions since the last call."""
        new, self._message.new = self._message.new, Parsed()
        new.calls = self._calls.take()
        return new

    # -- states -------------------------------------------------------------------------------------------------------

    def _enter(self, name: str, captures: Mapping[str, str], opener: str = "") -> None:
        self._name, self._state, self._opener = name, self._states[name], opener
        self.is_reasoning = self._state.means == Means.REASONING
        self.has_reasoned = self.has_reasoned or self.is_reasoning
        if not self._state.in_call:
            self._message.end_call()
        self._reader = reader_of(self._state, self._message, captures)

    def _take_one(self, found: Sequence[Found], text: str, new: str) -> bool:
        """Leave the state by the first possible exit. `new` is the part of the text after the prompt's."""
        for one in found:
            captures = self._captures(one)
            if captures is not None:
                self._leave(one.exit, captures, text, new)
                return True
        return False

    @property
    def _is_first(self) -> bool:
        """True if nothing was said yet. A prompt's tail has words before its markup: the role's name."""
        return self._is_prompt or not self._message.has_content

    def _captures(self, found: Found) -> Mapping[str, str] | None:
        if found.exit.first and not self._is_first:
            return None
        if not isinstance(self._reader, HeaderReader):
            return found.captures
        said = captured(found.exit.reads, self._reader.text.strip())
        return None if said is None else {**said, **found.captures}

    def _leave(self, exit_: Exit, captures: Mapping[str, str], text: str, new: str) -> None:
        rest = self._reader.finish(is_whole=True)
        if rest:  # it was no call: nothing of it may be lost
            self._content(self._opener + rest + ("" if exit_.keeps else new))
        self._message.trims = not rest
        if "key" in captures:
            self._message.key = captures["key"]
        if "name" in captures and self._states[exit_.to].in_call:
            self._message.call(captures["name"], captures.get("id", ""))
        self._enter(exit_.to, captures, "" if exit_.keeps else new)
        if exit_.keeps:
            self._buffer = text + self._buffer
            self._num_known += len(text) - len(new)

    def _content(self, text: str) -> None:
        """Output text that was no call, with its surroundings."""
        self._message.new.content += self._message.gap + text
        self._message.has_content = True
        self._message.gap = ""

    def _scan(self, *, is_final: bool) -> None:
        """Read the buffer up to a possible terminal."""
        while self._buffer:
            if self._reader.over:
                self._return()
            terminals = self._terminals[self._name]
            found, hold = terminals.find(
                self._buffer, self._message.patience, is_final=is_final, is_first=self._is_first
            )
            start = found[0].start if found else hold
            if start and not self._read(start):
                continue
            if self._reader.in_string and self._buffer:
                self._read(1)  # an apparent terminal that is text here
                continue
            if not found:
                break
            text = self._buffer[: found[0].end - start]
            new = text[self._num_known :]
            self._drop(len(text))
            if not self._take_one(found, text, new):
                self._reader.push(new if isinstance(self._reader, TextReader) else text)
        if is_final and self._reader.over:
            self._return()

    def _read(self, count: int) -> bool:
        """Pass so much to the reader; False if it is over before."""
        reader, known = self._reader, min(self._num_known, count)
        if isinstance(reader, TextReader):
            reader.push(self._buffer[known:count])
            used = count
        else:
            used = reader.push(self._buffer[:known]) if known else 0
            if known and isinstance(reader, CallsReader | BodyReader):
                reader.resume()
            if used == known:
                used += reader.push(self._buffer[known:count])
        self._drop(used)
        return used == count

    def _drop(self, count: int) -> None:
        self._buffer = self._buffer[count:]
        self._num_known = max(0, self._num_known - count)

    def _return(self) -> None:
        """End a guess: text that was no call is content, and so is what follows."""
        rest = self._reader.finish(is_whole=True)
        if rest:
            self._content(self._opener + rest)
        self._message.trims = not rest
        self._enter(self._bound.format.start, {})
