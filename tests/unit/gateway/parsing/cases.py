"""Answers in every format, whole and odd."""

from __future__ import annotations

from dataclasses import dataclass

from tests.unit.gateway.parsing.formats import Said

CITY = {"city": "Zürich", "days": 3}
B, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
C, D, S = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


@dataclass
class Case:
    calls: str
    text: str
    said: Said
    reasoning: str = "auto"
    marks: tuple[str, ...] = ()  # tokens of the vocabulary
    prompt: str = ""

    @property
    def vocabulary(self) -> dict[str, int]:
        return {mark: 1_000 + index for index, mark in enumerate(self.marks)}


THINK = ("<think>", "</think>")
TAGS = ("<tool_call>", "</tool_call>", *THINK)
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")
SEED = ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>")
M = "｜DSML｜"
HY = (
    "<tool_calls>",
    "</tool_calls>",
    "<tool_call>",
    "</tool_call>",
    "<tool_sep>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
LONGCAT = ("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_think>", "</longcat_think>")
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
APERTUS = ("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>")
COHERE = tuple(f"<|{end}_{part}|>" for part in ("THINKING", "ACTION", "RESPONSE", "TEXT") for end in ("START", "END"))
SOLAR = (
    "<|think|>",
    "<|end|>",
    "<|begin|>",
    "<|content|>",
    "<|flush|>",
    "<|calls|>",
    "<|tool_calls|>",
    "<|tool_call:begin|>",
    "<|tool_call:end|>",
    "<|tool_call:name|>",
    "<|tool_call:args|>",
)
CASES = {
    "hermes": Case(
        "hermes", 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>',
        Said("Let me look.", "", [("weather", CITY)]), marks=TAGS,
    ),
    "hermes, without tokens for its tags": Case(
        "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        Said("", "", [("weather", CITY), ("now", {})]),
    ),
    "hermes, arguments first, or missing, or text": Case(
        "hermes", '<tool_call>{"arguments": {"city": "Zürich", "days": 3}, "name": "weather"}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Zürich\\", \\"days\\": 3}"}</tool_call>'
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {"a": [1]}}}</tool_call>',
        Said("", "", [("weather", CITY), ("now", {}), ("weather", CITY), ("now", {"a": [1]})]), marks=TAGS,
    ),
    "hermes, what models write wrong": Case(
        "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\d\'", "exact": True, "tags": ["x",],}\n</tool_call>',
        Said("", "", [("weather", {"city": "a\nb\\d'", "exact": True, "tags": ["x"]})]), marks=TAGS,
    ),
    "hermes, its own tags inside a string": Case(
        "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call> <tool_call>"}}</tool_call>!',
        Said("!", "", [("weather", {"city": "</tool_call> <tool_call>"})]),
    ),
    "hermes, no call at all": Case(
        "hermes", "So <tool_call>nothing</tool_call> it is", Said("So <tool_call>nothing</tool_call> it is"), marks=TAGS
    ),
    "hermes, text that only looks like a beginning": Case("hermes", "a < b <tool and <tool_", Said("a < b <tool and <tool_")),
    "hermes, thinking": Case(
        "hermes", '<think>\nWell, <tool_x> is\n\nit\n</think>\n\nYes.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        Said("Yes.", "Well, <tool_x> is\n\nit", [("now", {})]), marks=TAGS, reasoning="think",
    ),
    "hermes, thinking that a call ends": Case(
        "hermes", 'Hm.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>', Said("", "Hm.", [("now", {})]), marks=TAGS,
        reasoning="think", prompt="assistant\n<think>\n",
    ),
    "thinking, begun by the prompt": Case("none", "\nHm.\n</think>\n\nYes. ", Said("Yes. ", "Hm."), reasoning="think", prompt="x\n<think>"),
    "thinking, ended by the prompt": Case(
        "none", "Yes <think>.", Said("Yes <think>."), reasoning="think", prompt="assistant\n<think>\n\n</think>\n\n"
    ),
    "thinking, without an opening": Case("none", "Hm.</think>Yes", Said("Yes", "Hm."), reasoning="deepseek_r1", marks=THINK),
    "thinking, closed though never opened": Case("none", "Yes</think>", Said("Yes"), reasoning="think", marks=THINK),
    "qwen3_coder": Case(
        "qwen3_coder", "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\n 12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=tags>\n[\"a\", \"b\"]\n</parameter>\n<parameter=where>\n{'x': 1}\n</parameter>\n"
        "<parameter=unit>C</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        Said("I look.", "", [
            ("weather", {"city": " 12", "days": 3, "exact": True, "tags": ["a", "b"], "where": {"x": 1}, "unit": "C", "note": None}),
            ("now", {}),
        ]), marks=TAGS, reasoning="none",
    ),
    "qwen3_coder, code as a value": Case(
        "qwen3_coder", '<tool_call>\n<function=weather>\n<parameter=city>\nif a < b:\n\tprint("</x>\\n")\n\n</parameter>\n</function>\n</tool_call>',
        Said("", "", [("weather", {"city": 'if a < b:\n\tprint("</x>\\n")\n'})]),
    ),
    "qwen3_coder, an integer that is none": Case(
        "qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=days>\nsome\n</parameter>\n</function>\n</tool_call>",
        Said("", "", [("weather", {"days": "some"})]), marks=TAGS, reasoning="none",
    ),
    "minimax_m2": Case(
        "minimax_m2", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        Said("", "", [("weather", CITY), ("now", {})]), marks=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "glm": Case(
        "glm", "Ok.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        Said("Ok.", "", [("weather", CITY), ("now", {})]),
        marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "llama3_json": Case(
        "llama3_json", '<|python_tag|>{"name": "weather", "parameters": {"city": "Zürich", "days": 3}}; {"name": "now", "parameters": {}}',
        Said("", "", [("weather", CITY), ("now", {})]), marks=("<|python_tag|>",),
    ),
    "llama3_json, bare": Case(
        "llama3_json", '\n{"type": "function", "name": "weather", "parameters": {"city": "Zürich", "days": 3}}',
        Said("", "", [("weather", CITY)]), marks=("<|python_tag|>",),
    ),
    "llama3_json, JSON that is an answer": Case(
        "llama3_json", '{"name": "Anna", "age": {"years": 3}} and more', Said('{"name": "Anna", "age": {"years": 3}} and more')
    ),
    "llama3_json, JSON after text": Case(
        "llama3_json", 'So: {"name": "now", "parameters": {}}', Said('So: {"name": "now", "parameters": {}}')
    ),
    "pythonic": Case(
        "pythonic", "[weather(city='Zü, (ri\\'ch', days=-3, exact=true, where={'a': [1, None]}), now()]",
        Said("", "", [("weather", {"city": "Zü, (ri'ch", "days": -3, "exact": True, "where": {"a": [1, None]}}), ("now", {})]),
    ),
    "pythonic, a list that is an answer": Case("pythonic", "[1, 2] is a list", Said("[1, 2] is a list")),
    "olmo3": Case(
        "olmo3", 'Yes\n<function_calls>weather(city="Zürich", days=3)\nnow()</function_calls>', Said("Yes", "", [("weather", CITY), ("now", {})])
    ),
    "mistral": Case(
        "mistral", 'Yes[TOOL_CALLS]weather[ARGS]{"city": "Zürich", "days": 3}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
        Said("Yes", "", [("weather", CITY), ("now", {})]), marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "mistral, without a token for arguments": Case(
        "mistral", '[TOOL_CALLS]weather{"city": "Zürich", "days": 3}', Said("", "", [("weather", CITY)]), marks=("[TOOL_CALLS]",)
    ),
    "mistral_list": Case(
        "mistral_list", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}, {"name": "now", "arguments": {}}]',
        Said("", "", [("weather", CITY), ("now", {})]), marks=("[TOOL_CALLS]",),
    ),
    "mistral, thinking": Case(
        "mistral", "[THINK]Hm[/THINK]Yes", Said("Yes", "Hm"), reasoning="mistral", marks=("[THINK]", "[/THINK]", "[TOOL_CALLS]")
    ),
    "deepseek_v3": Case(
        "deepseek_v3", f'Ok{B}{C}function{S}weather\n```json\n{{"city": "Zürich", "days": 3}}\n```{D}\n{C}function{S}now\n```json\n{{}}\n```{D}{E}',
        Said("Ok", "", [("weather", CITY), ("now", {})]), marks=(B, E, C, D, S),
    ),
    "deepseek_v31": Case(
        "deepseek_v31", f'Hm</think>Ok\n\n{B}{C}weather{S}{{"city": "Zürich", "days": 3}}{D}{C}now{S}{{}}{D}{E}',
        Said("Ok", "Hm", [("weather", CITY), ("now", {})]), marks=(B, E, C, D, S, *THINK), reasoning="think", prompt="<think>",
    ),
    "kimi_k2": Case(
        "kimi_k2", 'Ok<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Zürich", '
        '"days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>',
        Said("Ok", "", [("weather", CITY), ("now", {})]),
        marks=("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
               "<|tool_calls_section_end|>"),
    ),
    "gemma4": Case(
        "gemma4", '<|channel>thought\nHm\n<channel|>Ok<|tool_call>call:weather{city:<|"|>Zür"i\\ch<|"|>,days:3,where:{a:[true,null]}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        Said("Ok", "Hm", [("weather", {"city": 'Zür"i\\ch', "days": 3, "where": {"a": [True, None]}}), ("now", {})]),
        marks=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "function_gemma": Case(
        "function_gemma", "<start_function_call>call:weather{city:<escape>Zürich<escape>, days:3}<end_function_call>",
        Said("", "", [("weather", CITY)]), marks=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "harmony": Case(
        "harmony", "<|channel|>analysis<|message|>Hm, look<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Zürich", "days": 3}<|call|>',
        Said("I look.", "Hm, look", [("weather", CITY)]), marks=HARMONY, prompt="<|start|>assistant",
    ),
    "harmony, the recipient first": Case(
        "harmony", '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>',
        Said("", "", [("now", {})]), marks=HARMONY,
    ),
    "harmony, an answer": Case(
        "harmony", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", Said("Yes.", "Hm"),
        marks=HARMONY, prompt="<|start|>user<|message|>x<|end|><|start|>assistant",
    ),
    "gemma4, a call amid thoughts": Case(
        "gemma4", "<|channel>thought\nHm<|tool_call>call:now{}<tool_call|>", Said("", "Hm", [("now", {})]),
        marks=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "glm, JSON all the same": Case(
        "glm", '<tool_call>{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}</tool_call>', Said("", "", [("weather", CITY)]),
    ),
    "seed": Case(
        "seed", "<seed:think>Hm</seed:think>Ok.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Zürich</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        Said("Ok.", "Hm", [("weather", CITY), ("now", {})]), reasoning="seed", marks=SEED,
    ),
    "deepseek_v32": Case(
        "deepseek_v32", f'Hm</think>Ok\n\n<{M}function_calls>\n<{M}invoke name="weather">\n<{M}parameter name="city" string="true">Zürich'
        f'</{M}parameter>\n<{M}parameter name="days" string="false">3</{M}parameter>\n</{M}invoke>\n<{M}invoke name="now">\n</{M}invoke>\n'
        f"</{M}function_calls>",
        Said("Ok", "Hm", [("weather", CITY), ("now", {})]), marks=(M, *THINK), reasoning="think", prompt="<think>",
    ),
    "deepseek_v32, arguments of which no schema says anything": Case(
        "deepseek_v32", f'<{M}tool_calls>\n<{M}invoke name="now">\n<{M}parameter name="a" string="true">3</{M}parameter>\n'
        f'<{M}parameter name="b" string="false">[1, null]</{M}parameter>\n<{M}parameter name="c">4</{M}parameter>\n</{M}invoke>\n</{M}tool_calls>',
        Said("", "", [("now", {"a": "3", "b": [1, None], "c": "4"})]),
    ),
    "hy_v3": Case(
        "hy_v3", "<think:opensource>Hm</think:opensource>Ok<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Zürich</arg_value:opensource>\n<arg_key:opensource>days"
        "</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>now"
        "<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        Said("Ok", "Hm", [("weather", CITY), ("now", {})]), reasoning="hy_v3", marks=tuple(one[:-1] + ":opensource>" for one in HY),
    ),
    "hy_v3_preview": Case(
        "hy_v3_preview", "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now<tool_sep></tool_call>\n</tool_calls>",
        Said("", "", [("weather", CITY), ("now", {})]), marks=HY,
    ),
    "hy_v3_preview, no mark behind the name": Case(
        "hy_v3_preview", "<tool_calls><tool_call>weather<arg_key>city</arg_key><arg_value>x</arg_value></tool_call><tool_call>now</tool_call>",
        Said("", "", [("weather", {"city": "x"}), ("now", {})]),
    ),
    "longcat": Case(
        "longcat", '<longcat_think>Hm</longcat_think>Ok.<longcat_tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n'
        '</longcat_tool_call>\n<longcat_tool_call>\n{"name": "now", "arguments": {}}\n</longcat_tool_call>',
        Said("Ok.", "Hm", [("weather", CITY), ("now", {})]), reasoning="longcat", marks=LONGCAT,
    ),
    "longcat_tags": Case(
        "longcat_tags", "<longcat_tool_call>weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Zürich</longcat_arg_value>\n"
        "<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>\n"
        "<longcat_tool_call>now\n</longcat_tool_call>",
        Said("", "", [("weather", CITY), ("now", {})]),
    ),
    "lfm2": Case(
        "lfm2", "<|tool_call_start|>[weather(city='Zürich', days=3), now()]<|tool_call_end|>Looking.",
        Said("Looking.", "", [("weather", CITY), ("now", {})]), marks=LFM2,
    ),
    "lfm2, in JSON and thinking": Case(
        "lfm2", '<think>Hm</think>Ok<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}, '
        '{"name": "now", "arguments": {}}]<|tool_call_end|>',
        Said("Ok", "Hm", [("weather", CITY), ("now", {})]), reasoning="think", marks=(*LFM2, *THINK),
    ),
    "lfm2, no call at all": Case(
        "lfm2", "So <|tool_call_start|>[none]<|tool_call_end|> it is", Said("So <|tool_call_start|>[none]<|tool_call_end|> it is"), marks=LFM2
    ),
    "phi4_mini": Case(
        "phi4_mini", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}, {"name": "now", "arguments": {}}]<|/tool_call|>',
        Said("", "", [("weather", CITY), ("now", {})]), marks=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "phi4_mini, by a word": Case(
        "phi4_mini", 'Ok. functools[{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}, {"name": "now", "arguments": {}}]',
        Said("Ok.", "", [("weather", CITY), ("now", {})]),
    ),
    "phi4_mini, the word in code": Case(
        "phi4_mini", "import functools\n\nfunctools.cache[1] functools[{1: 2}]", Said("import functools\n\nfunctools.cache[1] functools[{1: 2}]")
    ),
    "granite": Case(
        "granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}, {"name": "now", "arguments": {}}]',
        Said("", "", [("weather", CITY), ("now", {})]), marks=("<|tool_call|>",),
    ),
    "granite, thinking": Case(
        "granite", '<think>Hm</think>\n<response>So: <response>.</response>\n', Said("So: <response>.", "Hm"), reasoning="think_response",
    ),
    "granite, an answer with such tags": Case(
        "granite", "<response>1</response>", Said("<response>1</response>"), reasoning="think_response",
    ),
    "granite 3.1, thinking": Case(
        "granite", '<think>Hm</think><response>Ok <tool_call>[{"name": "now", "arguments": {}}]</tool_call> that</response>',
        Said("Ok that", "Hm", [("now", {})]), reasoning="think_response",
    ),
    "nemotron": Case(
        "nemotron", 'Hm\n</think>\n\nOk\n\n<TOOLCALL>[{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}, '
        '{"name": "now", "arguments": "{}"}]</TOOLCALL>',
        Said("Ok", "Hm", [("weather", CITY), ("now", {})]), reasoning="think", prompt="<SPECIAL_11>Assistant\n<think>\n",
    ),
    "apertus": Case(
        "apertus", '<|inner_prefix|>Hm<|inner_suffix|>Ok<|tools_prefix|>[{"weather": {"city": "Zürich", "days": 3}}, {"now": {}}]<|tools_suffix|>',
        Said("Ok", "Hm", [("weather", CITY), ("now", {})]), reasoning="apertus", marks=APERTUS,
    ),
    "apertus, a call amid thoughts": Case(
        "apertus", '<|inner_prefix|>Hm<|tools_prefix|>[{"name": "now", "arguments": {}}]<|tools_suffix|>', Said("", "Hm", [("now", {})]),
        reasoning="apertus", marks=APERTUS,
    ),
    "cohere": Case(
        "cohere", '<|START_THINKING|>Hm<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        '{"city": "Zürich", "days": 3}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        Said("", "Hm", [("weather", CITY), ("now", {})]), marks=COHERE,
    ),
    "cohere, an answer": Case(
        "cohere", "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", Said("Yes.", "Hm"), marks=COHERE,
    ),
    "cohere, thinking begun by the prompt": Case(
        "cohere", "Hm<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", Said("Yes.", "Hm"), marks=COHERE,
        prompt="<|CHATBOT_TOKEN|><|START_THINKING|>",
    ),
    "command_r": Case(
        "command_r", 'Ok.\nAction: ```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": {\n            "city": "Zürich",\n'
        '            "days": 3\n        }\n    },\n    {\n        "tool_name": "now",\n        "parameters": {}\n    }\n]```',
        Said("Ok.", "", [("weather", CITY), ("now", {})]),
    ),
    "command_r, no call": Case("command_r", "Action: go.\n```json\n[]\n```", Said("Action: go.\n```json\n[]\n```")),
    "solar": Case(
        "solar", "<|think|>Hm<|end|><|begin|>assistant<|content|>Ok.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5"
        '<|tool_call:name|>weather<|tool_call:args|>{"city": "Zürich", "days": 3}<|tool_call:end|><|tool_call:begin|>b1b2c3d4e5'
        "<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        Said("Ok.", "Hm", [("weather", CITY), ("now", {})]), marks=SOLAR, prompt="<|begin|>assistant",
    ),
    "solar, an answer without thoughts": Case(
        "solar", "<|content|>Ok.<|flush|>", Said("Ok."), marks=SOLAR, prompt="<|begin|>assistant<|think|><|end|><|begin|>assistant",
    ),
    "internlm": Case(
        "internlm", 'Ok.<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Zürich", "days": 3}}<|action_end|>\n'
        '<|action_start|><|plugin|>{"name": "now", "parameters": {}}<|action_end|>',
        Said("Ok.", "", [("weather", CITY), ("now", {})]), marks=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    "jamba": Case(
        "jamba", 'Ok.\n<tool_calls>[\n    {"name": "weather", "arguments": {"city": "Zürich", "days": 3}},\n    {"name": "now", "arguments": {}}\n]'
        "</tool_calls>", Said("Ok.", "", [("weather", CITY), ("now", {})]),
    ),
    "hunyuan": Case(
        "hunyuan", '<think>\nHm\n</think>\n<answer>\n<tool_calls>[{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}, '
        '{"name": "now", "arguments": {}}]</tool_calls>\n</answer>',
        Said("", "Hm", [("weather", CITY), ("now", {})]), reasoning="think_answer",
    ),
    "hunyuan, an answer": Case(
        "hunyuan", "<think>\n\n</think>\n<answer>\n助手：Yes.\n</answer>", Said("Yes."), reasoning="think_answer",
    ),
    "hunyuan, not thinking": Case(
        "hunyuan", "助手：Yes: 助手：", Said("Yes: 助手："), reasoning="think_answer", prompt="<think>\n\n</think>\n",
    ),
}  # fmt: skip
