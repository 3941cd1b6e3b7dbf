"""The environment of chat templates: sandboxed, and metered if there is a meter."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import markupsafe
from jinja2 import nodes

from gateway.templates.shade import READERS, Shade

MAX_TEXT_CHARS = 8_000_000  # limit of one text, and of all output
MAX_STEPS = 200_000  # loop turns and calls
MAX_STEP_CHARS = 200_000_000  # steps times the template's length, which each step may write
LOOK_EVERY = 16  # steps between two looks at the time

PLAIN_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Getattr, nodes.Getitem,
    nodes.Slice, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.CondExpr, nodes.If, nodes.For, nodes.Assign,
    nodes.AssignBlock, nodes.Macro, nodes.Filter, nodes.Test, nodes.Concat, nodes.Add, nodes.Sub, nodes.Mul, nodes.Div,
    nodes.FloorDiv, nodes.Mod, nodes.Neg, nodes.Pos, nodes.Call, nodes.Keyword, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair,
    nodes.Break, nodes.Continue, nodes.ExprStmt, nodes.Scope,
)  # fmt: skip
PLAIN_FILTERS = frozenset({
    "trim", "tojson", "length", "count", "default", "d", "list", "first", "last", "upper", "lower", "capitalize", "title",
    "join", "string", "safe", "int", "float", "abs", "replace", "items", "dictsort", "map", "select", "reject", "selectattr",
    "rejectattr", "reverse", "escape", "e",
})  # fmt: skip
PLAIN_TEXT_METHODS = frozenset({
    "count", "endswith", "find", "index", "rfind", "rindex", "startswith", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rpartition", "rsplit", "rstrip", "split", "splitlines", "strip", "lower", "upper", "title",
    "capitalize", "isalnum", "isalpha", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "isupper",
})  # fmt: skip
PLAIN_METHODS = frozenset({"items", "keys", "values", "get"})  # methods of objects


Rendered = TypeVar("Rendered")
MAX_PRODUCT = 100_000  # limit of a repetition such as 'x' * n
MAX_INDENTED_CHARS = 80_000  # characters of JSON before it is indented, times the indent
_STEPS = "each turn"  # a filter name that no template can write
_COMPARING_TESTS = ("in", "eq", "==", "equalto", "ne", "!=")


class DearError(Exception):
    """A child process has to render. `is_lasting`: for any conversation."""

    def __init__(self, *, is_lasting: bool) -> None:
        super().__init__("the template is not known to be cheap")
        self.is_lasting = is_lasting


class Meter:
    """The remaining loop turns, characters and processor time of one rendering."""

    def __init__(self, most_s: float, source_chars: int) -> None:
        """`most_s`: processor time of this thread; `source_chars`: of the template."""
        self._give_up_at = time.thread_time() + most_s
        self._steps_left = min(MAX_STEPS, MAX_STEP_CHARS // max(1, source_chars))
        self._look_at = self._steps_left - LOOK_EVERY
        self._chars_left = 2 * MAX_TEXT_CHARS

    def step(self) -> None:
        """Raises DearError."""
        self._steps_left -= 1
        if self._steps_left < self._look_at:
            self._look_at -= LOOK_EVERY
            if self._steps_left < 0 or time.thread_time() > self._give_up_at:
                raise DearError(is_lasting=False)

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same values, each counted as a step."""
        for value in values:
            self.step()
            yield value

    def text(self, chars: int) -> None:
        """Count a text that is about to be built. Raises DearError."""
        if chars > MAX_TEXT_CHARS:
            raise DearError(is_lasting=False)

    def written(self, chars: int) -> None:
        """Count characters written to the prompt, or to a text that a template builds. Raises DearError."""
        self._chars_left -= chars
        if self._chars_left < 0:
            raise DearError(is_lasting=False)
        self.step()


class _Running(threading.local):
    meter: Meter | None = None


_running = _Running()


def running() -> Meter | None:
    """The meter of this thread's rendering; None in a child process."""
    return _running.meter


def metered(meter: Meter, render: Callable[[], Rendered]) -> Rendered:
    """The result of `render`, metered. Raises DearError."""
    _running.meter = meter
    try:
        return render()
    finally:
        _running.meter = None


def is_plain(template: nodes.Template) -> bool:
    """True if a template consists of constructs whose cost the meter sees."""
    if any(type(node) not in PLAIN_NODES for node in template.find_all(nodes.Node)):
        return False
    if any(loop.recursive for loop in template.find_all(nodes.For)):
        return False
    filters = list(template.find_all(nodes.Filter))
    by_name = [one for one in filters if one.name == "map" and one.args]  # the name of any filter
    return not by_name and all(one.name in PLAIN_FILTERS for one in filters)


