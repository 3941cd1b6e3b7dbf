"""The formats of families whose folders bring no response template, as tables."""

from __future__ import annotations

from gateway.parsing.format import CallIds, Exit, Format, Means, Reasoning, State, Wire

THINK = Reasoning(name="think", opens="<think>", closes="</think>")
REASONINGS: dict[str, Reasoning] = {
    "think": THINK,
    "deepseek_r1": Reasoning(name="deepseek_r1", opens="<think>", closes="</think>", begins_open=True),
    "mistral": Reasoning(name="mistral", opens="[THINK]", closes="[/THINK]"),
    "seed": Reasoning(name="seed", opens="<seed:think>", closes="</seed:think>"),
}

_NAME = r"(?P<name>\S+)"
_KEY = r"(?P<key>.+)"
_CONTENT = Means.CONTENT


def _opens(on: str, to: str, *, first: bool = False, keeps: bool = False) -> Exit:
    return Exit(on=on, to=to, calls=True, first=first, keeps=keeps)


def _content(*exits: Exit) -> State:
    return State(means=_CONTENT, exits=exits)


def _markup(*exits: Exit, in_call: bool = False) -> State:
    return State(means=Means.DROP, exits=exits, in_call=in_call)


def _header(*exits: Exit, in_call: bool = False) -> State:
    return State(means=Means.HEADER, exits=exits, in_call=in_call)


def _value(*exits: Exit) -> State:
    return State(means=Means.VALUE, exits=exits, in_call=True)


def _json(*exits: Exit, quote: str = "") -> State:
    return State(means=Means.JSON, exits=exits, in_call=True, quote=quote)


HERMES = Format(
    name="hermes",
    states={
        "content": _content(_opens("<tool_call>", "call")),
        "call": State(means=Means.JSON_CALLS, exits=(Exit(on="</tool_call>", to="content"),)),
    },
    wire=Wire(call='<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', between="\n"),
)

QWEN3_CODER = Format(
    name="qwen3_coder",
    states={
        "content": _content(_opens("<tool_call>", "call"), _opens("<function=", "name")),
        "call": _markup(Exit(on="<function=", to="name"), Exit(on="</tool_call>", to="content")),
        "name": _header(Exit(on=">", to="arguments", reads=_NAME)),
        "arguments": _markup(
            Exit(on="<parameter=", to="key"),
            Exit(on="</function>", to="call"),
            Exit(on="</tool_call>", to="content"),
            in_call=True,
        ),
        "key": _header(Exit(on=">", to="value", reads=_KEY), in_call=True),
        "value": _value(
            Exit(on="</parameter>", to="arguments"), Exit(on="</tool_call>", to="content", token_only=True)
        ),
    },
    wire=Wire(
        call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        between="\n",
        argument="<parameter={key}>\n{value}\n</parameter>\n",
        ends_value="</parameter>",
    ),
)

MINIMAX_M2 = Format(
    name="minimax_m2",
    states={
        "content": _content(_opens("<minimax:tool_call>", "call")),
        "call": _markup(Exit(on='<invoke name="', to="name"), Exit(on="</minimax:tool_call>", to="content")),
        "name": _header(Exit(on='">', to="arguments", reads=_NAME)),
        "arguments": _markup(
            Exit(on='<parameter name="', to="key"),
            Exit(on="</invoke>", to="call"),
            Exit(on="</minimax:tool_call>", to="content"),
            in_call=True,
        ),
        "key": _header(Exit(on='">', to="value", reads=_KEY), in_call=True),
        "value": _value(Exit(on="</parameter>", to="arguments")),
    },
    wire=Wire(
        opens="<minimax:tool_call>\n",
        call='<invoke name="{name}">\n{arguments}</invoke>\n',
        closes="</minimax:tool_call>",
        argument='<parameter name="{key}">{value}</parameter>\n',
        ends_value="</parameter>",
    ),
)

