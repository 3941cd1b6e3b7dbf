"""Tokenising prompts outside the event loop, without delaying other streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

from common.blocks import pack_tokens
from common.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from common.tasks import Ready
from gateway.answers.ask import Conversation, DraftWish, Infill, Joined, Prompt, Text, TokenIds
from gateway.answers.catalogue import Served
from gateway.answers.tokenizer import ChatTokenizer
from gateway.http.problem import ContextLengthError
from gateway.request.spec import DraftRules
from gateway.templates.sandbox import DearError
from gateway.templates.template import CHEAP_S, TooLongError

SHORT_CHARS = 500  # such prompts take less time than a thread switch
SHORT_MESSAGES = 8
# Token ids of a prompt that are checked on the loop itself; 64 such prompts take 2 ms.
SHORT_IDS = 1 << 11
# Token ids of a slice, which takes 0.3 ms: other threads run in between.
SLICE_IDS = 1 << 14
VALUE_CHARS = 8  # a template takes this long even for an empty value
LONG_CHARS = 100_000  # such prompts are tokenised one at a time
MAX_HELD_CHARS = 100_000_000  # characters of waiting long prompts
HERE_S = 0.015  # processor time of the event loop for a template
MOST_APART = 32  # prompts that wait for one child; more are refused
COUNTED_CONTEXTS = 4  # overlong prompts are counted, too, within this bound
UNKNOWN_CONTEXT = 1 << 20  # tokens, while no worker has reported its context length


@dataclass(slots=True, eq=False)
class _Apart:
    """A model's prompts that a child process renders, one at a time."""

    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="dear-prompt"))
    num_waiting: int = 0


class Tokenising:
    """Turns prompts into tokens."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-prompt")
        self._held_chars = 0
        self._apart: dict[str, _Apart] = {}  # by model

    def tokens(
        self, prompt: Prompt, served: Served, *, name: str, contexts: int = 1, keep: int | None = None
    ) -> Awaitable[list[int]]:
        """Tokens of a prompt; `Ready` for a short one. With `keep` only the last so many are kept.

        Raises, at once or when awaited, ContextLengthError about `name` for more than so many contexts, InvalidRequestError,
        OverloadedError, UnavailableError.
        """
        limit = contexts * (served.max_model_len or UNKNOWN_CONTEXT)
        if keep is not None and keep > limit:
            keep = None  # what remains would be too long
        if isinstance(prompt, Joined):
            return self._joined(prompt, served, name=name, contexts=contexts, keep=keep)
        if isinstance(prompt, TokenIds):
            return _known(prompt.ids if keep is None else prompt.ids[-keep:], served.tokenizer.vocab_size, name)
        if isinstance(prompt, Conversation) and prompt.without_template is not None and not served.tokenizer.can_chat:
            prompt = Text(prompt.without_template, parse_special=prompt.parse_special)
        make = _maker(prompt, served.tokenizer)

        def made(most_s: float | None) -> list[int]:
            try:
                own = {"most_s": most_s} if isinstance(prompt, Conversation) else {}
                return make(limit=limit, keep=keep, **own)
            except TooLongError as error:
                raise prompt_error(served.max_model_len, error.what, name) from None

        chars = _chars(prompt, LONG_CHARS)
        if chars <= SHORT_CHARS and not (isinstance(prompt, Conversation) and len(prompt.messages) > SHORT_MESSAGES):
            try:
                return Ready(made(HERE_S))
            except DearError:
                pass
        return self._made(made, prompt, chars, served.name)

    async def drafts(self, wish: DraftWish, served: Served, give_up_at: float, *, name: str) -> DraftRules:
        """The rules for a request's drafts, its prediction in tokens. Raises as `tokens`, and DeadlineExceededError."""
        if not wish.prediction:
            return DraftRules(wish.most)
        text = Text(wish.prediction, parse_special=False, adds_special=False)
        try:
            async with asyncio.timeout_at(give_up_at):
                return DraftRules(wish.most, pack_tokens(await self.tokens(text, served, name=name)))
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed before the prediction was tokenised") from None

    async def _joined(self, prompt: Joined, served: Served, *, name: str, contexts: int, keep: int | None) -> list[int]:
        ids: list[int] = []
        for part in prompt.parts:
            ids += await self.tokens(part, served, name=name, contexts=contexts)
        return ids if keep is None else ids[-keep:]

    async def _made(
        self, make: Callable[[float | None], list[int]], prompt: Prompt, chars: int, model: str
    ) -> list[int]:
        try:
            return await self._in_thread(partial(make, CHEAP_S), prompt, chars)
        except DearError:
            return await self._rendered_apart(partial(make, None), model)

    async def _rendered_apart(self, make: Callable[[], list[int]], model: str) -> list[int]:
        apart = self._apart.setdefault(model, _Apart())
        if apart.num_waiting >= MOST_APART:
            raise OverloadedError("too many prompts wait for this model's chat template")
        apart.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(apart.thread, make)
        finally:
            apart.num_waiting -= 1

    async def _in_thread(self, make: Callable[[], list[int]], prompt: Prompt, chars: int) -> list[int]:
        if chars < LONG_CHARS:
            return await asyncio.to_thread(make)
        if isinstance(prompt, Conversation):  # counted up to the bound
            chars = await asyncio.to_thread(_chars, prompt, MAX_HELD_CHARS)
        if self._held_chars and self._held_chars + chars > MAX_HELD_CHARS:
            raise OverloadedError("too many long prompts wait to be tokenised")
        self._held_chars += chars
        try:
            return await asyncio.get_running_loop().run_in_executor(self._long, make)
        finally:
            self._held_chars -= chars