class _Watched(jinja2.compiler.CodeGenerator):
    """The code generator: comparisons see plain text, and operations that join texts are metered."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: jinja2.compiler.Frame, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible  # otherwise constant expressions would be computed here, unmetered
        return super()._output_child_to_const(node, frame, finalize)

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
    """The sandbox. It also refuses products that would fill the memory, and shows templates plain characters."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _Watched

    def __init__(self, shade: Shade) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # as above
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
            finalize=self._finalized,
        )
        self._shade = shade
        self.globals |= {"raise_exception": _raise, "strftime_now": lambda pattern: datetime.now().strftime(pattern)}
        self._plain_calls = [self.globals[name] for name in ("range", "namespace", "raise_exception", "strftime_now")]
        self.filters |= {
            "tojson": self._to_json,
            "replace": self._replace,
            "trim": self._trim,
            "escape": self._escape,
            "e": self._escape,
            "join": self._join,
            "string": partial(_measured_string, self.filters["string"]),
            _STEPS: _each,
        }
        tests: dict[str, Any] = self.tests
        tests |= {name: partial(_compared, tests[name], self.comparable) for name in _COMPARING_TESTS}

    def _generate(
        self, source: jinja2.nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for output in source.find_all(jinja2.nodes.Output):
            output.nodes = [_as_data(part) for part in output.nodes]
        for loop in source.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, _STEPS, [], [], None, None, lineno=loop.lineno)
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init)

    def _finalized(self, value: Any) -> Any:
        meter = running()
        if meter is not None:
            if type(value) is not str:
                _refuse_made(value)
                value = str(value)
            meter.written(len(value))
            return value
        return self._shade.written(str, value) if type(value) in (list, tuple, dict) else value

    def comparable(self, value: Any) -> Any:
        """A comparison's operand, for compiled templates."""
        if type(value) in (list, tuple) and (meter := running()) is not None:
            for part in meter.each(value):
                _refuse_made(part)
        return self._shade.comparable(value)

    def joined(self, parts: tuple[Any, ...]) -> str:
        """Joined texts, for compiled templates."""
        _measure_texts(parts)
        return "".join(map(str, parts))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        meter = running()
        if meter is not None:
            __self._measure_call(meter, __obj, args)
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str) and __obj.__name__ in READERS:
            names = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            return __self._shade.read(text, __obj.__name__, args, names)
        return super().call(__context, __obj, *args, **kwargs)

    def _measure_call(self, meter: Meter, called: Any, args: tuple[Any, ...]) -> None:
        """Raises DearError."""
        meter.step()
        owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        if isinstance(owner, str):
            if name == "replace" and len(args) > 1:
                _measure_replaced(meter, owner, *args[:2])
            is_plain = name in PLAIN_TEXT_METHODS
        elif isinstance(owner, dict):
            is_plain = name in PLAIN_METHODS
        else:
            is_plain = isinstance(called, jinja2.runtime.Macro | jinja2.Undefined) or called in self._plain_calls
        if not is_plain:
            raise DearError(is_lasting=True)

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> Any:
        if (meter := running()) is not None:
            _measure_replaced(meter, str(text), old, new)
        return self._shade.read(str(text), "replace", (str(old), str(new), -1 if count is None else count), {})

    @jinja2.pass_eval_context
    def _join(
        self, context: jinja2.nodes.EvalContext, values: Iterable[Any], d: str = "", attribute: str | int | None = None
    ) -> str:
        if (meter := running()) is not None:
            values = [*values]
            _measure_texts(values)
            meter.text(len(values) * len(str(d)))
        return jinja2.filters.do_join(context, values, d, attribute)

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
        """Serialise to JSON. Jinja's own filter escapes HTML, which templates don't expect."""
        write = partial(json.dumps, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
        if (meter := running()) is not None:
            meter.step()
            _refuse_made(value)
            if indent is not None and len(self._shade.written(write, value)) * max(1, indent) > MAX_INDENTED_CHARS:
                raise DearError(is_lasting=False)
        return self._shade.written(partial(write, indent=indent), value)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or power unless it could be large. Raises TemplateError."""
        if operator in ("+", "%") and (meter := running()) is not None:
            _measure_binop(meter, operator, left, right)
        if operator == "**" or (operator == "*" and _product_size(left, right) > MAX_PRODUCT):
            raise jinja2.TemplateError(f"{operator!r} of these values is not allowed")
        return super().call_binop(context, operator, left, right)


def _product_size(left: Any, right: Any) -> int:
    """Length of a repeated text or list; 0 for a product of numbers."""
    if isinstance(left, int) and isinstance(right, str | list | tuple):
        left, right = right, left
    return len(left) * max(right, 0) if isinstance(left, str | list | tuple) and isinstance(right, int) else 0


def _as_data(part: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
    """A constant text, marked as the template's own."""
    if isinstance(part, jinja2.nodes.Const) and isinstance(part.value, str):
        return jinja2.nodes.TemplateData(part.value, lineno=part.lineno)
    return part


def _measure_binop(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Check an operator. Raises DearError for `+` of anything but numbers and texts, and for formatting of texts."""
    meter.step()
    if isinstance(left, int | float) and isinstance(right, int | float):
        return
    if operator == "%":
        raise DearError(is_lasting=True)
    _measure_texts((left, right))


def _measure_texts(parts: Iterable[Any]) -> None:
    """Check the length of joined texts. Raises DearError if it is too long."""
    if (meter := running()) is not None:
        chars = 0
        for part in meter.each(parts):
            _refuse_made(part)
            chars += len(part if isinstance(part, str) else str(part))
        meter.text(chars)


def _measure_replaced(meter: Meter, text: str, old: Any, new: Any) -> None:
    """Raises DearError."""
    more = len(str(new)) - len(str(old))
    if more > 0:
        meter.text(len(text) + more * (len(text) + 1 if not old else text.count(str(old))))


def _refuse_made(value: Any) -> None:
    """Refuse a list or object built by the template, whose parts may be repeated many times. Raises DearError."""
    if type(value) in (list, tuple, dict):
        raise DearError(is_lasting=True)


def _measured_string(string: Callable[[Any], str], value: Any) -> str:
    if running() is not None:
        _refuse_made(value)
    return string(value)


def _each(values: Iterable[Any]) -> Iterable[Any]:
    """The values of a loop."""
    meter = running()
    return values if meter is None else meter.each(values)


class _GenerationBlock(jinja2.ext.Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks tokens for training; only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compared(test: Callable[..., bool], comparable: Callable[[Any], Any], *operands: Any) -> bool:
    return test(*map(comparable, operands))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
