"""OpenAI's Responses API as one entry."""

from __future__ import annotations

from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked, Dialect, DialectPaths
from gateway.dialects.responses.described import SCHEMAS
from gateway.dialects.responses.respond import Compact, Respond, check_kept, conversation_of
from gateway.dialects.responses.schema import CompactRequest, CountedRequest, ResponseRequest
from gateway.http.api import ApiPart, post, ref
from gateway.http.problem import Json, Problem, error_object
from gateway.http.streaming import EVENTS

RESPONSES = "/v1/responses"
INPUT_TOKENS, COMPACT = f"{RESPONSES}/input_tokens", f"{RESPONSES}/compact"


class InputTokens:
    """Token count of a response's prompt."""

    body = CountedRequest

    async def answer(self, body: CountedRequest, answers: Answers, asked: Asked) -> Json:
        check_kept(body)
        served = answers.find(body.model)
        tokens = await answers.tokenising.tokens(conversation_of(body), served, name="input")
        return {"object": "response.input_tokens", "input_tokens": len(tokens)}


def _error(problem: Problem, request_id: str) -> tuple[int, Json]:
    return problem.status, error_object(problem)


DIALECT = Dialect(
    name="responses",
    paths=DialectPaths(
        prefixes=("/v1/conversations",),
        endpoints={RESPONSES: Respond(), COMPACT: Compact()},
        calls={INPUT_TOKENS: InputTokens()},
    ),
    error=_error,
    api=ApiPart(
        paths={
            RESPONSES: {"post": post(ResponseRequest, ref("Response"), stream_type=EVENTS)},
            COMPACT: {"post": post(CompactRequest, ref("ResponseCompaction"))},
            INPUT_TOKENS: {"post": post(CountedRequest, ref("ResponseInputTokens"))},
        },
        bodies=(ResponseRequest, CompactRequest, CountedRequest),
        schemas=SCHEMAS,
    ),
)
