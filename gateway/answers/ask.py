"""A client's request in neutral terms, independent of dialects, and the reading of reasoning and tools that all chats share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field, StrictStr

from common.errors import InvalidRequestError
from common.messages import NO_GOAL, NO_KEEP, Goal, Grammar, Keep, SamplingParams
from gateway.grammars.wanted import Wanted
from gateway.parsing.grammar import CallShape
from gateway.tenants.shares import NO_PRESET, Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """The client's limits. `bad_words` are texts."""

    allowed: Sequence[int] = ()
    bad_words: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.allowed or self.bad_words)

    def added_to(self, grammar: Grammar | None, encode: Callable[[str], list[int]], vocab_size: int) -> Grammar:
        """The grammar, or a free one, with these limits. `encode` makes plain tokens. Raises InvalidRequestError."""
        outside = [token for token in self.allowed if token >= vocab_size]
        if outside:
            raise InvalidRequestError(
                f"allowed_token_ids: token {outside[0]} is not in the vocabulary", param="allowed_token_ids"
            )
        banned: dict[tuple[int, ...], None] = {}
        for word in self.bad_words:
            banned |= dict.fromkeys(_runs(word, encode))
        return msgspec.structs.replace(
            grammar or Grammar(), allowed=list(dict.fromkeys(self.allowed)), banned=[list(run) for run in banned]
        )


NO_LIMITS = TokenLimits()


