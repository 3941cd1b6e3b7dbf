"""The parameters of a text request, by the names of Triton's vLLM and TensorRT-LLM backends. No I/O.

Inputs, request parameters and `sampling_parameters` all say it: the first two by name, the last one as JSON in a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from gateway.dialects.foreign import Foreign
from gateway.dialects.kserve.tensors import BOOL, BYTES
from gateway.dialects.openai.foreign import COMPLETIONS
from gateway.dialects.openai.schema import CompletionRequest
from gateway.http.fields import Reading
from gateway.http.problem import Json

TEXT_INPUT, STREAM, SAMPLING, EXCLUDES_INPUT = "text_input", "stream", "sampling_parameters", "exclude_input_in_output"
TEXT_OUTPUT, FINISH, SUM, LOGPROBS = "text_output", "finish_reason", "cumulative_logprob", "logprobs"
OUTPUTS: Mapping[str, str] = {
    TEXT_OUTPUT: BYTES, FINISH: BYTES, SUM: "FP32", LOGPROBS: BYTES, "num_input_tokens": "UINT32", "num_output_tokens": "UINT32",
}  # fmt: skip
RETURNS = {f"return_{name}": name for name in OUTPUTS if name != TEXT_OUTPUT}
INPUTS: Mapping[str, str] = {
    TEXT_INPUT: BYTES, STREAM: BOOL, SAMPLING: BYTES, EXCLUDES_INPUT: BOOL, **dict.fromkeys(RETURNS, BOOL),
}  # fmt: skip
ENDS_EMPTY = "triton_enable_empty_final_response"
_SWITCHES = (STREAM, EXCLUDES_INPUT, ENDS_EMPTY, *RETURNS)
_MICROSECONDS = 1_000_000
_SHORTEST_US = 1_000

# Sampling parameters that are texts. All others may be JSON in a text: older request parameters were texts only.
_TEXTS = frozenset(
    {
        "stop", "stop_sequences", "user", "cache_salt", "extra_key", "service_tier", "safety_identifier", "prompt_cache_key",
        "guided_regex", "guided_grammar", "guided_whitespace_pattern", "regex", "ebnf", "grammar", "lora_name",
    }
)  # fmt: skip


def _words(value: Any) -> list[Any]:
    """Drop "", which TensorRT-LLM's clients send for no words."""
    return [word for word in (value if isinstance(value, list) else [value]) if word != ""]


def _end(value: Any) -> Json:
    return {} if value == -1 else {"stop_token_ids": [value]}


_ANSWER = "the answer has the outputs of the model's metadata"
_TRITON: dict[str, Foreign] = {
    "stop_words": Foreign(says="`stop`", means=lambda value: {"stop": _words(value)}),
    "min_length": Foreign(says="`min_tokens`", means=lambda value: {"min_tokens": value}),
    "num_return_sequences": Foreign(says="`n`", means=lambda value: {"n": value}),
    "len_penalty": Foreign(says="`length_penalty`", means=lambda value: {"length_penalty": value}),
    "end_id": Foreign(says="`stop_token_ids`", means=_end),
    "pad_id": Foreign(says="nothing is padded"),
    "beam_width": Foreign(says="there is no beam search", is_refused=True, off=(0, 1)),
    "lora_name": Foreign(
        says="no adapters are served: name a model of /v2/repository/index", is_refused=True, off=("",)
    ),
    "sequence_id": Foreign(says="no model keeps a state between requests", is_refused=True, off=(0, "")),
    "sequence_start": Foreign(says="no model keeps a state between requests", is_refused=True, off=(False,)),
    "sequence_end": Foreign(says="no model keeps a state between requests", is_refused=True, off=(False,)),
    **dict.fromkeys(
        ("return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics"),
        Foreign(says=f"use return_logprobs; {_ANSWER}", is_refused=True, off=(False,)),
    ),
    **dict.fromkeys(
        ("image", "image_input", "image_bytes", "image_url_input"),
        Foreign(says="only text is read", is_refused=True, off=("", [])),
    ),
}


