"""Tables of formats that write a call's arguments one by one, in tags or in Python's notation."""

from __future__ import annotations

from gateway.parsing.format import Exit, Format, Means, State, Wire, content, header, json_calls, markup, opens, value

_NAME = r"(?P<name>\S+)"
_KEY = r"(?P<key>.+)"
_TEXT = frozenset({"string"})
_NO_TEXT = frozenset({"null", "boolean", "integer", "number", "array", "object"})


def _functions(name: str, tag: str, argument: str) -> Format:
    """`<tag><function=f><parameter=k>v</parameter></function></tag>`"""
    begin, end = f"<{tag}>", f"</{tag}>"
    return Format(
        name=name,
        states={
            "content": content(opens(begin, "call"), opens("<function=", "name")),
            "call": markup(Exit(on="<function=", to="name"), Exit(on=end, to="content")),
            "name": header(Exit(on=">", to="arguments", reads=_NAME)),
            "arguments": markup(
                Exit(on="<parameter=", to="key"),
                Exit(on="</function>", to="call"),
                Exit(on=end, to="content"),
                in_call=True,
            ),
            "key": header(Exit(on=">", to="value", reads=_KEY), in_call=True),
            "value": value(Exit(on="</parameter>", to="arguments"), Exit(on=end, to="content", token_only=True)),
        },
        wire=Wire(
            call=f"{begin}\n<function={{name}}>\n{{arguments}}</function>\n{end}",
            between="\n",
            argument=argument,
            ends_value="</parameter>",
        ),
    )


QWEN3_CODER = _functions("qwen3_coder", "tool_call", "<parameter={key}>\n{value}\n</parameter>\n")
SEED = _functions("seed", "seed:tool_call", "<parameter={key}>{value}</parameter>\n")


def _invocations(name: str, block: str, *others: str, mark: str = "") -> Format:
    """`<block><invoke name="f"><parameter name="k">v</parameter></invoke></block>`, each name after `mark`.

    Where there is a mark, an argument says whether it is text.
    """
    ends = tuple(Exit(on=f"</{mark}{one}>", to="content") for one in (block, *others))
    begin, end = f'<{mark}invoke name="', f"</{mark}parameter>"
    says = ' string="{is_text}"' if mark else ""
    said = {
        f"value {kind}": value(Exit(on=end, to="arguments"), types=types)
        for kind, types in (("true", _TEXT), ("false", _NO_TEXT))
        if mark
    }
    return Format(
        name=name,
        states={
            "content": content(*(opens(f"<{mark}{one}>", "call") for one in (block, *others))),
            "call": markup(Exit(on=begin, to="name"), *ends),
            "name": header(Exit(on='">', to="arguments", reads=_NAME)),
            "arguments": markup(
                Exit(on=f'<{mark}parameter name="', to="key"),
                Exit(on=f"</{mark}invoke>", to="call"),
                *ends,
                in_call=True,
            ),
            "key": header(
                *(Exit(on=f'" string="{one.split()[1]}">', to=one, reads=_KEY) for one in said),
                Exit(on='">', to="value", reads=_KEY),
                in_call=True,
            ),
            "value": value(Exit(on=end, to="arguments")),
            **said,
        },
        wire=Wire(
            opens=f"<{mark}{block}>\n",
            call=f'{begin}{{name}}">\n{{arguments}}</{mark}invoke>\n',
            closes=f"</{mark}{block}>",
            argument=f'<{mark}parameter name="{{key}}"{says}>{{value}}{end}\n',
            ends_value=end,
        ),
    )


MINIMAX_M2 = _invocations("minimax_m2", "minimax:tool_call")
DEEPSEEK_V32 = _invocations("deepseek_v32", "function_calls", "tool_calls", mark="｜DSML｜")


