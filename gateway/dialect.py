"""From a validated OpenAI request to generations, and from their pieces to chunks or one whole answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.errors import InvalidRequestError
from common.messages import SamplingParams
from gateway.budgets import Budgets
from gateway.charge import Charge, charge
from gateway.choice import Choice, Piece
from gateway.generation import Generation, Generations, GenerationSpec
from gateway.responses import ContextLengthError, ModelNotFoundError, chat_logprobs, completion_logprobs, usage
from gateway.schema import ChatRequest, CompletionRequest
from gateway.tenants import ANYBODY, Tenant
from gateway.tokenizer import ChatTokenizer

MAX_PROMPTS = 64
PIECES_A_TURN = 64  # of one choice, before others get their turn
BUFFERED_PIECES = 256  # of one answer; a client that reads slower makes its own stream wait


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from: whose it is, the span around it (W3C), and when it came in (`time.monotonic()`)."""

    tenant: Tenant = ANYBODY
    traceparent: str = ""
    received_at: float = 0.0


@dataclass(slots=True, kw_only=True)
class Answer:
    """A request being answered: its choices and what `usage` needs."""

    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    charge: Charge | None = None

    async def cancel(self, reason: str) -> None:
        """Stop every choice on all workers, and settle what the answer cost. Idempotent."""
        if self.charge is not None:
            self.charge.settle(self.used_tokens)
        # one after the other: nothing here waits, so it also completes under a cancellation
        for choice in self.choices:
            await choice.generation.cancel(reason)

    @property
    def used_tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(choice.completion_tokens for choice in self.choices)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the HTTP answer: what is left of the tenant's budget."""
        return self.charge.headers if self.charge is not None else {}

    @property
    def choices_per_prompt(self) -> int:
        return max(1, len(self.choices) // len(self.prompts))

    def usage(self) -> dict[str, Any]:
        """Prompt tokens count once, however many choices; cached ones as the first choice of each prompt saw them."""
        return usage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=sum(choice.completion_tokens for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in self.choices[:: self.choices_per_prompt]),
        )

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """The pieces of all choices as they come. The first error ends all of them and is raised."""
        try:
            pieces = self._only(self.choices[0]) if len(self.choices) == 1 else self._merged()
            async with contextlib.aclosing(pieces):
                async for item in pieces:
                    yield item
        finally:
            await self.cancel("answer ended")

    async def _only(self, choice: Choice) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """Without a task between a token and its text. Where much is there already, others get their turn in between."""
        count = 0
        async with contextlib.aclosing(choice.pieces()) as pieces:
            async for piece in pieces:
                yield choice, piece
                count += 1
                if count % PIECES_A_TURN == 0:
                    await asyncio.sleep(0)

    async def _merged(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        queue: asyncio.Queue[tuple[Choice, Piece] | BaseException | None] = asyncio.Queue(BUFFERED_PIECES)

        async def pump(choice: Choice) -> None:
            try:
                async for piece in choice.pieces():
                    await queue.put((choice, piece))
                await queue.put(None)
            except Exception as error:  # also our own mistakes: whoever waits for this choice must hear of them
                await queue.put(error)

        pumps = [asyncio.create_task(pump(choice)) for choice in self.choices]
        try:
            running = len(pumps)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()


class Dialect:
    """Starts answers. `max_deadline_s` bounds what a client may ask for."""

    def __init__(
        self,
        *,
        generations: Generations,
        tokenizer: ChatTokenizer,
        budgets: Budgets,
        served_model: str,
        default_deadline_s: float,
    ) -> None:
        self._budgets = budgets
        self.generations = generations
        self.tokenizer = tokenizer
        self.served_model = served_model
        self._default_deadline_s = default_deadline_s

    def check_model(self, model: str) -> None:
        """Raises ModelNotFoundError for a model that is not the served one."""
        if model != self.served_model:
            raise ModelNotFoundError(
                f"the model {model!r} does not exist; this gateway serves {self.served_model!r}", param="model"
            )

    async def start_chat(self, request: ChatRequest, origin: Origin) -> Answer:
        """Render, tokenise and submit. Raises ServingError."""
        prompt = await asyncio.to_thread(
            self.tokenizer.encode_chat,
            [message.as_template_input() for message in request.messages],
            add_generation_prompt=request.opens_answer,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
        )
        return await self._start(request, [prompt], prefix="chatcmpl", kind="chat.completion", origin=origin)

    async def start_completion(self, request: CompletionRequest, origin: Origin) -> Answer:
        """Tokenise and submit every prompt. Raises ServingError."""
        prompts = request.prompts
        if len(prompts) * (request.n or 1) > MAX_PROMPTS:
            raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts times n are allowed", param="prompt")
        tokenised = [
            await asyncio.to_thread(self.tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        return await self._start(request, tokenised, prefix="cmpl", kind="text_completion", origin=origin)

    async def _start(
        self,
        request: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        *,
        prefix: str,
        kind: str,
        origin: Origin,
    ) -> Answer:
        answer = Answer(id=f"{prefix}-{uuid.uuid4().hex}", object=kind, model=self.served_model, prompts=prompts)
        seed = request.seed % 2**64 if request.seed is not None else secrets.randbits(64)
        for prompt in prompts:
            self._check_prompt(prompt)
        if request.priority > origin.tenant.max_priority:
            raise InvalidRequestError(
                f"priority: at most {origin.tenant.max_priority} is allowed with this API key", param="priority"
            )
        specs: list[GenerationSpec] = []
        for prompt in prompts:
            sampling = self._sampling(request, prompt)
            for _ in range(request.n or 1):
                own = msgspec.structs.replace(sampling, seed=choice_seed(seed, len(specs)))
                spec = GenerationSpec(
                    request_id=f"{answer.id}-{len(specs)}",
                    token_ids=prompt,
                    sampling=own,
                    deadline_s=request.timeout or self._default_deadline_s,
                    first_token_s=request.ttft_timeout or 0.0,
                    salt=origin.tenant.salt(request.cache_salt or ""),
                    tenant=origin.tenant,
                    priority=request.priority,
                    traceparent=origin.traceparent,
                    received_at=origin.received_at,
                )
                specs.append(spec)
        answer.charge = await charge(
            self._budgets,
            origin.tenant,
            answer.id,
            tokens=sum(map(len, prompts)) + sum(spec.sampling.max_tokens for spec in specs),
            ttl_s=specs[0].deadline_s,
        )
        try:
            generations = await self.generations.submit(specs)
        except BaseException:
            if answer.charge is not None:
                answer.charge.settle(None)
            raise
        for index, generation in enumerate(generations):
            answer.choices.append(self._choice(request, generation, specs[index].sampling, index))
        return answer

    def _choice(
        self, request: ChatRequest | CompletionRequest, generation: Generation, sampling: SamplingParams, index: int
    ) -> Choice:
        return Choice(
            generation,
            self.tokenizer,
            index=index,
            stops=request.stops,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            min_tokens=request.min_tokens or 0,
            stop_token_ids=frozenset(sampling.stop_token_ids),
        )

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        if max(prompt) >= self.tokenizer.vocab_size:
            raise InvalidRequestError(f"a token id is not below {self.tokenizer.vocab_size}", param="prompt")
        limit = self.generations.max_model_len
        if limit is not None and len(prompt) >= limit:
            raise ContextLengthError(
                f"this model's context has {limit} tokens, the prompt {len(prompt)}: shorten it", param="prompt"
            )

    def _sampling(self, request: ChatRequest | CompletionRequest, prompt: list[int]) -> SamplingParams:
        bias = {int(token): float(value) for token, value in (request.logit_bias or {}).items()}
        outside = [token for token in bias if token >= self.tokenizer.vocab_size]
        if outside:
            raise InvalidRequestError(f"token {outside[0]} is not in the vocabulary", param="logit_bias")
        if any(token >= self.tokenizer.vocab_size for token in request.stop_token_ids or []):
            raise InvalidRequestError("a token is not in the vocabulary", param="stop_token_ids")
        eos = [] if request.ignore_eos else self.tokenizer.eos_ids
        max_tokens = self._max_tokens(request, prompt)
        return SamplingParams(
            temperature=1.0 if request.temperature is None else float(request.temperature),
            top_p=1.0 if request.top_p is None else float(request.top_p),
            top_k=max(0, request.top_k or 0),
            min_p=float(request.min_p or 0),
            presence_penalty=float(request.presence_penalty or 0),
            frequency_penalty=float(request.frequency_penalty or 0),
            repetition_penalty=1.0 if request.repetition_penalty is None else float(request.repetition_penalty),
            logit_bias=bias,
            logprobs=request.num_logprobs,
            max_tokens=max_tokens,
            min_tokens=min(request.min_tokens or 0, max_tokens),
            stop_token_ids=list(dict.fromkeys([*eos, *(request.stop_token_ids or [])])),
        )

    def _max_tokens(self, request: ChatRequest | CompletionRequest, prompt: list[int]) -> int:
        """What was asked for, or else the rest of the context (OpenAI's 16 for completions is nobody's wish any more)."""
        limit = self.generations.max_model_len
        room = limit - len(prompt) if limit is not None else 2**31
        wanted = request.wanted_tokens
        if wanted is not None and wanted > room:
            raise ContextLengthError(
                f"this model's context has {limit} tokens; the prompt has {len(prompt)} and {wanted} were asked for",
                param="max_completion_tokens"
                if isinstance(request, ChatRequest) and request.max_completion_tokens is not None
                else "max_tokens",
            )
        return room if wanted is None else wanted

    # -- formats ---------------------------------------------------------------------------------------------------

    def head(self, answer: Answer, *, chunk: bool) -> dict[str, Any]:
        """The fields that every object of the answer carries."""
        kind = "chat.completion.chunk" if chunk and answer.object == "chat.completion" else answer.object
        return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}

    def opening(
        self, request: ChatRequest | CompletionRequest, answer: Answer, choice: Choice
    ) -> dict[str, Any] | None:
        """The entry of a stream's first chunk of `choice`: the role, or the prompt if it is echoed."""
        entry: dict[str, Any] = {"index": choice.index, "logprobs": None, "finish_reason": None}
        if isinstance(request, ChatRequest):
            return entry | {"delta": {"role": "assistant", "content": "", "refusal": None}}
        echo = self.echo(request, answer, choice.index)
        return entry | {"text": echo} if echo else None

    def chunk_choice(
        self, request: ChatRequest | CompletionRequest, choice: Choice, piece: Piece
    ) -> dict[str, Any] | None:
        """One entry of `choices` of a streamed chunk; None if `piece` has nothing to tell, since its text is held back."""
        if not (piece.text or piece.finish or piece.logprobs or request.return_token_ids):
            return None
        entry: dict[str, Any] = {"index": choice.index}
        if isinstance(request, ChatRequest):
            entry["delta"] = {"content": piece.text} if piece.text or not piece.finish else {}
        else:
            entry["text"] = piece.text
        entry["logprobs"] = self._logprobs(request, piece)
        entry["finish_reason"] = piece.finish or None
        if request.return_token_ids:
            entry["token_ids"] = piece.token_ids
        return entry

    async def whole(
        self,
        request: ChatRequest | CompletionRequest,
        answer: Answer,
        pieces: AsyncGenerator[tuple[Choice, Piece], None],
    ) -> dict[str, Any]:
        """Take all of the answer's `pieces` and return its object. Raises ServingError."""
        merged = {choice.index: Piece(text="") for choice in answer.choices}
        async with contextlib.aclosing(pieces):
            async for choice, piece in pieces:
                whole = merged[choice.index]
                whole.text += piece.text
                whole.token_ids += piece.token_ids
                whole.logprobs += piece.logprobs
                whole.finish = piece.finish
        choices = [self._whole_choice(request, answer, index, piece) for index, piece in sorted(merged.items())]
        return self.head(answer, chunk=False) | {
            "choices": choices,
            "usage": answer.usage(),
            "system_fingerprint": None,
        }

    def _whole_choice(
        self, request: ChatRequest | CompletionRequest, answer: Answer, index: int, piece: Piece
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {"index": index, "finish_reason": piece.finish}
        if isinstance(request, ChatRequest):
            entry["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        else:
            entry["text"] = self.echo(request, answer, index) + piece.text
        entry["logprobs"] = self._logprobs(request, piece)
        if request.return_token_ids:
            entry["token_ids"] = piece.token_ids
        return entry

    def echo(self, request: ChatRequest | CompletionRequest, answer: Answer, index: int) -> str:
        """The prompt's text, when `echo` asks for it."""
        if not isinstance(request, CompletionRequest) or not request.echo:
            return ""
        prompt = request.prompts[index // answer.choices_per_prompt]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=False)

    def _logprobs(self, request: ChatRequest | CompletionRequest, piece: Piece) -> dict[str, Any] | None:
        if request.num_logprobs is None:
            return None
        if isinstance(request, ChatRequest):
            return chat_logprobs(self.tokenizer, piece.token_ids, piece.logprobs)
        return completion_logprobs(self.tokenizer, piece.token_ids, piece.logprobs, offset=piece.offset)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the client's for the first, hashed with the index for the others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
