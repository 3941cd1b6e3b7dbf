"""The model's chat template, rendered in a sandbox as by Hugging Face's tools, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jinja2
import jinja2.nodes

from common.errors import InvalidRequestError
from gateway.templates.apart import Apart, Opening
from gateway.templates.reminders import with_reminders
from gateway.templates.sandbox import MAX_TEXT_CHARS, DearError, Meter, Sandbox, is_plain, metered
from gateway.templates.shade import END, Shade
from modelfiles.files import TEMPLATE, TOKENIZER_CONFIG, read_file

MAX_RENDERED_CHARS = MAX_TEXT_CHARS
CHEAP_S = 1.0  # processor time of a thread; the event loop grants less
RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"})
_KNOWS_NONE = "this model's chat template knows no tools; serve a model that was trained for them"
MAX_REASON_CHARS = 500
_NOTHING_SHADED = Shade()
_AS_JSON = partial(json.dumps, ensure_ascii=False)


class RenderOptions(TypedDict, total=False):
    """Rendering options. `variables` are the client's own (`chat_template_kwargs`).

    `continue_final_message` leaves the last message open, so that the model writes on.
    """

    add_generation_prompt: bool  # default True
    continue_final_message: bool
    variables: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]]  # Hugging Face's form of tools
    parse_special: bool  # default False: messages are text, never control tokens


class TooLongError(InvalidRequestError):
    """A prompt has more tokens than its limit. `what` describes its length."""

    def __init__(self, what: str, *, param: str | None = None) -> None:
        super().__init__(f"the prompt is too long: {what}", param=param)
        self.what = what


class TemplateRefusalError(InvalidRequestError):
    """The chat template itself refused the messages."""


class ChatTemplate:
    """A compiled template, rendered here while it is known to be cheap, else in a child process. Thread-safe.

    `tool_source` is the folder's template for conversations with tools, where it has one of its own. All strings in messages
    (but roles), tools and variables are shaded, whatever the field.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
        shade: Shade = _NOTHING_SHADED,
        *,
        name: str = "",
    ) -> None:
        """`name`: its origin, for errors."""
        environment = Sandbox(shade)
        self._shade = shade
        self._template = environment.from_string(source)
        with_tools = tool_source or source
        self.source = with_tools
        self._tool_template = environment.from_string(with_tools)
        self._reads_tools = _reads(environment.parse(with_tools), "tools")
        self._reads_calls = "tool_calls" in with_tools
        self._special_tokens = dict(special_tokens)
        self._chars = max(len(source), len(with_tools))
        self._is_cheap = all(is_plain(environment.parse(one)) for one in {source, with_tools})
        self._apart = Apart(Opening(source, self._special_tokens, tool_source, shade.literals, name))

    def close(self) -> None:
        """End the child process, if there is one."""
        self._apart.close()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, most_s: float | None = None, **options: Unpack[RenderOptions]
    ) -> str:
        """The prompt as text. Raises as `shaded`."""
        return self._shade.plain(self.shaded(messages, most_s=most_s, **options))

    def shaded(
        self, messages: Sequence[Mapping[str, Any]], *, most_s: float | None = None, **options: Unpack[RenderOptions]
    ) -> str:
        """The prompt with clients' text shaded (`gateway.templates.shade`). Raises InvalidRequestError, UnavailableError.

        `most_s`: processor time for it in this thread. Raises DearError where that isn't enough; None: a child process goes on.
        """
        if self._is_cheap:
            try:
                meter = Meter(CHEAP_S if most_s is None else most_s, self._chars)
                return metered(meter, lambda: self.shaded_here(messages, **options))
            except DearError as error:
                self._is_cheap = not error.is_lasting
        if most_s is not None:
            raise DearError(is_lasting=not self._is_cheap)
        apart = self._apart.shaded(messages, options)
        if apart.is_too_long:
            raise TooLongError(apart.problem, param="messages")
        if apart.problem:
            raise InvalidRequestError(apart.problem, param=apart.param)
        return apart.text

    def shaded_here(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[RenderOptions]) -> str:
        """Render in this process, whatever it costs. System messages that the template refuses become reminders."""
        variables = options.get("variables") or {}
        reserved = RESERVED.intersection(variables)
        if reserved:
            name = f"chat_template_kwargs.{min(reserved)}"
            raise InvalidRequestError(f"{name}: not the client's to set", param="chat_template_kwargs")
        self._check_tools(messages, options.get("tools"))
        try:
            return self._shaded(messages, options)
        except TemplateRefusalError:
            others = with_reminders(messages)
            if others is messages:
                raise
            return self._shaded(others, options)

    def _shaded(self, messages: Sequence[Mapping[str, Any]], options: RenderOptions) -> str:
        shade = _NOTHING_SHADED if options.get("parse_special", False) else self._shade
        shaded = [_of_client(message, shade) for message in messages]
        resumes = options.get("continue_final_message", False)
        if resumes:
            shaded[-1]["content"] += END
        variables, tools = options.get("variables") or {}, options.get("tools") or None
        context = {name: shade.all(value) for name, value in variables.items()} | {"tools": shade.all(tools)}
        context["add_generation_prompt"] = options.get("add_generation_prompt", True)
        text = self._rendered(shaded, context)
        if resumes:
            text, found, _ = text.partition(END)
            if not found:
                raise InvalidRequestError("the chat template drops the final message", param="continue_final_message")
        return text

    def _check_tools(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        """Refuse tools that the template would silently drop. Raises InvalidRequestError."""
        if tools and not self._reads_tools:
            raise InvalidRequestError(f"tools: {_KNOWS_NONE}", param="tools")
        if not self._reads_calls and any("tool_calls" in message for message in messages):
            raise InvalidRequestError(f"messages: tool_calls can't be shown to it: {_KNOWS_NONE}", param="messages")

    def _rendered(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> str:
        # Templates test `tools is not none`: absent values are None, not undefined.
        context = {"documents": None, **given, **self._special_tokens, "messages": messages}
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        template = self._tool_template if given["tools"] or has_calls else self._template
        try:
            return self._bounded(template, context)
        except (
            jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
        ) as error:  # fmt: skip
            reason = self._shade.plain(str(error))[:MAX_REASON_CHARS].replace(END, "")
            raise TemplateRefusalError(f"the chat template refused the messages: {reason}", param="messages") from error

    def _bounded(self, template: jinja2.Template, context: Mapping[str, Any]) -> str:
        """Render piece by piece. Raises TooLongError once the text is too long."""
        pieces, length = [], 0
        for piece in template.generate(context):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise TooLongError(f"more than {MAX_RENDERED_CHARS} characters", param="messages")
        return "".join(pieces)


def check_template(source: str) -> None:
    """Check a chat template. Raises ValueError for an invalid one."""
    environment = Sandbox(_NOTHING_SHADED)
    try:
        tree = environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"is no Jinja: line {error.lineno}: {error.message}") from None
    if not _reads(tree, "messages"):
        raise ValueError("is no chat template: it reads no `messages`")


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The source of a model's template, or "" for none, with an optional variant for tools. `name`: its origin."""

    source: str
    tool_source: str | None = None
    name: str = ""

    @property
    def with_tools(self) -> str:
        return self.tool_source or self.source

    def texts(self) -> str:
        """The texts that both templates write themselves, joined. Raises jinja2.TemplateError."""
        both = [self.source, *([self.tool_source] if self.tool_source else [])]
        trees = [Sandbox(_NOTHING_SHADED).parse(one) for one in both]
        constants = [str(node.value) for tree in trees for node in tree.find_all(jinja2.nodes.Const)]
        return "\0".join([*both, *constants])

    def compiled(self, special_tokens: Mapping[str, str], shade: Shade) -> ChatTemplate | None:
        if not self.source:
            return None
        return ChatTemplate(self.source, special_tokens, self.tool_source, shade, name=self.name)


def read_source(model: Path, tokenizer_config: Mapping[str, Any], given: str = "") -> TemplateSource:
    """The `given` template, or the model's: chat_template.jinja, else from tokenizer_config.json."""
    if given:
        return TemplateSource(given, None, "--chat-template")
    own = read_file(model, TEMPLATE)
    if own is not None:
        return TemplateSource(own.decode("utf-8"), None, TEMPLATE)
    inline = tokenizer_config.get("chat_template")
    if isinstance(inline, list):
        named = {entry["name"]: entry["template"] for entry in inline}
        inline = named.get("default") or next(iter(named.values()), None)
        return TemplateSource(inline or "", named.get("tool_use"), TOKENIZER_CONFIG)
    return TemplateSource(inline or "", None, TOKENIZER_CONFIG)


def _reads(template: jinja2.nodes.Template, name: str) -> bool:
    """True if a template reads a variable. `jinja2.meta` would compute constants, unmetered."""
    return any(node.name == name and node.ctx == "load" for node in template.find_all(jinja2.nodes.Name))


def _of_client(given: Mapping[str, Any], shade: Shade) -> dict[str, Any]:
    """A shaded message, whose calls' arguments suit every template. Its role is one of ours."""
    message: dict[str, Any] = shade.all(given)
    if given["role"].isidentifier():
        message["role"] = given["role"]
    for call in message.get("tool_calls") or ():
        # A mapping for templates that want one; it renders as its JSON for those that join it to text.
        call["function"]["arguments"] = shade.all(shade.all_plain(call["function"]["arguments"]), _AS_JSON)
    return message
