"""llama.cpp's own dialect as one entry."""

from __future__ import annotations

from gateway.dialects.dialect import Dialect, DialectPaths
from gateway.dialects.llamacpp.bodies import InfillRequest, LlamaCompletionRequest
from gateway.dialects.llamacpp.completions import COMPLETION, INFILL
from gateway.dialects.llamacpp.objects import error_object
from gateway.dialects.llamacpp.server import ApplyTemplate, ApplyTemplateRequest, Control, ControlRequest, props, slots
from gateway.http.api import JSON, ApiPart, fields, get, post
from gateway.http.problem import Json, Problem
from gateway.http.streaming import EVENTS
from gateway.tenants.tenants import BEARER

COMPLETIONS = ("/completion", "/completions")
INFILL_PATH, APPLY_TEMPLATE, PROPS, SLOTS = "/infill", "/apply-template", "/props", "/slots"
CONTROL = "/v1/chat/completions/control"
_TEXT: Json = {"type": "string"}
_ERROR = "LlamaError"
_ERROR_OBJECT = fields(
    {"code": {"type": "integer"}, "message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}}
)
# `response_fields` may select others.
_COMPLETION: Json = {"type": "object", "properties": {"content": _TEXT, "stop": {"type": "boolean"}}}
_ONE_OR_MORE: Json = {"anyOf": [_COMPLETION, {"type": "array", "items": _COMPLETION}]}


def _error(problem: Problem, request_id: str) -> tuple[int, Json]:
    return problem.status, error_object(problem)


DIALECT = Dialect(
    name="llama.cpp",
    key=BEARER,
    paths=DialectPaths(
        endpoints={**dict.fromkeys(COMPLETIONS, COMPLETION), INFILL_PATH: INFILL},
        calls={APPLY_TEMPLATE: ApplyTemplate(), CONTROL: Control()},
        views={PROPS: props, SLOTS: slots},
    ),
    error=_error,
    api=ApiPart(
        paths={
            **{
                path: {"post": post(LlamaCompletionRequest, _ONE_OR_MORE, stream_type=EVENTS, error=_ERROR)}
                for path in COMPLETIONS
            },
            INFILL_PATH: {"post": post(InfillRequest, _ONE_OR_MORE, stream_type=EVENTS, error=_ERROR)},
            APPLY_TEMPLATE: {"post": post(ApplyTemplateRequest, fields({"prompt": _TEXT}), error=_ERROR)},
            CONTROL: {"post": post(ControlRequest, fields({"success": {"type": "boolean"}}), error=_ERROR)},
            PROPS: {
                "get": get(
                    PROPS,
                    "A model's properties.",
                    JSON,
                    answer=fields({"total_slots": {"type": "integer"}}),
                    error=_ERROR,
                )
            },
            SLOTS: {
                "get": get(
                    SLOTS,
                    "Places for answers.",
                    JSON,
                    answer={"type": "array", "items": {"type": "object"}},
                    error=_ERROR,
                )
            },
        },
        schemas={_ERROR: fields({"error": _ERROR_OBJECT})},
        bodies=(LlamaCompletionRequest, InfillRequest, ApplyTemplateRequest, ControlRequest),
    ),
)
