"""The path from a client's ask to an answer: tokenise, check, charge, submit. The same for all dialects."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from common.errors import DeadlineExceededError, InvalidRequestError, UnavailableError
from common.messages import Grammar, SamplingParams
from common.tasks import Ready
from gateway.answers.answer import Answer, Turn, charge
from gateway.answers.ask import Ask, ContextFit, Infill, Prompt, Reply, Sampling, Terms, with_preset
from gateway.answers.catalogue import Catalogue, ModelCard, Served, Tallies
from gateway.answers.changes import Changes
from gateway.answers.choice import Choice, MessageReader
from gateway.answers.sessions import SessionStates
from gateway.answers.steering import Steering
from gateway.answers.tokenising import Tokenising, context_error, prompt_error
from gateway.answers.tokenizer import ChatTokenizer
from gateway.grammars.messages import MessageWish, grammar_of_message
from gateway.grammars.wanted import Wanted
from gateway.http.problem import ModelNotFoundError
from gateway.request.spec import NO_AIMS, Aims, DraftRules, Generations, GenerationSpec, Loads, Origin, Sharing
from gateway.tenants.budgets import Budgets
from gateway.tenants.tenants import Tenant

log = logging.getLogger(__name__)

MAX_SEQUENCES = 64  # prompts times choices of one request
MAX_SCORES_BYTES = 512 * 1024  # prompt logprobs of one answer


class Answers:
    """Starts answers. `default_deadline_s` is for requests that name no deadline."""

    def __init__(
        self,
        *,
        generations: Generations,
        catalogue: Catalogue,
        budgets: Budgets,
        default_deadline_s: float,
        aims: Aims = NO_AIMS,
        loads: Loads | None = None,
        changes: Changes | None = None,
    ) -> None:
        self._budgets, self.loads = budgets, loads
        self.changes = changes or Changes()
        self._default_deadline_s, self._aims = default_deadline_s, aims
        self.started_at = int(time.time())
        self._turn = Turn()
        self._calls_as_text: set[str] = set()  # models already logged
        self.generations = generations
        self.catalogue = catalogue
        self.tokenising = Tokenising()
        self.steering = Steering()
        self.sessions = SessionStates()
        self.tallies = Tallies(catalogue.labels)
        generations.timelines.on_end(self.tallies.observe)

    def models(self) -> list[ModelCard]:
        """The served models under each of their names, also those without a ready worker."""
        return [self._card(served) for served in self.catalogue.listed()]

    def model(self, name: str) -> ModelCard:
        """Raises ModelNotFoundError."""
        return self._card(self.find(name))

    def _card(self, served: Served) -> ModelCard:
        format_ = served.tokenizer.format.format
        return ModelCard(
            name=served.asked_as,
            own_name=served.name,
            created=self.started_at,
            max_model_len=served.max_model_len,
            tool_call_format=format_.name or None,
            reasoning_format=format_.reasoning or None,
            whole_len=served.whole_len,
            whole_kv_mb=served.whole_kv_mb,
            can_chat=served.tokenizer.can_chat,
        )

    def find(self, name: str, own_name: str = "") -> Served:
        """Look up a model. Raises ModelNotFoundError, which lists the names, or UnavailableError for one that may come.

        `own_name`: see `Catalogue.find`.
        """
        served = self.catalogue.find(name, own_name)
        if served is None and self.catalogue.is_coming(name):
            raise UnavailableError(f"the model {name!r} may be here in a moment: ask again")
        if served is None:
            raise ModelNotFoundError(self.catalogue.unknown(name), param="model")
        return served

    def check(self, ask: Ask, tenant: Tenant, own_name: str = "") -> Served:
        """Raise any ServingError that `start` would raise, before tokenising; or return the model: see `find`."""
        served = self.find(ask.model, own_name)
        terms, deadline_s = ask.terms, self.deadline_s(ask.terms)
        first_token_s = min(deadline_s, terms.first_token_s or deadline_s)
        self.generations.turn_away(tenant, priority=terms.priority, first_token_s=first_token_s, model=served.name)
        if ask.reply is not None and ask.reply.tools.tools:
            self._check_calls(served)
        return served

    def deadline_s(self, terms: Terms) -> float:
        return terms.deadline_s or self._default_deadline_s

    def _check_calls(self, served: Served) -> None:
        """Log once for each model that its calls can't be parsed."""
        if served.tokenizer.format.format.name or served.name in self._calls_as_text:
            return
        self._calls_as_text.add(served.name)
        log.warning(
            "model %s was given tools, and how it writes calls isn't known: they come as text; see --tool-call-parser",
            served.name,
        )

    async def start(self, ask: Ask, origin: Origin, served: Served) -> Answer:
        """Tokenise and submit; return when all choices may start. Raises ServingError."""
        if len(ask.prompts) * ask.sampling.n > MAX_SEQUENCES:
            raise InvalidRequestError(
                f"at most {MAX_SEQUENCES} prompts times n are allowed", param=ask.name_of("prompt")
            )
        give_up_at = asyncio.get_running_loop().time() + self.deadline_s(ask.terms)
        ask = with_preset(ask, served.preset)
        prompts = await self._tokenised(ask, served, give_up_at)
        try:
            async with asyncio.timeout_at(give_up_at):
                grammar = await _grammar(ask, served, prompts[0], origin.tenant.name)
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed before the grammar was checked") from None
        answer = Answer(
            id=f"{ask.answer_prefix}{uuid.uuid4().hex}",
            model=served.asked_as,
            own_model=served.name,
            weights=served.fingerprint,
            tokenizer=served.tokenizer,
            turn=self._turn,
            prompts=prompts,
        )
        drafts = await self.tokenising.drafts(ask.sampling.drafts, served, give_up_at, name=ask.name_of("prediction"))
        specs = self._specs(ask, origin, answer, served, grammar, drafts)
        answer.charge = await charge(
            self._budgets,
            origin.tenant,
            answer.id,
            tokens=sum(map(len, prompts)) + sum(spec.sampling.max_tokens for spec in specs),
            ttl_s=specs[0].deadline_s,
            used=lambda: answer.used_tokens if answer.choices else 0,  # a waiting one used nothing
        )
        try:
            generations = await self.generations.submit(specs)
        except BaseException:
            if answer.charge is not None:
                answer.charge.settle(None)
            raise
        answer.choices = [
            Choice(
                generation,
                served.tokenizer,
                index=index,
                rules=ask.text,
                sampling=spec.sampling,
                scored_prompt=None if spec.sampling.prompt_logprobs is None else spec.token_ids,
                reply=ask.reply,
                prompt=spec.token_ids,
            )
            for index, (spec, generation) in enumerate(zip(specs, generations, strict=True))
        ]
        if session := origin.session or ask.terms.keep.session:
            self.sessions.follow(answer, session, tenant=origin.tenant.name, cache_salt=ask.terms.cache_salt)
        if ask.reply is not None:
            closing = partial(_closing, ask, ask.reply, served, prompts[0], origin.tenant.name)
            self.steering.add(answer, origin.tenant.name, closing if ask.reply.is_steered else None)
        return answer

    async def tokenised(self, ask: Ask, served: Served) -> list[list[int]]:
        """Tokens of an ask's prompts. Raises ServingError."""
        return await self._tokenised(with_preset(ask, served.preset), served, None)

    async def _tokenised(self, ask: Ask, served: Served, give_up_at: float | None) -> list[list[int]]:
        name, keep, found = ask.name_of("prompt"), _kept(ask.fit, ask.sampling, served), list[list[int]]()
        for prompt in ask.prompts:
            making = self.tokenising.tokens(prompt, served, name=name, keep=keep)
            if isinstance(making, Ready):
                found.append(making.result)
                continue
            try:
                async with asyncio.timeout_at(give_up_at):
                    found.append(await making)
            except TimeoutError:
                raise DeadlineExceededError("the deadline passed before the prompt was tokenised") from None
        return found

    def _specs(
        self, ask: Ask, origin: Origin, answer: Answer, served: Served, grammar: Grammar | None, drafts: DraftRules
    ) -> list[GenerationSpec]:
        """A specification for each choice of each prompt. Raises InvalidRequestError."""
        for prompt in answer.prompts:
            _check_prompt(prompt, served, name=ask.name_of("prompt"))
        terms = ask.terms
        if terms.priority > origin.tenant.max_priority:
            name, most = ask.name_of("priority"), origin.tenant.max_priority
            raise InvalidRequestError(f"{name}: at most {most} is allowed with this API key", param=name)
        seed = ask.sampling.seed if ask.sampling.seed is not None else secrets.randbits(64)
        specs: list[GenerationSpec] = []
        for prompt in answer.prompts:
            sampling = _sampling(ask, prompt, served)
            for _ in range(ask.sampling.n):
                spec = GenerationSpec(
                    request_id=f"{answer.id}-{len(specs)}",
                    token_ids=prompt,
                    sampling=msgspec.structs.replace(sampling, seed=choice_seed(seed, len(specs))),
                    deadline_s=self.deadline_s(terms),
                    model=served.name,
                    model_fingerprint=served.fingerprint,
                    sharing=Sharing(
                        served.adapter,
                        origin.tenant.salt(terms.cache_salt),
                        origin.tenant.keeps(ask.keep, session=origin.session),
                    ),
                    origin=origin,
                    priority=terms.priority,
                    grammar=grammar,
                    drafts=drafts,
                    aim=self._aims.of(
                        terms.goal.or_else(origin.tenant.goal),
                        priority=terms.priority,
                        first_token_s=terms.first_token_s or 0.0,
                    ),
                )
                specs.append(spec)
        return specs


