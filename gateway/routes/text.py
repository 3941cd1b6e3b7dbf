"""Text tools: tokenize and detokenize, without generating anything."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from pydantic import Field, PrivateAttr, StrictBool, StrictStr, model_validator

from common.errors import InvalidRequestError
from gateway.answers.ask import MAX_TOOLS, Conversation, Prompt, Text, ToolRules
from gateway.answers.catalogue import Served
from gateway.answers.start import Answers
from gateway.answers.tokenising import COUNTED_CONTEXTS, largest
from gateway.answers.tokenizer import ChatTokenizer
from gateway.dialects.openai.messages import MAX_MESSAGES, Message, ToolDefinition, rules_of
from gateway.dialects.tgi.objects import simple_tokens
from gateway.http.api import ApiPart, fields, post, ref
from gateway.http.application import Routes
from gateway.http.body import BodyLimits, read_fields
from gateway.http.fields import MAX_TOKEN_IDS, StrictFields, TokenIds
from gateway.http.problem import Json, json_response

_TEXTS = ("messages", "prompt", "inputs", "content")
_ONLY_WITH = {
    "messages": ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"),
    "inputs": ("parameters",),
    "content": ("add_special", "with_pieces"),
}


class TokenizeRequest(StrictFields):
    """Body of POST /tokenize: `prompt`, `messages`, `inputs` in TGI's form, or `content` in llama.cpp's."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    inputs: Annotated[StrictStr, Field(min_length=1)] | None = None
    parameters: Annotated[dict[str, Any], Field(max_length=64)] | None = None  # TGI's, ignored
    content: StrictStr | None = None
    add_special: StrictBool = False  # llama.cpp's, as the next
    with_pieces: StrictBool = False
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: StrictBool | None = None  # unset: a prompt gets them, a chat template writes its own
    parse_special: StrictBool | None = None  # unset: a prompt is parsed, messages are not

    # Options for `messages`, as in chat.
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    _tools: ToolRules = PrivateAttr(default_factory=ToolRules)

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if [getattr(self, name) for name in _TEXTS].count(None) != len(_TEXTS) - 1:
            raise ValueError("prompt: give one of prompt, messages, inputs and content")
        for text, names in _ONLY_WITH.items():
            given = [name for name in names if getattr(self, name) not in (None, False, [], {})]
            if given and self.field != text:
                raise ValueError(f"{given[0]}: only with {text}")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: not allowed together with add_generation_prompt")
        if self.continue_final_message and self.messages and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message: the final message must be the assistant's")
        self._tools = rules_of([tool.function.as_tool() for tool in self.tools or ()], None, parallel=True)
        return self

    @property
    def field(self) -> str:
        """The field that has the text."""
        return next(name for name in _TEXTS if getattr(self, name) is not None)

    @property
    def asked(self) -> Prompt:
        if self.content is not None:
            return Text(self.content, self.parse_special is not False, self.add_special)
        if self.messages is None:
            return Text(
                self.prompt or self.inputs or "", self.parse_special is not False, self.add_special_tokens is not False
            )
        opens = self.add_generation_prompt
        return Conversation(
            messages=[message.as_template_input() for message in self.messages],
            tools=self._tools.tools,
            opens_answer=not self.continue_final_message if opens is None else opens,
            continues_final_message=self.continue_final_message,
            variables=self.chat_template_kwargs,
            parse_special=bool(self.parse_special),
            adds_special=bool(self.add_special_tokens),
        )


class DetokenizeRequest(StrictFields):
    """Body of POST /detokenize."""

    many: ClassVar[Mapping[str, int]] = {"tokens": MAX_TOKEN_IDS}

    model: StrictStr | None = None
    tokens: TokenIds


class TextRoutes:
    """vLLM's and llama.cpp's /tokenize and /detokenize, the first one TGI's as well."""

    def __init__(self, answers: Answers, body_limits: BodyLimits) -> None:
        self._answers = answers
        self._body_limits = body_limits
        tokens = fields(
            {
                "tokens": {"type": "array", "items": {"type": "integer"}},
                "count": {"type": "integer"},
                "max_model_len": {"type": ["integer", "null"]},
            }
        )
        spans = {"type": "array", "items": ref("SimpleToken")}
        text = fields({"prompt": {"type": "string"}, "content": {"type": "string"}})
        self.routes = Routes(
            posts={"/tokenize": self.tokenize, "/detokenize": self.detokenize},
            api=ApiPart(
                paths={
                    "/tokenize": {"post": post(TokenizeRequest, {"anyOf": [tokens, spans]})},
                    "/detokenize": {"post": post(DetokenizeRequest, text)},
                },
                bodies=(TokenizeRequest, DetokenizeRequest),
            ),
        )

    async def tokenize(self, request: Request) -> Response:
        """Token ids of `prompt` or of chat `messages`; those of `inputs` with offsets."""
        body = await read_fields(request, self._body_limits, TokenizeRequest)
        served = self._served(body.model)
        tokens = await self._answers.tokenising.tokens(body.asked, served, name=body.field, contexts=COUNTED_CONTEXTS)
        if body.with_pieces:
            return json_response({"tokens": [_with_piece(served.tokenizer, token) for token in tokens]})
        if body.inputs is not None:
            own = served.tokenizer.controls.around if body.add_special_tokens is not False else ([], [])
            return json_response(await asyncio.to_thread(_spans, served.tokenizer, tokens, own))
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": served.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`: vLLM's clients read `prompt`, llama.cpp's `content`."""
        body = await read_fields(request, self._body_limits, DetokenizeRequest)
        tokenizer = self._served(body.model).tokenizer
        text = await asyncio.to_thread(_text_of, tokenizer, body.tokens)
        return json_response({"prompt": text, "content": text})

    def _served(self, model: str | None) -> Served:
        """The model in the body, else the default one. Raises ModelNotFoundError."""
        return self._answers.find(model or "")


def _spans(tokenizer: ChatTokenizer, tokens: list[int], own: tuple[list[int], list[int]]) -> list[Json]:
    """Tokens in TGI's form; the tokenizer added its `own` at both ends."""
    before, after = own
    return list(simple_tokens(tokenizer, tokens[len(before) : len(tokens) - len(after)], own))


def _with_piece(tokenizer: ChatTokenizer, token_id: int) -> Json:
    """A token's text, or its bytes if they are part of a character."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return {"id": token_id, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(raw)}


def _text_of(tokenizer: ChatTokenizer, tokens: list[int]) -> str:
    """Raises InvalidRequestError."""
    if largest(tokens) >= tokenizer.vocab_size:
        raise InvalidRequestError("a token is not in the vocabulary", param="tokens")
    return tokenizer.decode(tokens, skip_special_tokens=False)
