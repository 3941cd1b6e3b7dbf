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
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from common.errors import InvalidRequestError

MAX_RENDERED_CHARS = 8_000_000
MAX_RENDER_S = 10.0
MAX_PRODUCT = 100_000  # limit of a repetition such as 'x' * n
RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"})
_END = "\x00the final message ends here\x00"


class RenderOptions(TypedDict, total=False):
    """How to render. `variables` are the client's own (`chat_template_kwargs`).

    `continue_final_message` leaves the last message open, so that the model writes on.
    """

    add_generation_prompt: bool  # default True
    continue_final_message: bool
    variables: Mapping[str, Any] | None


class ChatTemplate:
    """One compiled template. Rendering is safe from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[RenderOptions]) -> str:
        """Raises InvalidRequestError."""
        variables = options.get("variables") or {}
        reserved = RESERVED.intersection(variables)
        if reserved:
            name = f"chat_template_kwargs.{min(reserved)}"
            raise InvalidRequestError(f"{name}: not the client's to set", param="chat_template_kwargs")
        resumes = options.get("continue_final_message", False)
        if resumes:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END}]
        text = self._rendered(messages, options.get("add_generation_prompt", True), variables)
        if resumes:
            text, found, _ = text.partition(_END)
            if not found:
                raise InvalidRequestError("the chat template drops the final message", param="continue_final_message")
        return text

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        # Templates ask `tools is not none`: absent values are None, not undefined.
        context = {"tools": None, "documents": None, **variables, **self._special_tokens}
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._bounded(context)
        except (
            jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
        ) as error:  # fmt: skip
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error

    def _bounded(self, context: Mapping[str, Any]) -> str:
        """Render piece by piece. Raises InvalidRequestError once the text is too long or too slow."""
        give_up_at = time.monotonic() + MAX_RENDER_S
        pieces, length = [], 0
        for piece in self._template.generate(context):
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
    return ChatTemplate(inline, special) if inline else None


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