async def _closing(ask: Ask, reply: Reply, served: Served, prompt: list[int], tenant: str) -> Grammar:
    """A grammar that closes the reasoning of a thinking answer. Raises as `_grammar`."""
    ended = replace(ask, reply=replace(reply, thinking_budget=0))
    grammar = await _grammar(ended, served, prompt, tenant, is_thinking=True)
    assert grammar is not None  # a thinking budget implies a grammar
    return grammar


async def _grammar(
    ask: Ask, served: Served, prompt: list[int], tenant: str, *, is_thinking: bool = False
) -> Grammar | None:
    """The grammar of an ask. Raises as `GrammarMaker.make`, and UnavailableError while an older worker would ignore it."""
    wanted, limits = ask.constraint.grammar, ask.constraint.limits
    if ask.reply is not None:
        wanted = await _message_grammar(ask, ask.reply, served.tokenizer, prompt, tenant, is_thinking=is_thinking)
    if wanted is None and not limits:
        return None
    if not served.follows_grammars:
        field = wanted.field if wanted is not None else "allowed_token_ids, bad_words"
        raise UnavailableError(f"{field}: not every worker of this model can follow a grammar now")
    grammar = None if wanted is None else await _followed(ask.sampling, wanted, served, tenant)
    if not limits:
        return grammar
    encode = partial(served.tokenizer.encode, add_special_tokens=False, parse_special=False)
    added = partial(limits.added_to, grammar, encode, served.tokenizer.vocab_size)
    return await asyncio.to_thread(added) if limits.bad_words else added()


