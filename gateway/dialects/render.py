"""The calls `…/render`: the prompt of an endpoint's body, in text and tokens, of which nothing is generated.

Routers that stand before Baton hash these tokens, to find the pod that has the prompt's blocks.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked, Endpoint
from gateway.http.api import fields
from gateway.http.problem import Json

RENDERED: Json = fields(
    {
        "request_id": {"type": "string"},
        "model": {"type": "string"},
        "token_ids": {"type": "array", "items": {"type": "integer"}},
        "prompt": {"type": "string"},
    }
)


class Render:
    """An endpoint's body in, its prompt out, in vLLM's form: an object; a list of them for one with several prompts."""

    def __init__(self, endpoint: Endpoint[Any], *, has_several: bool = False) -> None:
        self._endpoint, self._has_several = endpoint, has_several
        self.body = endpoint.body

    async def answer(self, body: Any, answers: Answers, asked: Asked) -> Any:
        ask = self._endpoint.ask(body)
        served = answers.find(ask.model)
        prompts = await answers.tokenised(ask, served)

        def told() -> list[Json]:
            return [
                {
                    "request_id": asked.request_id,
                    "model": served.asked_as,
                    "token_ids": token_ids,
                    "prompt": served.tokenizer.decode(token_ids, skip_special_tokens=False),
                }
                for token_ids in prompts
            ]

        rendered = await asyncio.to_thread(told)
        return rendered if self._has_several else rendered[0]
