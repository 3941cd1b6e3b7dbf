"""Tables of formats whose calls, or arguments, are JSON."""

from __future__ import annotations

from gateway.parsing.format import (
    CallIds,
    Exit,
    Format,
    Means,
    State,
    Wire,
    arguments,
    content,
    header,
    json_calls,
    markup,
    opens,
)

_NAME = r"(?P<name>\S+)"
_CALL_IN_JSON = '{"name": "{name}", "arguments": {arguments}}'

HERMES = Format(
    name="hermes",
    states={
        "content": content(opens("<tool_call>", "call")),
        "call": json_calls(Exit(on="</tool_call>", to="content")),
    },
    wire=Wire(call='<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', between="\n"),
)

LLAMA3_JSON = Format(
    name="llama3_json",
    states={
        "content": content(opens("<|python_tag|>", "calls"), opens("{", "bare", first=True, keeps=True)),
        "calls": json_calls(),
        "bare": State(means=Means.JSON_CALLS, is_guess=True),
    },
    stops=("<|eom_id|>",),
    wire=Wire(call='{"name": "{name}", "parameters": {arguments}}', between="; ", is_telling=False),
)

MISTRAL = Format(
    name="mistral",
    states={
        "content": content(opens("[TOOL_CALLS]", "name")),
        "name": header(
            Exit(on="[ARGS]", to="arguments", reads=_NAME),
            Exit(on="[CALL_ID]", to="id", reads=_NAME),
            Exit(on="[", to="list", reads=r"^$", keeps=True),
            Exit(on="{", to="arguments", reads=_NAME, keeps=True),
        ),
        "id": header(Exit(on="[ARGS]", to="arguments"), in_call=True),
        "arguments": arguments(Exit(on="[TOOL_CALLS]", to="name")),
        "list": json_calls(),
    },
    ids=CallIds.MISTRAL,
    wire=Wire(call="[TOOL_CALLS]{name}[ARGS]{arguments}"),
)

MISTRAL_LIST = Format(
    name="mistral_list",
    states=MISTRAL.states,
    ids=CallIds.MISTRAL,
    wire=Wire(opens="[TOOL_CALLS][", call=_CALL_IN_JSON, between=", ", closes="]"),
)

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

DEEPSEEK_V3 = Format(
    name="deepseek_v3",
    states={
        "content": content(opens(_BEGIN, "calls"), opens(_CALL, "kind")),
        "calls": markup(Exit(on=_CALL, to="kind"), Exit(on=_END, to="content")),
        "kind": markup(Exit(on=_SEP, to="name")),
        "name": header(Exit(on="```json\n", to="arguments", reads=_NAME)),
        "arguments": arguments(Exit(on="\n```", to="calls"), Exit(on=_CALL_END, to="calls")),
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
        "content": content(opens(_BEGIN, "calls"), opens(_CALL, "name")),
        "calls": markup(Exit(on=_CALL, to="name"), Exit(on=_END, to="content")),
        "name": header(Exit(on=_SEP, to="arguments", reads=_NAME)),
        "arguments": arguments(Exit(on=_CALL_END, to="calls")),
    },
    wire=Wire(opens=_BEGIN, call=_CALL + "{name}" + _SEP + "{arguments}" + _CALL_END, closes=_END),
)