async def _message_grammar(
    ask: Ask, reply: Reply, tokenizer: ChatTokenizer, prompt: list[int], tenant: str, *, is_thinking: bool
) -> Wanted | None:
    """The grammar of a message. `is_thinking`: the answer opened its reasoning itself. Raises as `grammar_of_message`."""
    tools = reply.tools
    body = None if tools.must_call else ask.constraint.grammar
    is_bound = tools.must_call or tools.restricts or body is not None
    calls = [tool.as_shape() for tool in tools.tools if tool.name in tools.allowed] if is_bound else ()
    if not calls and body is None and reply.thinking_budget is None:
        return None
    begun = MessageReader(tokenizer, ask.text, reply, prompt)
    wish = MessageWish(
        calls=calls,
        must_call=tools.must_call,
        is_single=not tools.parallel,
        body=body,
        budget=reply.thinking_budget,
        is_reasoning=is_thinking or begun.is_reasoning,
        has_reasoned=is_thinking or begun.has_reasoned,
        may_think=reply.may_think and not tokenizer.opens_reasoning,
    )
    return await grammar_of_message(
        wish,
        tokenizer.format,
        tokenizer.grammars,
        tenant=tenant,
        eos_ids=tokenizer.eos_ids,
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )


async def _followed(sampling: Sampling, wanted: Wanted, served: Served, tenant: str) -> Grammar:
    """The grammar that the answer follows. Raises as `GrammarMaker.make`, and InvalidRequestError."""
    if sampling.ignore_eos:
        raise InvalidRequestError(
            f"ignore_eos: an answer that follows {wanted.field} ends where that ends", param="ignore_eos"
        )
    return await served.tokenizer.grammars.make(wanted, tenant)


