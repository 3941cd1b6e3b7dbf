"""The environment in which chat templates run: bounded, without a way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import markupsafe

from gateway.answers.shade import READERS, Shade

MAX_PRODUCT = 100_000  # limit of a repetition such as 'x' * n
_COMPARING_TESTS = ("in", "eq", "==", "equalto", "ne", "!=")


class _Comparing(jinja2.compiler.CodeGenerator):
    """Compiles comparisons such that they see plain text."""

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("(")
        self._operand(node.expr, frame)
        for operand in node.ops:
            self.write(f" {jinja2.compiler.operators[operand.op]} ")
            self._operand(operand.expr, frame)
        self.write(")")

    def _operand(self, node: jinja2.nodes.Expr, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.comparable(")
        self.visit(node, frame)
        self.write(")")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Also refuses products that would fill the memory, and shows templates the plain characters of what they read."""

    intercepted_binops = frozenset({"*", "**"})
    code_generator_class = _Comparing

    def __init__(self, shade: Shade) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
            finalize=lambda value: shade.written(str, value) if type(value) in (list, tuple, dict) else value,
        )
        self.comparable = shade.comparable  # compiled templates call it
        self._shade = shade
        self.globals |= {"raise_exception": _raise, "strftime_now": lambda pattern: datetime.now().strftime(pattern)}
        self.filters |= {
            "tojson": self._to_json,
            "replace": self._replace,
            "trim": self._trim,
            "escape": self._escape,
            "e": self._escape,
        }
        tests: dict[str, Any] = self.tests
        tests |= {name: partial(_compared, tests[name], shade.comparable) for name in _COMPARING_TESTS}

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str) and __obj.__name__ in READERS:
            names = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            return __self._shade.read(text, __obj.__name__, args, names)
        return super().call(__context, __obj, *args, **kwargs)

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> Any:
        return self._shade.read(str(text), "replace", (str(old), str(new), -1 if count is None else count), {})

    def _trim(self, text: Any, chars: str | None = None) -> Any:
        return self._shade.read(str(text), "strip", (chars,), {})

    def _escape(self, text: Any) -> str:
        return self._shade.written(lambda plain: str(markupsafe.escape(plain)), text)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Jinja's own filter escapes HTML, which templates don't expect."""
        write = partial(
            json.dumps, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self._shade.written(write, value)

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


def _compared(test: Callable[..., bool], comparable: Callable[[Any], Any], *operands: Any) -> bool:
    return test(*map(comparable, operands))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