_KIMI_NAME = r"^(?P<id>(?:functions\.)?(?P<name>\S+?)(?::\d+)?)$"
KIMI_K2 = Format(
    name="kimi_k2",
    states={
        "content": content(
            opens("<|tool_calls_section_begin|>", "calls"), opens("<|tool_call_begin|>", "name")
        ),
        "calls": markup(
            Exit(on="<|tool_call_begin|>", to="name"), Exit(on="<|tool_calls_section_end|>", to="content")
        ),
        "name": header(Exit(on="<|tool_call_argument_begin|>", to="arguments", reads=_KIMI_NAME)),
        "arguments": arguments(
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
    reasoning="gemma4",
    states={
        "content": content(opens("<|tool_call>", "name"), Exit(on="<|channel>", to="channel")),
        "channel": header(Exit(on="\n", to="reasoning", reads="^thought$"), Exit(on="\n", to="content")),
        "reasoning": State(
            means=Means.REASONING, exits=(Exit(on="<channel|>", to="content"), opens("<|tool_call>", "name"))
        ),
        "name": header(Exit(on="{", to="arguments", reads=r"call:\s*(?P<name>\S+)", keeps=True)),
        "arguments": arguments(Exit(on="<tool_call|>", to="content"), quote='<|"|>'),
    },
    stops=("<|tool_response>",),
    wire=Wire(call="<|tool_call>call:{name}{arguments}<tool_call|>", arguments="gemma"),
    opens_reasoning="<|channel>thought\n",
    closes_reasoning="<channel|>",
)

FUNCTION_GEMMA = Format(
    name="function_gemma",
    states={
        "content": content(opens("<start_function_call>", "name")),
        "name": header(Exit(on="{", to="arguments", reads=r"call:\s*(?P<name>\S+)", keeps=True)),
        "arguments": arguments(Exit(on="<end_function_call>", to="content"), quote="<escape>"),
    },
    stops=("<start_function_response>",),
)

_RECIPIENT = r"to=functions\.(?P<name>\S+?)(?=\s|<\||$)"
_NEXT = Exit(on="<|start|>", to="header")
HARMONY = Format(
    name="harmony",
    reasoning="harmony",
    states={
        "start": content(_NEXT, Exit(on="<|channel|>", to="header")),
        "header": header(
            Exit(on="<|channel|>", to="rest_of_header", reads=_RECIPIENT, calls=True),
            Exit(on="<|channel|>", to="header"),
            Exit(on="<|constrain|>", to="rest_of_header", reads=_RECIPIENT, calls=True),
            Exit(on="<|message|>", to="arguments", reads=_RECIPIENT, calls=True),
            Exit(on="<|message|>", to="reasoning", reads=r"^(assistant\s*)?analysis"),
            Exit(on="<|message|>", to="content"),
        ),
        "rest_of_header": markup(Exit(on="<|message|>", to="arguments"), in_call=True),
        "reasoning": State(means=Means.REASONING, exits=(Exit(on="<|end|>", to="start"), _NEXT)),
        "content": content(Exit(on="<|end|>", to="start"), Exit(on="<|return|>", to="start"), _NEXT),
        "arguments": arguments(Exit(on="<|call|>", to="start"), Exit(on="<|end|>", to="start"), _NEXT),
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

PHI4_MINI = Format(
    name="phi4_mini",
    states={
        "content": content(opens("<|tool_call|>", "calls"), opens("functools", "bare")),
        "calls": json_calls(Exit(on="<|/tool_call|>", to="content")),
        "bare": State(means=Means.JSON_CALLS, is_guess=True),
    },
    wire=Wire(opens="<|tool_call|>[", call=_CALL_IN_JSON, between=", ", closes="]<|/tool_call|>"),
)

GRANITE = Format(
    name="granite",
    states={
        "content": content(opens("<|tool_call|>", "calls"), opens("<tool_call>", "calls")),
        "calls": json_calls(Exit(on="</tool_call>", to="content")),
    },
    wire=Wire(opens="<|tool_call|>[", call=_CALL_IN_JSON, between=", ", closes="]"),
)

NEMOTRON = Format(
    name="nemotron",
    states={
        "content": content(opens("<TOOLCALL>", "calls")),
        "calls": json_calls(Exit(on="</TOOLCALL>", to="content")),
    },
    wire=Wire(opens="<TOOLCALL>[", call=_CALL_IN_JSON, between=", ", closes="]</TOOLCALL>"),
)

JAMBA = Format(
    name="jamba",
    states={
        "content": content(opens("<tool_calls>", "calls")),
        "calls": json_calls(Exit(on="</tool_calls>", to="content")),
    },
    wire=Wire(opens="<tool_calls>[\n    ", call=_CALL_IN_JSON, between=",\n    ", closes="\n]</tool_calls>"),
)

HUNYUAN = Format(
    name="hunyuan",
    states={
        # With tools it first names the assistant as the speaker.
        "content": content(*JAMBA.states["content"].exits, opens("助手：", "content", first=True)),
        "calls": JAMBA.states["calls"],
    },
    wire=Wire(opens="<tool_calls>[", call=_CALL_IN_JSON, between=", ", closes="]</tool_calls>"),
)

INTERNLM = Format(
    name="internlm",
    states={
        "content": content(opens("<|action_start|>", "kind")),
        "kind": markup(Exit(on="<|plugin|>", to="call"), Exit(on="<|action_end|>", to="content")),
        "call": json_calls(Exit(on="<|action_end|>", to="content")),
    },
    wire=Wire(
        call='<|action_start|><|plugin|>\n{"name": "{name}", "parameters": {arguments}}<|action_end|>', between="\n"
    ),
)

APERTUS = Format(
    name="apertus",
    states={
        "content": content(opens("<|tools_prefix|>", "calls")),
        "calls": json_calls(Exit(on="<|tools_suffix|>", to="content"), name_key=""),
    },
    stops=("<|tools_suffix|>",),  # results follow in the same message
    wire=Wire(opens="<|tools_prefix|>[", call='{"{name}": {arguments}}', between=", ", closes="]<|tools_suffix|>"),
)

_ACTION = opens("<|START_ACTION|>", "calls")
_SAYS = tuple(
    Exit(on=tag, to="content") for tag in ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
)
COHERE = Format(
    name="cohere",
    reasoning="cohere",
    states={
        "content": content(_ACTION, Exit(on="<|START_THINKING|>", to="reasoning"), *_SAYS),
        "reasoning": State(
            means=Means.REASONING, exits=(Exit(on="<|END_THINKING|>", to="content"), _ACTION, *_SAYS)
        ),
        "calls": json_calls(Exit(on="<|END_ACTION|>", to="content"), name_key="tool_name"),
    },
    wire=Wire(
        opens="<|START_ACTION|>[\n",
        call='    {"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}',
        between=",\n",
        closes="\n]<|END_ACTION|>",
        plain="<|START_RESPONSE|>{text}",
    ),
    opens_reasoning="<|START_THINKING|>",
    closes_reasoning="<|END_THINKING|>",
)  # fmt: skip

COMMAND_R = Format(
    name="command_r",
    states={
        "content": content(*(opens(f"Action:{space}```json", "calls") for space in (" ", "\n", ""))),
        "calls": json_calls(Exit(on="```", to="content"), name_key="tool_name"),
    },
    wire=Wire(
        opens="Action: ```json\n[\n",
        call='    {\n        "tool_name": "{name}",\n        "parameters": {arguments}\n    }',
        between=",\n",
        closes="\n]```",
    ),
)

_PARTS = (
    opens("<|tool_calls|>", "calls"),
    opens("<|tool_call:begin|>", "id"),
    Exit(on="<|think|>", to="reasoning"),
    Exit(on="<|content|>", to="content"),
    *(Exit(on=tag, to="between") for tag in ("<|begin|>", "<|end|>", "<|flush|>")),
)
SOLAR = Format(
    name="solar",
    reasoning="solar",
    states={
        "content": content(*_PARTS),
        "between": markup(*_PARTS),
        "reasoning": State(means=Means.REASONING, exits=_PARTS),
        "calls": markup(
            Exit(on="<|tool_call:begin|>", to="id"), *(Exit(on=tag, to="between") for tag in ("<|calls|>", "<|end|>"))
        ),
        "id": markup(Exit(on="<|tool_call:name|>", to="name")),
        "name": header(Exit(on="<|tool_call:args|>", to="arguments", reads=_NAME)),
        "arguments": arguments(Exit(on="<|tool_call:end|>", to="calls"), Exit(on="<|calls|>", to="between")),
    },
    turn="<|begin|>",
    stops=("<|flush|>", "<|calls|>"),
    ids=CallIds.SOLAR,
    wire=Wire(
        opens="<|tool_calls|>",
        call="<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",
        closes="<|calls|>",
        plain="<|content|>{text}",
    ),
    opens_reasoning="<|think|>",
    closes_reasoning="<|end|><|begin|>assistant",
)
