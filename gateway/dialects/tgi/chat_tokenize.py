"""POST /chat_tokenize: the rendered chat template, and its tokens."""

from __future__ import annotations

import asyncio

from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked
from gateway.dialects.openai.chat import Chat
from gateway.dialects.openai.schema import ChatRequest
from gateway.dialects.tgi.objects import simple_tokens
from gateway.http.problem import Json


class ChatTokenize:
    """A chat's body in, its prompt out."""

    body = ChatRequest

    async def answer(self, body: ChatRequest, answers: Answers, asked: Asked) -> Json:
        served = answers.find(body.model)
        (prompt,) = Chat().ask(body).prompts
        token_ids = await answers.tokenising.tokens(prompt, served, name="messages")

        def told() -> Json:
            tokens = list(simple_tokens(served.tokenizer, token_ids))
            return {"tokenize_response": tokens, "templated_text": "".join(token["text"] for token in tokens)}

        return await asyncio.to_thread(told)