def _pairs(name: str, call: str, key: str, argument: str) -> Format:
    """`<call>f<key>k</key><argument>v</argument></call>`"""
    begin, end = f"<{call}>", f"</{call}>"
    return Format(
        name=name,
        states={
            "content": content(opens(begin, "name")),
            "name": header(
                Exit(on=f"<{key}>", to="key", reads=_NAME),
                Exit(on=end, to="no_arguments", reads=_NAME),
                Exit(on="{", to="whole", reads="^$", keeps=True),
            ),
            "no_arguments": markup(Exit(on=begin, to="name"), in_call=True),
            "key": header(Exit(on=f"</{key}>", to="before_value", reads=_KEY), in_call=True),
            "before_value": markup(Exit(on=f"<{argument}>", to="value"), in_call=True),
            "value": value(Exit(on=f"</{argument}>", to="arguments")),
            "arguments": markup(Exit(on=f"<{key}>", to="key"), Exit(on=end, to="content"), in_call=True),
            "whole": json_calls(Exit(on=end, to="content")),
        },
        wire=Wire(
            call=f"{begin}{{name}}\n{{arguments}}{end}",
            between="\n",
            argument=f"<{key}>{{key}}</{key}>\n<{argument}>{{value}}</{argument}>\n",
            ends_value=f"</{argument}>",
        ),
    )


GLM = _pairs("glm", "tool_call", "arg_key", "arg_value")
LONGCAT_TAGS = _pairs("longcat_tags", "longcat_tool_call", "longcat_arg_key", "longcat_arg_value")
LONGCAT = Format(
    name="longcat",
    states=LONGCAT_TAGS.states,
    wire=Wire(
        call='<longcat_tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</longcat_tool_call>', between="\n"
    ),
)


def _hy(name: str, suffix: str) -> Format:
    """Key-value pairs after a mark that ends the name, in a block; all tags have a suffix."""

    def tag(text: str, slash: str = "") -> str:
        return f"<{slash}{text}{suffix}>"

    begin, end, block_end = tag("tool_call"), tag("tool_call", "/"), tag("tool_calls", "/")
    return Format(
        name=name,
        states={
            "content": content(opens(tag("tool_calls"), "calls"), opens(begin, "name")),
            "calls": markup(Exit(on=begin, to="name"), Exit(on=block_end, to="content")),
            "name": header(
                *(Exit(on=on, to="arguments", reads=_NAME) for on in (tag("tool_sep"), end)),
                Exit(on=tag("arg_key"), to="key", reads=_NAME),
            ),
            "arguments": markup(
                Exit(on=tag("arg_key"), to="key"),
                Exit(on=end, to="calls"),
                Exit(on=begin, to="name"),
                Exit(on=block_end, to="content"),
                in_call=True,
            ),
            "key": header(Exit(on=tag("arg_key", "/"), to="before_value", reads=_KEY), in_call=True),
            "before_value": markup(Exit(on=tag("arg_value"), to="value"), in_call=True),
            "value": value(Exit(on=tag("arg_value", "/"), to="arguments")),
        },
        wire=Wire(
            opens=tag("tool_calls") + "\n",
            call=f"{begin}{{name}}{tag('tool_sep')}\n{{arguments}}{end}\n",
            closes=block_end,
            argument=f"{tag('arg_key')}{{key}}{tag('arg_key', '/')}\n{tag('arg_value')}{{value}}{tag('arg_value', '/')}\n",
            ends_value=tag("arg_value", "/"),
        ),
    )


HY_V3 = _hy("hy_v3", ":opensource")
HY_V3_PREVIEW = _hy("hy_v3_preview", "")

PYTHONIC = Format(
    name="pythonic",
    states={
        "content": content(
            opens("<|python_start|>", "calls"),
            opens("<function_calls>", "lines"),
            opens("[", "bare", first=True, keeps=True),
        ),
        "calls": State(means=Means.PYTHON_CALLS, exits=(Exit(on="<|python_end|>", to="content"),)),
        "lines": State(means=Means.PYTHON_CALLS, exits=(Exit(on="</function_calls>", to="content"),)),
        "bare": State(means=Means.PYTHON_CALLS, is_guess=True),
    },
    wire=Wire(opens="[", call="{name}({arguments})", between=", ", closes="]", arguments="python", is_telling=False),
)

OLMO3 = Format(
    name="olmo3",
    states=PYTHONIC.states,
    wire=Wire(
        opens="<function_calls>",
        call="{name}({arguments})",
        between="\n",
        closes="</function_calls>",
        arguments="python",
    ),
)

LFM2 = Format(
    name="lfm2",
    states={
        "content": content(opens("<|tool_call_start|>", "calls")),
        "calls": State(means=Means.CALLS, exits=(Exit(on="<|tool_call_end|>", to="content"),)),
    },
    wire=Wire(
        opens="<|tool_call_start|>[",
        call="{name}({arguments})",
        between=", ",
        closes="]<|tool_call_end|>",
        arguments="python",
    ),
)