GLM = Format(
    name="glm",
    states={
        "content": _content(_opens("<tool_call>", "name")),
        "name": _header(
            Exit(on="<arg_key>", to="key", reads=_NAME), Exit(on="</tool_call>", to="no_arguments", reads=_NAME)
        ),
        "no_arguments": _markup(Exit(on="<tool_call>", to="name"), in_call=True),
        "key": _header(Exit(on="</arg_key>", to="before_value", reads=_KEY), in_call=True),
        "before_value": _markup(Exit(on="<arg_value>", to="value"), in_call=True),
        "value": _value(Exit(on="</arg_value>", to="arguments")),
        "arguments": _markup(Exit(on="<arg_key>", to="key"), Exit(on="</tool_call>", to="content"), in_call=True),
    },
    wire=Wire(
        call="<tool_call>{name}\n{arguments}</tool_call>",
        between="\n",
        argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        ends_value="</arg_value>",
    ),
)

LLAMA3_JSON = Format(
    name="llama3_json",
    states={
        "content": _content(_opens("<|python_tag|>", "calls"), _opens("{", "bare", first=True, keeps=True)),
        "calls": State(means=Means.JSON_CALLS),
        "bare": State(means=Means.JSON_CALLS, is_guess=True),
    },
    stops=("<|eom_id|>",),
    wire=Wire(call='{"name": "{name}", "parameters": {arguments}}', between="; ", is_telling=False),
)