def largest(ids: list[int]) -> int:
    """The largest token id, found in slices; -1 without any."""
    return max((max(ids[at : at + SLICE_IDS]) for at in range(0, len(ids), SLICE_IDS)), default=-1)


def _known(ids: list[int], vocab_size: int, name: str) -> Awaitable[list[int]]:
    """A client's ids. Raises, at once or when awaited, InvalidRequestError about `name` if one is outside the vocabulary."""

    def check() -> list[int]:
        if largest(ids) >= vocab_size:
            raise InvalidRequestError(f"a token id is not below {vocab_size}", param=name)
        return ids

    return Ready(check()) if len(ids) <= SHORT_IDS else asyncio.to_thread(check)


def _maker(prompt: Text | Conversation | Infill, tokenizer: ChatTokenizer) -> Callable[..., list[int]]:
    """Return the function that tokenises a prompt, given `limit`, `keep` and, for a template, `most_s`."""
    match prompt:
        case Text():
            make = partial(tokenizer.encode, prompt.text, parse_special=prompt.parse_special)
            return partial(make, add_special_tokens=prompt.adds_special)
        case Conversation():
            own = prompt.rendering
            return partial(tokenizer.encode_chat, prompt.messages, **own, add_special_tokens=prompt.adds_special)
        case Infill():
            return partial(tokenizer.encode_infill, prompt)
        case _:
            assert_never(prompt)


def prompt_error(limit: int | None, length: str, name: str) -> ContextLengthError:
    """The error for a prompt that is too long by itself; `length`: "4001 tokens"."""
    error = context_error(limit, f"your {name} resulted in {length}", name)
    if limit is not None and length.endswith("tokens"):
        error.excess = f"{length} > {limit}"
    return error


def context_error(limit: int | None, what: str, name: str) -> ContextLengthError:
    """The error for a context overflow, in OpenAI's words, which clients look for."""
    known = f"This model's maximum context length is {limit} tokens. However, " if limit is not None else ""
    return ContextLengthError(f"{known}{what}. Please reduce the length of the {name}.", param=name)


def _chars(prompt: Prompt, most: int) -> int:
    """Characters of a prompt in any of its fields, since a template may write all of it. Counting stops soon after `most`."""
    match prompt:
        case Text():
            return len(prompt.text)
        case Infill():
            return len(prompt.before) + len(prompt.after) + sum(len(text) for _, text in prompt.files)
        case Conversation():
            tools = [part for tool in prompt.tools for part in (tool.name, tool.description, tool.parameters)]
            waiting: list[Any] = [*prompt.messages, prompt.variables, *tools]
        case _:
            return 0
    count = 0
    while waiting and count <= most:
        value = waiting.pop()
        count += VALUE_CHARS
        match value:
            case str():
                count += len(value)
            case Mapping():
                count += sum(map(len, value))
                waiting += value.values()
            case list() | tuple():
                waiting += value
            case int():
                count += value.bit_length() // 3
    return count