class TextRequest(CompletionRequest):
    """The fields of /v1/completions, and names of Triton's backends."""

    foreign: ClassVar[Mapping[str, Foreign]] = COMPLETIONS | _TRITON
    unsupported: ClassVar[dict[str, str]] = CompletionRequest.unsupported | {
        "echo": "send exclude_input_in_output: false",
        "prompt_logprobs": _ANSWER,
        **dict.fromkeys(
            ("stream_options", "return_token_ids", "return_tokens_as_token_ids", "timings_per_token"), _ANSWER
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A text to continue, and the wanted outputs."""

    text: TextRequest
    outputs: tuple[str, ...]  # names of its tensors
    includes_input: bool | None  # the answer begins with the prompt; None: not given
    streams: bool | None  # None: not given
    ends_empty: bool  # a stream ends with a response without outputs

    @classmethod
    def of(
        cls, model: str, prompt: str, said: Mapping[str, Any], *, outputs: Sequence[str] = (), reading: Reading | None
    ) -> Wish:
        """A validated wish; `outputs` are the requested names. Raises ValueError that begins with a field's name."""
        given = dict(said)
        on = {name: _switch(name, given.pop(name, None)) for name in _SWITCHES}
        sampling = _sampling(given.pop(SAMPLING, None), reading)
        fields = {name: value for name, value in _fields(given, reading).items() if value is not None}
        if twice := next((name for name in fields if name in sampling and sampling[name] != fields[name]), None):
            raise ValueError(f"{twice}: is said twice, in {SAMPLING} and beside it")
        wanted = _outputs(outputs, [RETURNS[name] for name in RETURNS if on[name]])
        known = sampling | fields
        if SUM in wanted or LOGPROBS in wanted:
            known.setdefault("logprobs", 0)
        text = TextRequest.model_validate(known | {"model": model, "prompt": prompt}, context=reading)
        includes = None if on[EXCLUDES_INPUT] is None else not on[EXCLUDES_INPUT]
        return cls(
            text=text,
            outputs=wanted,
            includes_input=includes,
            streams=on[STREAM],
            ends_empty=on[ENDS_EMPTY] is True,
        )


def joined(*parts: Mapping[str, Any]) -> Json:
    """Merge several parts of a body by name. Raises ValueError if they contradict."""
    found: Json = {}
    for part in parts:
        for name, value in part.items():
            if found.setdefault(name, value) != value:
                raise ValueError(f"{name}: is said twice, with two values")
    return found


def _outputs(listed: Sequence[str], switched_on: Iterable[str]) -> tuple[str, ...]:
    for name in listed:
        if name not in OUTPUTS:
            raise ValueError(f"outputs: there is no output {name[:100]!r}; there are {', '.join(OUTPUTS)}")
    return tuple(dict.fromkeys(listed or (TEXT_OUTPUT, *switched_on)))


def _switch(name: str, value: Any) -> bool | None:
    """A BOOL, also as a text: older clients' request parameters are texts."""
    known = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(known, bool) and value is not None:
        raise ValueError(f"{name}: must be true or false")
    return known


def _sampling(value: Any, reading: Reading | None) -> Json:
    """The object in `sampling_parameters`, possibly as JSON text."""
    if value is None or value == "":
        return {}
    found = _decoded(value, reading) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise ValueError(f'{SAMPLING}: must be a JSON object, like {{"max_tokens": 100}}')
    for name in ("model", "prompt", STREAM):
        if name in found:
            raise ValueError(f"{SAMPLING}: {name} is not said there")
    return _typed(found, reading)


def _fields(given: Json, reading: Reading | None) -> Json:
    """Sampling parameters given as inputs or request parameters; `timeout` and `priority` there are Triton's."""
    for name in ("model", "prompt"):
        if name in given:
            raise ValueError(
                f"{name}: is no input and no parameter; the path names the model, and {TEXT_INPUT} is the prompt"
            )
    found = _typed(given, reading)
    if found.get("priority") in (0, ""):
        del found["priority"]
    elif "priority" in found:
        raise ValueError(f"priority: say it in {SAMPLING}, from -100 to 100, where more is sooner")
    if found.get("timeout") is not None:
        found["timeout"] = _seconds(found["timeout"])
    return found


def _seconds(timeout: Any) -> float | None:
    """Triton's timeout, in microseconds; 0 is none."""
    if not isinstance(timeout, int) or isinstance(timeout, bool) or 0 < timeout < _SHORTEST_US or timeout < 0:
        raise ValueError(
            f"timeout: as a parameter it is in microseconds, {_SHORTEST_US} at least; in {SAMPLING} it is in seconds"
        )
    return timeout / _MICROSECONDS or None


def _typed(fields: Mapping[str, Any], reading: Reading | None) -> Json:
    """The fields with texts parsed as numbers, booleans, lists and objects; without empty words."""
    found: Json = {}
    for name, value in fields.items():
        if name in ("stop_words", "bad_words"):
            found |= {name: words} if (words := _words(value)) else {}
        else:
            is_text = not isinstance(value, str) or name in _TEXTS
            found[name] = value if is_text else _decoded_or_text(value, reading)
    return found


def _decoded_or_text(text: str, reading: Reading | None) -> Any:
    """Return the JSON value of a text, or the text itself: its field's validator reports the fault."""
    if reading is not None:
        reading.texts.take(text)
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return {"True": True, "False": False}.get(text, text)


def _decoded(text: str, reading: Reading | None) -> Any:
    if reading is not None:
        reading.texts.take(text)
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise ValueError(f"{SAMPLING}: is not valid JSON: {error}") from None
