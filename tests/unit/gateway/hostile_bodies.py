"""Bodies for the paths of all dialects that are as long as they may be in the place where it costs most."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.unit.gateway.conftest import MODEL

TEXT = "Hello, world (a text) [of] sorts {all}. " * 10_000  # 400 kB
MANY = 24_000  # objects of a body, nearly as many as it may have
Json = dict[str, Any]

_USER = [{"role": "user", "content": TEXT}]
_BLOCKS = [{"role": "user", "content": [{"type": "text", "text": ""}] * MANY}]
_ITEMS = [{"role": "user", "content": ""}] * (MANY // 8)
_TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
_OF_MODEL = f"/v2/models/{MODEL}"
_MESSAGES = {"model": MODEL, "max_tokens": 1}
_NAMED = {"model": TEXT, "name": TEXT}

BODIES: Mapping[str, tuple[Json, ...]] = {
    "/openai/deployments/scripted/chat/completions": ({"messages": _USER}, {"messages": _BLOCKS}),
    "/openai/deployments/scripted/completions": ({"prompt": TEXT},),
    "/invocations": ({"messages": _BLOCKS}, {"prompt": TEXT}, {"inputs": TEXT}),
    "/v1/responses": ({"model": MODEL, "input": TEXT}, {"model": MODEL, "input": _ITEMS}),
    "/v1/responses/compact": ({"model": MODEL, "input": _ITEMS},),
    "/v1/responses/input_tokens": ({"model": MODEL, "input": TEXT},),
    "/v1/responses/resp_1/cancel": ({"a": TEXT},),
    "/v1/conversations": ({"items": _ITEMS},),
    "/v1/conversations/conv_1": ({"metadata": {"a": TEXT}},),
    "/v1/conversations/conv_1/items": ({"items": _ITEMS},),
    "/v1/embeddings": (
        {"model": "", "input": TEXT},
        {"model": "", "input": ["x"] * MANY},
        {"model": "", "input": [1] * (1 << 19)},
        {"model": "", "input": [[1]] * (MANY // 2)},
    ),
    **dict.fromkeys(("/classify", "/v1/classify", "/pooling"), ({"model": "", "input": [1] * MANY},)),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank"),
        ({"query": TEXT, "documents": [{"text": ""}] * (MANY // 2)}, {"query": "x", "texts": ["x"] * MANY}),
    ),
    **dict.fromkeys(("/score", "/v1/score"), ({"text_1": TEXT, "text_2": TEXT}, {"queries": "x", "documents": ["x"] * MANY})),
    **dict.fromkeys(("/v1/embed", "/v2/embed"), ({"model": "", "texts": ["x"] * MANY},)),
    "/similarity": ({"inputs": {"source_sentence": TEXT, "sentences": ["x"] * MANY}},),
    **dict.fromkeys(("/embed", "/embed_all", "/embed_sparse"), ({"inputs": TEXT}, {"inputs": [1] * MANY})),
    "/predict": ({"inputs": TEXT}, {"inputs": [["x", "y"]] * (MANY // 4)}),
    "/v1/messages": (_MESSAGES | {"messages": _USER}, _MESSAGES | {"messages": _BLOCKS}),
    "/v1/messages/count_tokens": ({"model": MODEL, "messages": _BLOCKS},),
    "/v1/messages/render": (_MESSAGES | {"messages": _BLOCKS},),
    "/v1/chat/completions/render": ({"model": MODEL, "messages": _BLOCKS},),
    "/v1/completions/render": ({"model": MODEL, "prompt": TEXT},),
    "/v1/sessions": ({"name": "x", "session": TEXT},),
    "/v1/sessions/x/restore": ({"session": TEXT},),
    "/slots/1": ({"filename": TEXT},),
    "/v1/messages/batches": ({"requests": [{}] * MANY},),
    "/api/chat": ({"model": MODEL, "messages": _USER}, {"model": MODEL, "messages": [{"role": "user"}] * (MANY // 8)}),
    "/api/generate": ({"model": MODEL, "prompt": TEXT}, {"model": MODEL, "prompt": "x", "context": [1] * MANY}),
    **dict.fromkeys([f"/api/{verb}" for verb in ("show", "pull", "embed", "embeddings", "create", "push", "copy")], (_NAMED,)),
    f"{_OF_MODEL}/infer": ({"inputs": [_TENSOR | {"data": [TEXT]}]}, {"inputs": [_TENSOR | {"data": [""] * MANY}]}),
    f"{_OF_MODEL}/versions/1/infer": ({"inputs": [_TENSOR] * MANY},),
    f"{_OF_MODEL}/generate": ({"text_input": TEXT},),
    f"{_OF_MODEL}/versions/1/generate": ({"text_input": "x", "parameters": {f"p{number}": 1 for number in range(MANY)}},),
    f"{_OF_MODEL}/generate_stream": ({"text_input": TEXT},),
    f"{_OF_MODEL}/versions/1/generate_stream": ({"text_input": TEXT},),
    f"{_OF_MODEL}/trace/setting": ({"a": TEXT},),
    "/v2/repository/index": ({"ready": TEXT},),
    f"/v2/repository/models/{MODEL}/load": ({"parameters": [{}] * MANY},),
    f"/v2/repository/models/{MODEL}/unload": ({"parameters": [{}] * MANY},),
    "/sleep": ({"level": [{}] * MANY},),
    "/wake_up": ({"tags": [{}] * MANY},),
    "/v2/systemsharedmemory/region/x/register": ({"key": TEXT},),
    "/v2/cudasharedmemory/region/x/register": ({"raw_handle": TEXT},),
    "/v2/trace/setting": ({"a": [{}] * MANY},),
    "/v2/logging": ({"a": [{}] * MANY},),
    "/completion": ({"prompt": TEXT}, {"prompt": ["x"] * MANY}),
    "/completions": ({"prompt": [1] * MANY},),
    "/infill": ({"input_prefix": TEXT, "input_suffix": TEXT}, {"input_prefix": "x", "input_extra": [{"text": ""}] * MANY}),
    "/apply-template": ({"messages": _BLOCKS},),
    "/v1/chat/completions/control": ({"id": TEXT, "action": "reasoning_end"},),
    "/": ({"inputs": TEXT},),
    "/generate": ({"inputs": TEXT}, {"inputs": "x", "parameters": {"stop": ["x"] * MANY}}),
    "/generate_stream": ({"inputs": TEXT},),
    "/chat_tokenize": ({"messages": _BLOCKS},),
}  # fmt: skip


def _made(body: Json) -> Callable[[], bytes]:
    return lambda: json.dumps(body).encode()


OF_DIALECTS: Mapping[str, tuple[str, Callable[[], bytes]]] = {
    f"{path} {number}": (path, _made(body)) for path, bodies in BODIES.items() for number, body in enumerate(bodies)
}
