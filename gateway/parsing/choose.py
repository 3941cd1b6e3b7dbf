"""The choice of a model's format: by its folder, by its chat template, or by name."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.parsing import json_formats as in_json
from gateway.parsing import tag_formats as in_tags
from gateway.parsing.format import PLAIN, Format, Reasoning, with_reasoning
from gateway.parsing.response_template import read_response_template
from gateway.parsing.terminals import Bound, bound

log = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
CALLS: dict[str, Format] = {
    one.name: one
    for one in (
        in_json.HERMES, in_tags.QWEN3_CODER, in_tags.MINIMAX_M2, in_tags.GLM, in_json.LLAMA3_JSON, in_tags.PYTHONIC,
        in_tags.OLMO3, in_json.MISTRAL, in_json.MISTRAL_LIST, in_json.DEEPSEEK_V3, in_json.DEEPSEEK_V31, in_tags.DEEPSEEK_V32,
        in_json.KIMI_K2, in_json.GEMMA4, in_json.FUNCTION_GEMMA, in_json.HARMONY, in_json.COHERE, in_json.COMMAND_R,
        in_json.GRANITE, in_json.PHI4_MINI, in_tags.LFM2, in_json.NEMOTRON, in_json.APERTUS, in_json.SOLAR, in_json.INTERNLM,
        in_json.JAMBA, in_json.HUNYUAN, in_tags.HY_V3, in_tags.HY_V3_PREVIEW, in_tags.LONGCAT, in_tags.LONGCAT_TAGS,
        in_tags.SEED,
    )
}  # fmt: skip
REASONINGS: dict[str, Reasoning] = {
    one.name: one
    for one in (
        Reasoning(name="think", opens="<think>", closes="</think>"),
        Reasoning(name="deepseek_r1", opens="<think>", closes="</think>", begins_open=True),
        Reasoning(name="mistral", opens="[THINK]", closes="[/THINK]"),
        Reasoning(name="seed", opens="<seed:think>", closes="</seed:think>"),
        Reasoning(name="longcat", opens="<longcat_think>", closes="</longcat_think>"),
        Reasoning(name="apertus", opens="<|inner_prefix|>", closes="<|inner_suffix|>"),
        Reasoning(name="hy_v3", opens="<think:opensource>", closes="</think:opensource>"),
        Reasoning(name="think_response", opens="<think>", closes="</think>", answer=("<response>", "</response>")),
        Reasoning(name="think_answer", opens="<think>", closes="</think>", answer=("<answer>", "</answer>")),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of a format in a model's folder: parts of its chat template, and added tokens."""

    name: str
    in_template: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    def are_in(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return all(word in template for word in self.in_template) and all(token in vocabulary for token in self.tokens)


# The first format whose signs are all present is chosen. Tokens alone decide only without a template.
_SIGNS: tuple[Signs, ...] = (
    Signs("harmony", ("<|channel|>", "<|message|>")),
    Signs("solar", ("<|tool_call:begin|>",)),
    Signs("kimi_k2", ("<|tool_call_begin|>",)),
    Signs("deepseek_v32", ("｜DSML｜",)),
    Signs("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    Signs("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    Signs("minimax_m2", ("<minimax:tool_call>",)),
    Signs("gemma4", ("<|tool_call>",)),
    Signs("function_gemma", ("<start_function_call>",)),
    Signs("longcat_tags", ("<longcat_tool_call>", "<longcat_arg_key>")),
    Signs("longcat", ("<longcat_tool_call>",)),
    Signs("hy_v3", ("tool_sep", "arg_key"), ("<tool_sep:opensource>",)),
    Signs("hy_v3", ("<tool_sep:opensource>",)),
    Signs("hy_v3_preview", ("tool_sep", "arg_key")),
    Signs("glm", ("<tool_call>", "<arg_key>")),
    Signs("seed", ("<seed:tool_call>",)),
    Signs("qwen3_coder", ("<function=", "<parameter=")),
    Signs("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    Signs("mistral_list", ("[TOOL_CALLS]",)),
    Signs("cohere", ("<|START_ACTION|>",)),
    Signs("command_r", ("Action:", "tool_name")),
    Signs("apertus", ("<|tools_prefix|>",)),
    Signs("hunyuan", ("<tool_calls>", "助手：")),
    Signs("jamba", ("<tool_calls>",)),
    Signs("nemotron", ("<TOOLCALL>",)),
    Signs("lfm2", ("<|tool_call_start|>",)),
    Signs("lfm2", ("<|tool_list_start|>",)),
    Signs("phi4_mini", ("<|/tool_call|>",)),
    Signs("phi4_mini", ("functools[",)),
    Signs("internlm", ("<|action_start|>",)),
    Signs("granite", ("<|tool_call|>",)),
    Signs("olmo3", ("<function_calls>",)),
    Signs("pythonic", ("<|python_start|>",)),
    Signs("llama3_json", ("<|python_tag|>",)),
    Signs("hermes", ("<tool_call>",)),
    Signs("deepseek_v32", tokens=("｜DSML｜",)),
    Signs("cohere", tokens=("<|START_ACTION|>",)),
    Signs("lfm2", tokens=("<|tool_call_start|>",)),
    Signs("phi4_mini", tokens=("<|/tool_call|>",)),
    Signs("internlm", tokens=("<|action_start|>", "<|plugin|>")),
)
# Each mark must be in the template or a token.
_REASONING_MARKS = (
    ("mistral", ("[THINK]",)), ("seed", ("<seed:think>",)), ("longcat", ("<longcat_think>",)), ("apertus", ("<|inner_prefix|>",)),
    ("hy_v3", ("<think:opensource>",)), ("think_response", ("<think>", "<response>")), ("think_answer", ("<think>", "<answer>")),
    ("think_answer", ("<think>", "助手：")), ("think", ("<think>",)), ("think", ("</think>",)),
)  # fmt: skip
# Other servers' names.
_CALL_NAMES = {
    "glm45": "glm", "glm47": "glm", "llama4_pythonic": "pythonic", "llama3": "llama3_json", "llama4_json": "llama3_json",
    "qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes", "qwen3_xml": "qwen3_coder", "openai": "harmony",
    "gpt-oss": "harmony", "gpt_oss": "harmony", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32", "minimax-m2": "minimax_m2", "minimax": "minimax_m2", "functiongemma": "function_gemma",
    "gemma": "gemma4", "kimi": "kimi_k2", "deepseek": "deepseek_v31", "cohere_command3": "cohere", "cohere_command4": "cohere",
    "granite4": "hermes", "phi4_mini_json": "phi4_mini", "nemotron_json": "nemotron", "solar_open": "solar",
    "internlm2": "internlm", "interns1": "internlm", "hunyuan_a13b": "hunyuan", "seed_oss": "seed",
}  # fmt: skip
_REASONING_NAMES = {
    "qwen3": "think", "glm45": "think", "deepseek_v3": "think", "kimi_k2": "think", "minimax_m2": "think",
    "deepseek-r1": "deepseek_r1", "seed_oss": "seed", "hunyuan_a13b": "think_answer", "granite": "think_response",
}  # fmt: skip


def checked(name: str, known: Mapping[str, Any], others: Mapping[str, str]) -> str:
    """Our name of a format. Raises ValueError."""
    ours = others.get(name, name)
    if ours not in known and ours not in (AUTO, NONE):
        nearest = difflib.get_close_matches(name, [*known, *others, AUTO, NONE], 1)
        meant = f", did you mean {nearest[0]!r}?" if nearest else ":"
        raise ValueError(f"{name!r} is no parser{meant} choose {AUTO}, {NONE} or one of {', '.join(known)}")
    return ours


@dataclass(frozen=True, slots=True)
class Parsers:
    """Configured names of formats. Raises ValueError for an unknown one."""

    calls: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        checked(self.calls, CALLS, _CALL_NAMES)
        checked(self.reasoning, REASONINGS, _REASONING_NAMES)


DEFAULT_PARSERS = Parsers()


def choose(
    template: str, vocabulary: Mapping[str, int], *, response_template: Any = None, parsers: Parsers = DEFAULT_PARSERS
) -> Bound:
    """A model's format; `vocabulary` has its added tokens."""
    calls = checked(parsers.calls, CALLS, _CALL_NAMES)
    reasoning = checked(parsers.reasoning, REASONINGS, _REASONING_NAMES)
    built_in = _built_in(template, vocabulary, calls, reasoning)
    if response_template is not None and calls == reasoning == AUTO:
        try:
            read = read_response_template(response_template)
            return bound(replace(read, wire=built_in.wire, stops=built_in.stops, ids=built_in.ids), vocabulary)
        except Exception as error:  # a faulty folder must not keep its model from being served
            log.warning("response_template: %s; a built-in format is used", error)
    return bound(built_in, vocabulary)


def _built_in(template: str, vocabulary: Mapping[str, int], calls: str, reasoning: str) -> Format:
    if calls == AUTO:
        calls = next((signs.name for signs in _SIGNS if signs.are_in(template, vocabulary)), NONE)
    found = CALLS[calls] if calls != NONE else PLAIN
    if found.reasoning or reasoning == NONE:
        return found
    thoughts = _reasoning(template, vocabulary, reasoning)
    return with_reasoning(found, thoughts) if thoughts is not None else found


def _reasoning(template: str, vocabulary: Mapping[str, int], name: str) -> Reasoning | None:
    if name != AUTO:
        return REASONINGS[name]
    marked = (name for name, marks in _REASONING_MARKS if all(mark in template or mark in vocabulary for mark in marks))
    return REASONINGS.get(next(marked, NONE))