def _runs(word: str, encode: Callable[[str], list[int]]) -> list[tuple[int, ...]]:
    """Token runs that spell the word at an answer's beginning, and after a space."""
    return [tuple(encode(word)), tuple(encode(" " + word.lstrip()))]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt to tokenise."""

    text: str
    parse_special: bool = True  # control tokens' names in it are parsed
    adds_special: bool = True  # the tokenizer's own, such as BOS


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that is already tokenised."""

    ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False  # its arguments must follow the schema

    def as_template_input(self) -> dict[str, Any]:
        """The form that Hugging Face's templates expect of tools."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name} | described | {"parameters": self.parameters}}

    def as_shape(self) -> CallShape:
        """The form that grammars use."""
        return CallShape(name=self.name, parameters=self.parameters, is_strict=self.strict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRules:
    """The tools offered to the model, and how it may or must use them."""

    tools: Sequence[Tool] = ()
    must_call: bool = False
    allowed: frozenset[str] = frozenset()  # names of callable tools
    parallel: bool = True  # several calls in one answer

    @property
    def restricts(self) -> bool:
        """True if calls, if there are any, must satisfy more than their form."""
        is_part = len(self.allowed) < len(self.tools)
        return is_part or any(tool.strict for tool in self.tools if tool.name in self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer that is a message: reasoning and tool calls are separated from its content."""

    tools: ToolRules = ToolRules()
    shows_reasoning: bool = True
    thinking_budget: int | None = None  # tokens of reasoning at most
    is_steered: bool = False  # its reasoning may be ended early: `gateway.answers.steering`
    may_think: bool = True  # False if the client asked for no thinking


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt for the model's chat template. Messages are mappings with role, content, …"""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    opens_answer: bool = True  # the template begins the assistant's message
    continues_final_message: bool = False
    variables: Mapping[str, Any] | None = None  # the client's own, for the template
    parse_special: bool = False
    adds_special: bool = False  # most templates write BOS themselves
    without_template: str | None = None  # the prompt for models without a template

    @property
    def rendering(self) -> dict[str, Any]:
        """Arguments of a tokenizer's `render` and `encode_chat` besides the messages."""
        return {
            "add_generation_prompt": self.opens_answer,
            "continue_final_message": self.continues_final_message,
            "variables": self.variables,
            "tools": [tool.as_template_input() for tool in self.tools],
            "parse_special": self.parse_special,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """Fill-in-the-middle: text to be written between two others. `files` are (name, text) of the project."""

    before: str
    after: str
    begun: str = ""  # the text's own beginning
    files: Sequence[tuple[str, str]] = ()
    field: str = "suffix"  # the client's name of it, for errors


@dataclass(frozen=True, slots=True)
class Joined:
    """A prompt in parts, each tokenised in its own way."""

    parts: Sequence[Text | TokenIds | Conversation]


Prompt = Text | TokenIds | Conversation | Infill | Joined


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """The rules for turning generated tokens into the answer's text."""

    stops: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    is_wanted: bool = True  # False: only the prompt is computed


@dataclass(frozen=True, slots=True)
class DraftWish:
    """The client's wish for drafts: the most tokens of a pass (-1: as workers are set), and a text that it predicts."""

    most: int = -1
    prediction: str = ""

    @classmethod
    def of(cls, said: bool | int | None, prediction: str = "") -> DraftWish:
        """The wish of a field: false is none, true or nothing what workers are set to."""
        return cls(most=-1 if said is None or said is True else int(said), prediction=prediction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling of each prompt's choices, as far as the client gave it."""

    # Unset fields are open; `max_tokens` 0: the rest of the context. Seed and the model's stop tokens are filled in.
    params: SamplingParams
    left_open: frozenset[str] = frozenset()  # fields of `params` that the client didn't give
    n: int = 1  # choices a prompt
    seed: int | None = None
    drafts: DraftWish = DraftWish()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The restriction of the answer's tokens: its grammar, and the client's limits beside one."""

    grammar: Wanted | None = None
    limits: TokenLimits = NO_LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFit:
    """The client's wish for a prompt, or an answer, that is longer than the context; by default both are refused."""

    longest_prompt: int | None = None  # tokens: only the end is kept; -1: what fits
    ends_with_context: bool = False  # a `max_tokens` beyond the context isn't refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The request's standing among others: its rank in the queue, its deadlines and goal, and the cache that it shares."""

    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    first_token_s: float | None = None  # a later first token is useless
    goal: Goal = NO_GOAL
    keep: Keep = NO_KEEP
    model_keep_s: float | None = None  # how long the model stays loaded after it; None: as configured


FOREVER_S = 1e9
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?(?:ms|s|m|h))+\Z")


def lasting_s(text: str | float) -> float:
    """Read how long a model stays loaded, as Ollama and `--keep-alive` write it: seconds, `90s`, `1h30m`; below 0: for ever.

    Raises ValueError.
    """
    written = str(text)
    if _DURATION.match(written):
        parts = re.findall(r"([\d.]+)(ms|s|m|h)", written)
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        return FOREVER_S if written.startswith("-") else min(FOREVER_S, seconds)
    try:
        seconds = float(written)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise ValueError(f"{text!r} is not like 300, 5m, 1h30m or -1")
    return FOREVER_S if seconds < 0 else min(FOREVER_S, seconds)


CALL_TTL_S = 300.0  # as Anthropic's `cache_control` without a `ttl`


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: built by a dialect from a body, and answered by `gateway.answers.start`."""

    model: str  # "": the default model
    answer_prefix: str  # prefix of the answer's id, before 32 hex digits: "chatcmpl-", "resp_"
    prompts: Sequence[Prompt]
    stream: bool = False
    sampling: Sampling
    constraint: Constraint = Constraint()
    fit: ContextFit = ContextFit()
    text: TextRules = TextRules()
    reply: Reply | None = None  # None: text as it is generated
    instead: Any = None  # a fixed answer, if nothing is to be generated
    terms: Terms = Terms()
    field_names: Mapping[str, str] = field(default_factory=dict)  # our names -> the dialect's, where they differ

    @property
    def keep(self) -> Keep:
        """The wish for its KV: an answer that ends by a call is likely to be followed by another prompt."""
        keep, calls = self.terms.keep, self.reply is not None and bool(self.reply.tools.tools)
        return msgspec.structs.replace(keep, call_ttl_s=CALL_TTL_S) if calls and not keep.ttl_s else keep

    def name_of(self, name: str) -> str:
        """The client's name for our field `name`, for errors."""
        return self.field_names.get(name, name)


def with_preset(ask: Ask, preset: Preset) -> Ask:
    """The ask, completed by what the name of its model brings. Prompts that are no conversation stay as they are."""
    if preset == NO_PRESET:
        return ask
    sampling, fit = ask.sampling, ask.fit
    given = {name: value for name, value in preset.sampling.items() if name in sampling.left_open}
    if preset.max_tokens and not sampling.params.max_tokens:
        given["max_tokens"], fit = preset.max_tokens, replace(fit, ends_with_context=True)
    return replace(
        ask,
        prompts=[_opened(prompt, preset) if isinstance(prompt, Conversation) else prompt for prompt in ask.prompts],
        sampling=replace(
            sampling,
            params=msgspec.structs.replace(sampling.params, **given),
            left_open=sampling.left_open - given.keys(),
            seed=preset.seed if sampling.seed is None else sampling.seed,
        ),
        text=replace(ask.text, stops=ask.text.stops or preset.stops),
        fit=fit,
    )


def _opened(prompt: Conversation, preset: Preset) -> Conversation:
    """A conversation behind the preset's messages. Its own system message takes the preset's place."""
    own, plain = list(prompt.messages), prompt.without_template
    system = own[:1] if own and own[0].get("role") in ("system", "developer") else []
    rest = own[len(system) :]
    if preset.system and not system:
        system = [{"role": "system", "content": preset.system}]
        plain = None if plain is None else preset.system + plain
    return replace(prompt, messages=[*system, *preset.messages, *rest], without_template=plain)


MAX_TOOLS = 512
MAX_TOOL_CHARS = 1_000_000
NO_TOOLS = ToolRules()
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
ToolMode = Literal["none", "auto", "required"]


def template_variables(*, thinks: bool | None, effort: str | None = None) -> dict[str, Any]:
    """Template variables. `thinks` None: the template's default; `effort` is passed on unless reasoning is off."""
    said = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
    return said if effort is None or thinks is False else said | {"reasoning_effort": effort}


def may_think(variables: Mapping[str, Any]) -> bool:
    """False if the template's variables turn reasoning off."""
    is_off = variables.get("enable_thinking") is False or variables.get("thinking") is False
    return not is_off and variables.get("reasoning_effort") != "none"


def thoughts_as(text: str) -> dict[str, str]:
    """An assistant's reasoning in the form of chat templates: families read different names."""
    return {"reasoning_content": text, "thinking": text}


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(schema)) > MAX_TOOL_CHARS:
        raise ValueError(f"at most {MAX_TOOL_CHARS} characters of JSON are allowed")
    return schema


ToolName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
ArgumentsSchema = Annotated[dict[str, Any], AfterValidator(_bounded)]


def tool_rules(
    tools: Sequence[Tool], mode: ToolMode, allowed: Sequence[str] | None, *, parallel: bool, field: str = "tool_choice"
) -> ToolRules:
    """Return the rules for `tools`; `allowed` None: all may be called. Raises ValueError that begins with a field's name.

    `field`: the client's name for the choice.
    """
    names = {tool.name for tool in tools}
    if len(names) != len(tools):
        raise ValueError("tools: two have the same name")
    if mode == "none":
        return NO_TOOLS
    unknown = [name for name in allowed or () if name not in names]
    if unknown:
        raise ValueError(f"{field}: {unknown[0]!r} is not among the tools")
    if not tools:
        if mode == "required":
            raise ValueError(f"{field}: there are no tools to call")
        return NO_TOOLS
    return ToolRules(
        tools=tools,
        must_call=mode == "required",
        allowed=frozenset(names if allowed is None else allowed),
        parallel=parallel,
    )
