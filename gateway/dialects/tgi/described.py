"""TGI's answers for the OpenAPI document. Further fields may be added."""

from __future__ import annotations

from gateway.http.api import fields, ref
from gateway.http.problem import Json

_TEXT: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_SEED: Json = {"type": ["integer", "null"]}
_TOKENS: Json = {"type": "array", "items": ref("GeneratedToken")}
_SEQUENCE: Json = {
    "finish_reason": {"enum": ["length", "eos_token", "stop_sequence"]},
    "generated_tokens": _INTEGER,
    "seed": _SEED,
    "prefill": {"type": "array", "items": ref("PrefillToken")},
    "tokens": _TOKENS,
}
_TOP: Json = {"top_tokens": {"type": "array", "items": _TOKENS}}

ANSWERS: dict[str, Json] = {
    "GeneratedToken": fields(
        {"id": _INTEGER, "text": _TEXT, "logprob": {"type": "number"}, "special": {"type": "boolean"}}
    ),
    "PrefillToken": fields({"id": _INTEGER, "text": _TEXT, "logprob": {"type": ["number", "null"]}}),
    "GenerationDetails": fields(_SEQUENCE)
    | {
        "properties": _SEQUENCE
        | _TOP
        | {"best_of_sequences": {"type": "array", "items": fields({"generated_text": _TEXT} | _SEQUENCE)}}
    },
    "GeneratedText": fields({"generated_text": _TEXT})
    | {"properties": {"generated_text": _TEXT, "details": ref("GenerationDetails")}},
    "SimpleToken": fields({"id": _INTEGER, "text": _TEXT, "start": _INTEGER, "stop": _INTEGER}),
    "TokenizedChat": fields(
        {"tokenize_response": {"type": "array", "items": ref("SimpleToken")}, "templated_text": _TEXT}
    ),
    "GenerationError": fields({"error": _TEXT, "error_type": _TEXT}),
}