def _kept(fit: ContextFit, sampling: Sampling, served: Served) -> int | None:
    """Number of tokens that a prompt keeps, if it may be truncated at its beginning."""
    longest, limit = fit.longest_prompt, served.max_model_len
    if longest != -1:
        return longest
    return None if limit is None else max(1, limit - max(1, sampling.params.max_tokens))


def _check_prompt(prompt: list[int], served: Served, *, name: str) -> None:
    if not prompt:
        raise InvalidRequestError("the prompt has no tokens", param=name)
    limit = served.max_model_len
    if limit is not None and len(prompt) >= limit:
        raise prompt_error(limit, f"{len(prompt)} tokens", name)


def _sampling(ask: Ask, prompt: list[int], served: Served) -> SamplingParams:
    """Sampling parameters of one prompt: the client's, completed with defaults. Raises InvalidRequestError."""
    asked, vocab_size = ask.sampling.params, served.tokenizer.vocab_size
    outside = [token for token in asked.logit_bias if token >= vocab_size]
    if outside:
        raise InvalidRequestError(f"token {outside[0]} is not in the vocabulary", param=ask.name_of("logit_bias"))
    if any(token >= vocab_size for token in asked.stop_token_ids):
        raise InvalidRequestError("a token is not in the vocabulary", param=ask.name_of("stop_token_ids"))
    _check_scores(asked.prompt_logprobs, prompt, name=ask.name_of("prompt_logprobs"))
    max_tokens = _max_tokens(ask, prompt, served)
    eos = [] if ask.sampling.ignore_eos else served.tokenizer.eos_ids
    defaults = {name: value for name, value in served.tokenizer.defaults.items() if name in ask.sampling.left_open}
    return msgspec.structs.replace(
        asked,
        **defaults,
        max_tokens=max_tokens,
        min_tokens=min(asked.min_tokens, max_tokens),
        stop_token_ids=list(dict.fromkeys([*eos, *_ends_of_infill(ask.prompts, served), *asked.stop_token_ids])),
    )


def _ends_of_infill(prompts: Sequence[Prompt], served: Served) -> list[int]:
    form = served.tokenizer.infill
    is_infill = form is not None and any(isinstance(prompt, Infill) for prompt in prompts)
    return form.ends if form is not None and is_infill else []


def _check_scores(count: int | None, prompt: list[int], *, name: str) -> None:
    """Check the size of prompt logprobs, which come in one message; `count`: the likeliest tokens of each position."""
    if count is not None and (each := 8 + 8 * count) * len(prompt) > MAX_SCORES_BYTES:
        raise InvalidRequestError(
            f"{name}: at most {MAX_SCORES_BYTES // each} prompt tokens with {count} of them each,"
            f" this prompt has {len(prompt)}: ask for fewer, or shorten it",
            param=name,
        )


def _max_tokens(ask: Ask, prompt: list[int], served: Served) -> int:
    """The requested number, else the rest of the workers' usual context, or of the longest one."""
    limit, wanted = served.max_model_len, ask.sampling.params.max_tokens
    room = limit - len(prompt) if limit is not None else 2**31
    rest = (served.usual_len or 0) - len(prompt)
    if ask.fit.ends_with_context and room > 0:
        wanted = min(wanted, room)
    if wanted > room:
        name, asked = ask.name_of("prompt"), ask.name_of("max_tokens")
        parts = f"{len(prompt)} in the {name}, {wanted} in the completion"
        error = context_error(limit, f"you requested {len(prompt) + wanted} tokens ({parts})", f"{name} or completion")
        error.param = asked
        raise error
    return (
        (wanted or (rest if rest > 0 else room)) if ask.text.is_wanted else 1
    )  # the prompt's pass samples one in any case


def choice_seed(seed: int, index: int) -> int:
    """The client's seed for the first choice, hashed with the index for the others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
