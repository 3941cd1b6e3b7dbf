"""The model's chat template, rendered in a sandbox as Hugging Face's tools do, without transformers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from common.errors import InvalidRequestError

MAX_RENDERED_CHARS = 8_000_000
MAX_RENDER_S = 10.0
MAX_PRODUCT = 100_000  # limit of a repetition such as 'x' * n
RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"})
_KNOWS_NONE = "this model's chat template knows no tools; serve a model that was trained for them"
_END = "\x00the final message ends here\x00"


class RenderOptions(TypedDict, total=False):
    """How to render. `variables` are the client's own (`chat_template_kwargs`).

    `continue_final_message` leaves the last message open, so that the model writes on.
    """

    add_generation_prompt: bool  # default True
    continue_final_message: bool
    variables: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]]  # as Hugging Face's templates expect them


class Arguments(dict[str, Any]):
    """A call's arguments: a mapping for templates that want one, its JSON for those that join it to text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, text: str) -> str:
        return text + str(self)

    def __add__(self, text: str) -> str:
        return str(self) + text


class ChatTemplate:
    """One compiled template. Rendering is safe from several threads.

    `tool_source` is the folder's template for conversations with tools, where it has one of its own.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._template = environment.from_string(source)
        with_tools = tool_source or source
        self._tool_template = environment.from_string(with_tools)
        self._reads_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(with_tools))
        self._reads_calls = "tool_calls" in with_tools
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[RenderOptions]) -> str:
        """Raises InvalidRequestError."""
        variables = options.get("variables") or {}
        reserved = RESERVED.intersection(variables)
        if reserved:
            name = f"chat_template_kwargs.{min(reserved)}"
            raise InvalidRequestError(f"{name}: not the client's to set", param="chat_template_kwargs")
        tools = options.get("tools") or None
        self._check_tools(messages, tools)
        messages = [_with_arguments(message) for message in messages]
        resumes = options.get("continue_final_message", False)
        if resumes:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END}]
        context = {**variables, "tools": tools, "add_generation_prompt": options.get("add_generation_prompt", True)}
        text = self._rendered(messages, context)
        if resumes:
            text, found, _ = text.partition(_END)
            if not found:
                raise InvalidRequestError("the chat template drops the final message", param="continue_final_message")
        return text

    def _check_tools(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        """Refuse what the template would drop in silence. Raises InvalidRequestError."""
        if tools and not self._reads_tools:
            raise InvalidRequestError(f"tools: {_KNOWS_NONE}", param="tools")
        if not self._reads_calls and any("tool_calls" in message for message in messages):
            raise InvalidRequestError(f"messages: tool_calls can't be shown to it: {_KNOWS_NONE}", param="messages")

    def _rendered(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> str:
        # Templates ask `tools is not none`: absent values are None, not undefined.
        context = {"documents": None, **given, **self._special_tokens, "messages": messages}
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        template = self._tool_template if given["tools"] or has_calls else self._template
        try:
            return self._bounded(template, context)
        except (
            jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
        ) as error:  # fmt: skip
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error

    def _bounded(self, template: jinja2.Template, context: Mapping[str, Any]) -> str:
        """Render piece by piece. Raises InvalidRequestError once the text is too long or too slow."""
        give_up_at = time.monotonic() + MAX_RENDER_S
        pieces, length = [], 0
        for piece in template.generate(context):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise InvalidRequestError("messages: the rendered prompt is too long", param="messages")
            if time.monotonic() > give_up_at:
                raise InvalidRequestError(
                    f"messages: the chat template took more than {MAX_RENDER_S:g} s for them", param="messages"
                )
        return "".join(pieces)


def read_template(folder: Path, tokenizer_config: Mapping[str, Any], special: Mapping[str, str]) -> ChatTemplate | None:
    """The folder's template, or None: chat_template.jinja, else from tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), special)
    inline = tokenizer_config.get("chat_template")
    if isinstance(inline, list):
        named = {entry["name"]: entry["template"] for entry in inline}
        inline = named.get("default") or next(iter(named.values()), None)
        return ChatTemplate(inline, special, named.get("tool_use")) if inline else None
    return ChatTemplate(inline, special) if inline else None


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose calls' arguments suit every template."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": Arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Also refuses products that would fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or power unless it could be large. Raises TemplateError."""
        if operator == "**" or (operator == "*" and _product_size(left, right) > MAX_PRODUCT):
            raise jinja2.TemplateError(f"{operator!r} of these values is not allowed")
        return super().call_binop(context, operator, left, right)


def _product_size(left: Any, right: Any) -> int:
    """Length of a repeated text or list; 0 for a product of numbers."""
    if isinstance(left, int) and isinstance(right, str | list | tuple):
        left, right = right, left
    return len(left) * max(right, 0) if isinstance(left, str | list | tuple) and isinstance(right, int) else 0


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks tokens for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which templates don't expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