PYTHONIC = Format(
    name="pythonic",
    states={
        "content": _content(
            _opens("<|python_start|>", "calls"),
            _opens("<function_calls>", "lines"),
            _opens("[", "bare", first=True, keeps=True),
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

MISTRAL = Format(
    name="mistral",
    states={
        "content": _content(_opens("[TOOL_CALLS]", "name")),
        "name": _header(
            Exit(on="[ARGS]", to="arguments", reads=_NAME),
            Exit(on="[CALL_ID]", to="id", reads=_NAME),
            Exit(on="[", to="list", reads=r"^$", keeps=True),
            Exit(on="{", to="arguments", reads=_NAME, keeps=True),
        ),
        "id": _header(Exit(on="[ARGS]", to="arguments"), in_call=True),
        "arguments": _json(Exit(on="[TOOL_CALLS]", to="name")),
        "list": State(means=Means.JSON_CALLS),
    },
    ids=CallIds.MISTRAL,
    wire=Wire(call="[TOOL_CALLS]{name}[ARGS]{arguments}"),
)

MISTRAL_LIST = Format(
    name="mistral_list",
    states=MISTRAL.states,
    ids=CallIds.MISTRAL,
    wire=Wire(
        opens="[TOOL_CALLS][", call='{"name": "{name}", "arguments": {arguments}}', between=", ", closes="]"
    ),
)  # fmt: skip

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

DEEPSEEK_V3 = Format(
    name="deepseek_v3",
    states={
        "content": _content(_opens(_BEGIN, "calls"), _opens(_CALL, "kind")),
        "calls": _markup(Exit(on=_CALL, to="kind"), Exit(on=_END, to="content")),
        "kind": _markup(Exit(on=_SEP, to="name")),
        "name": _header(Exit(on="```json\n", to="arguments", reads=_NAME)),
        "arguments": _json(Exit(on="\n```", to="calls"), Exit(on=_CALL_END, to="calls")),
    },
    wire=Wire(
        opens=_BEGIN,
        call=_CALL + "function" + _SEP + "{name}\n```json\n{arguments}\n```" + _CALL_END,
        between="\n",
        closes=_END,
    ),
)

DEEPSEEK_V31 = Format(
    name="deepseek_v31",
    states={
        "content": _content(_opens(_BEGIN, "calls"), _opens(_CALL, "name")),
        "calls": _markup(Exit(on=_CALL, to="name"), Exit(on=_END, to="content")),
        "name": _header(Exit(on=_SEP, to="arguments", reads=_NAME)),
        "arguments": _json(Exit(on=_CALL_END, to="calls")),
    },
    wire=Wire(opens=_BEGIN, call=_CALL + "{name}" + _SEP + "{arguments}" + _CALL_END, closes=_END),
)

_KIMI_NAME = r"^(?P<id>(?:functions\.)?(?P<name>\S+?)(?::\d+)?)$"
KIMI_K2 = Format(
    name="kimi_k2",
    states={
        "content": _content(
            _opens("<|tool_calls_section_begin|>", "calls"), _opens("<|tool_call_begin|>", "name")
        ),
        "calls": _markup(
            Exit(on="<|tool_call_begin|>", to="name"), Exit(on="<|tool_calls_section_end|>", to="content")
        ),
        "name": _header(Exit(on="<|tool_call_argument_begin|>", to="arguments", reads=_KIMI_NAME)),
        "arguments": _json(
            Exit(on="<|tool_call_end|>", to="calls"), Exit(on="<|tool_calls_section_end|>", to="content")
        ),
    },
    ids=CallIds.KIMI,
    wire=Wire(
        opens="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        closes="<|tool_calls_section_end|>",
    ),
)  # fmt: skip

GEMMA4 = Format(
    name="gemma4",
    states={
        "content": _content(_opens("<|tool_call>", "name"), Exit(on="<|channel>", to="channel")),
        "channel": _header(Exit(on="\n", to="reasoning", reads="^thought$"), Exit(on="\n", to="content")),
        "reasoning": State(
            means=Means.REASONING, exits=(Exit(on="<channel|>", to="content"), _opens("<|tool_call>", "name"))
        ),
        "name": _header(Exit(on="{", to="arguments", reads=r"call:\s*(?P<name>\S+)", keeps=True)),
        "arguments": _json(Exit(on="<tool_call|>", to="content"), quote='<|"|>'),
    },
    stops=("<|tool_response>",),
    wire=Wire(call="<|tool_call>call:{name}{arguments}<tool_call|>", arguments="gemma"),
    opens_reasoning="<|channel>thought\n",
    closes_reasoning="<channel|>",
)

FUNCTION_GEMMA = Format(
    name="function_gemma",
    states={
        "content": _content(_opens("<start_function_call>", "name")),
        "name": _header(Exit(on="{", to="arguments", reads=r"call:\s*(?P<name>\S+)", keeps=True)),
        "arguments": _json(Exit(on="<end_function_call>", to="content"), quote="<escape>"),
    },
    stops=("<start_function_response>",),
)

_RECIPIENT = r"to=functions\.(?P<name>\S+?)(?=\s|<\||$)"
_NEXT = Exit(on="<|start|>", to="header")
HARMONY = Format(
    name="harmony",
    states={
        "start": _content(_NEXT, Exit(on="<|channel|>", to="header")),
        "header": _header(
            Exit(on="<|channel|>", to="rest_of_header", reads=_RECIPIENT, calls=True),
            Exit(on="<|channel|>", to="header"),
            Exit(on="<|constrain|>", to="rest_of_header", reads=_RECIPIENT, calls=True),
            Exit(on="<|message|>", to="arguments", reads=_RECIPIENT, calls=True),
            Exit(on="<|message|>", to="reasoning", reads=r"^(assistant\s*)?analysis"),
            Exit(on="<|message|>", to="content"),
        ),
        "rest_of_header": _markup(Exit(on="<|message|>", to="arguments"), in_call=True),
        "reasoning": State(means=Means.REASONING, exits=(Exit(on="<|end|>", to="start"), _NEXT)),
        "content": _content(Exit(on="<|end|>", to="start"), Exit(on="<|return|>", to="start"), _NEXT),
        "arguments": _json(Exit(on="<|call|>", to="start"), Exit(on="<|end|>", to="start"), _NEXT),
    },
    start="start",
    turn="<|start|>",
    stops=("<|call|>", "<|return|>"),
    wire=Wire(
        call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
        is_telling=False,
        plain="<|channel|>{channel}<|message|>{text}",
        next_part="<|end|><|start|>assistant",
    ),
    opens_reasoning="<|channel|>analysis<|message|>",
    closes_reasoning="<|end|><|start|>assistant",
)

CALLS: dict[str, Format] = {
    one.name: one
    for one in (
        HERMES, QWEN3_CODER, MINIMAX_M2, GLM, LLAMA3_JSON, PYTHONIC, OLMO3, MISTRAL, MISTRAL_LIST, DEEPSEEK_V3, DEEPSEEK_V31,
        KIMI_K2, GEMMA4, FUNCTION_GEMMA, HARMONY,
    )
}  # fmt: skip
