"""Which format a model writes: as its folder says, by what its chat template shows, or by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.parsing.builtin import CALLS, REASONINGS
from gateway.parsing.format import PLAIN, Format, Reasoning, with_reasoning
from gateway.parsing.response_template import read_response_template
from gateway.parsing.terminals import Bound, bound

log = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
# The first whose marks are all in the template is taken.
_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("function_gemma", ("<start_function_call>",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_list", ("[TOOL_CALLS]",)),
    ("olmo3", ("<function_calls>",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("hermes", ("<tool_call>",)),
)
_REASONING_MARKS = (("mistral", "[THINK]"), ("seed", "<seed:think>"), ("think", "<think>"), ("think", "</think>"))
# As other servers call them.
_CALL_NAMES = {
    "glm45": "glm", "glm47": "glm", "llama4_pythonic": "pythonic", "llama3": "llama3_json", "llama4_json": "llama3_json",
    "qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes", "qwen3_xml": "qwen3_coder", "openai": "harmony",
    "gpt-oss": "harmony", "gpt_oss": "harmony", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
    "minimax-m2": "minimax_m2", "minimax": "minimax_m2", "functiongemma": "function_gemma", "gemma": "gemma4", "kimi": "kimi_k2",
    "deepseek": "deepseek_v31",
}  # fmt: skip
_REASONING_NAMES = {
    "qwen3": "think", "glm45": "think", "deepseek_v3": "think", "kimi_k2": "think", "minimax_m2": "think",
    "deepseek-r1": "deepseek_r1", "seed_oss": "seed",
}  # fmt: skip


def checked(name: str, known: Mapping[str, Any], others: Mapping[str, str]) -> str:
    """Our name of a format. Raises ValueError."""
    ours = others.get(name, name)
    if ours not in known and ours not in (AUTO, NONE):
        raise ValueError(f"{name!r} is no parser: choose {AUTO}, {NONE} or one of {', '.join(known)}")
    return ours


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names of formats. Raises ValueError for one that isn't known."""

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
        except Exception as error:  # a folder's mistake must not keep its model from being served
            log.warning("response_template: %s; a built-in format is used", error)
    return bound(built_in, vocabulary)


def _built_in(template: str, vocabulary: Mapping[str, int], calls: str, reasoning: str) -> Format:
    if calls == AUTO:
        calls = next((name for name, marks in _MARKS if all(mark in template for mark in marks)), NONE)
    found = CALLS[calls] if calls != NONE else PLAIN
    if found.knows_reasoning or reasoning == NONE:
        return found
    thoughts = _reasoning(template, vocabulary, reasoning)
    return with_reasoning(found, thoughts) if thoughts is not None else found


def _reasoning(template: str, vocabulary: Mapping[str, int], name: str) -> Reasoning | None:
    if name != AUTO:
        return REASONINGS[name]
    marked = (name for name, mark in _REASONING_MARKS if mark in template or mark in vocabulary)
    return REASONINGS.get(next(marked, NONE))
