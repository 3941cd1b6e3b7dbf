"""TGI's dialect as one entry."""

from __future__ import annotations

from common import VERSION
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked, Dialect, DialectPaths
from gateway.dialects.openai.schema import ChatRequest
from gateway.dialects.stops import MAX_STOPS
from gateway.dialects.tgi.bodies import MAX_BEST_OF, TgiRequest
from gateway.dialects.tgi.chat_tokenize import ChatTokenize
from gateway.dialects.tgi.described import ANSWERS
from gateway.dialects.tgi.errors import error
from gateway.dialects.tgi.generate import Generate
from gateway.http.api import JSON, ApiPart, get, post, ref
from gateway.http.problem import Json
from gateway.http.streaming import EVENTS
from gateway.tenants.tenants import BEARER

ROOT, GENERATE, STREAM = "/", "/generate", "/generate_stream"
CHAT_TOKENIZE, INFO = "/chat_tokenize", "/info"


def _info(answers: Answers, asked: Asked) -> Json:
    """The default model and the request limits. Facts about a single TGI process are null or absent."""
    served = answers.find("")
    longest = served.max_model_len
    return {
        "model_id": served.name,
        "model_sha": served.fingerprint or None,
        "model_dtype": served.tokenizer.saved.dtype or None,
        "model_pipeline_tag": "text-generation",
        "max_best_of": MAX_BEST_OF,
        "max_stop_sequences": MAX_STOPS,
        "max_input_tokens": None if longest is None else longest - 1,
        "max_total_tokens": longest,
        "router": "baton",
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }


DIALECT = Dialect(
    name="tgi",
    key=BEARER,
    paths=DialectPaths(
        endpoints={ROOT: Generate(as_pipeline=True), GENERATE: Generate(), STREAM: Generate(streams=True)},
        calls={CHAT_TOKENIZE: ChatTokenize()},
        views={INFO: _info},
    ),
    error=error,
    api=ApiPart(
        paths={
            ROOT: {
                "post": post(
                    TgiRequest,
                    {"type": "array", "items": ref("GeneratedText")},
                    stream_type=EVENTS,
                    error="GenerationError",
                )
            },
            GENERATE: {"post": post(TgiRequest, ref("GeneratedText"), stream_type=EVENTS, error="GenerationError")},
            STREAM: {"post": post(TgiRequest, ref("GeneratedText"), stream_type=EVENTS, error="GenerationError")},
            CHAT_TOKENIZE: {"post": post(ChatRequest, ref("TokenizedChat"), error="GenerationError")},
            INFO: {"get": get(INFO, "The first model, as TGI tells of it.", JSON, error="GenerationError")},
        },
        bodies=(TgiRequest,),
        schemas=ANSWERS,
    ),
)
