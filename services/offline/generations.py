"""Generations by an engine of this process: the worker's pipeline and decode scheduler, without bus, store and gateway."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType

from common.blocks import hash_root, pack_tokens
from common.errors import InvalidRequestError, ServingError, StepFailedError, UnavailableError
from common.messages import Feature, Grammar, Job, Region, WorkerState
from common.words import Finish, Role, WorkerStatus
from decode.request import DecodeRequest
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from engine.engine import Chunk, Sampled
from gateway.request.active import timeline_of
from gateway.request.placement import Difference
from gateway.request.spec import GenerationSpec, Load, Mailbox, TokenEvent
from gateway.request.timeline import Timelines
from gateway.tenants.tenants import Tenant
from worker.context import ServedModel
from worker.device.pipeline import Pipeline
from worker.device.prompt_budget import PromptBudget
from worker.device.trials import Trials
from worker.serving.allocation import longest_sequence, publish_computed, sequence_of, withdraw
from worker.serving.checks import check_job
from worker.serving.chunks import finish
from worker.worker import WorkerEngine

OWNER = "offline"
TOKENS_AT_ONCE = 16  # told together; a stop string is noticed so late at most
NOTHING: Mapping[str, int] = MappingProxyType({})


class OfflineGeneration:
    """One sequence, and what was told of it."""

    def __init__(self, owner: OfflineGenerations, spec: GenerationSpec, request: DecodeRequest) -> None:
        self._owner = owner
        self._num_told = 0
        self.request = request
        self.mailbox = Mailbox()
        self.timings: dict[str, float] = {}
        self.timeline = timeline_of(spec, time.monotonic())

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer."""
        return self.request.sequence.token_ids

    def cancel(self, reason: str) -> None:
        """Stop it. Idempotent."""
        self._owner.cancel(self, reason)

    def called(self) -> None:
        """Do nothing: no other turn follows here."""

    def end_reasoning(self, grammar: Grammar) -> bool:
        """Nobody asks for it: there is no second request while this one runs."""
        return False

    def tell(self, *, is_over: bool) -> None:
        """Put the tokens that are not told yet into the mailbox, if they are many, or the last ones."""
        request, sequence = self.request, self.request.sequence
        new = sequence.num_generated - self._num_told
        if not (is_over or new >= TOKENS_AT_ONCE):
            return
        begin = self._num_told
        is_first, self._num_told = not begin, sequence.num_generated
        event = TokenEvent(
            position=begin,
            token_ids=sequence.token_ids[sequence.num_prompt_tokens + begin :],
            logprobs=request.logprobs[begin:],
            finish=request.finish if is_over else Finish.NONE,
            cached_tokens=sequence.num_found or 0 if is_first else -1,
            prompt_logprobs=sequence.prompt_logprobs if is_first else None,
        )
        self.timeline.completion_tokens = self._num_told
        self.mailbox.put(event)


class OfflineGenerations:
    """`Generations` of one model. `run` computes until it is cancelled; a failed pass fails its sequences."""

    not_ready_reason = ""
    differences: Sequence[Difference] = ()
    waiting: Mapping[str, tuple[int, int]] = MappingProxyType({})
    counters: Mapping[str, int] = NOTHING
    loads: Mapping[str, Load] = MappingProxyType({})

    def __init__(self, engine: WorkerEngine, *, name: str, max_batch_tokens: int, max_sequences: int) -> None:
        self._pool = BlockPool.of(engine.layout)
        self._engine, self._name = engine, name
        self._root = hash_root(
            model=engine.fingerprint, kv_dtype=engine.layout.dtype, block_size=engine.layout.block_size
        )
        self.model = ServedModel(
            vocab_size=engine.vocab_size,
            max_model_len=min(engine.max_model_len, longest_sequence(self._pool)),
            max_sequences=max_sequences,
            grammars=engine.grammars,
        )
        trials = Trials()
        self._scheduler = DecodeScheduler(
            pool=self._pool, max_sequences=max_sequences, max_model_len=self.model.max_model_len, trials=trials
        )
        budget = PromptBudget(token_budget=max_batch_tokens, pass_ms=engine.pass_ms)
        self._pipeline = Pipeline(engine=engine, budget=budget, trials=trials)
        self._pipeline.attach(self)
        self._running: dict[DecodeRequest, OfflineGeneration] = {}
        self.timelines = Timelines()
        self.ready = True

    async def run(self) -> None:
        """Compute until cancelled, or until the device is lost, which fails all that runs."""
        try:
            await self._pipeline.run()
        finally:
            self.ready = False
            for generation in [*self._running.values()]:
                self._end(generation, UnavailableError("the engine ended"))

    # -- for answers -----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def ready_workers(self) -> dict[str, int]:
        return {Role.DECODE: 1}

    def fleet(self) -> list[WorkerState]:
        return [*self.ready_of(Role.DECODE)]

    def weights(self, model: str) -> str:
        return self._engine.fingerprint

    def ready_of(self, role: Role) -> list[WorkerState]:
        """The engine as a worker of both roles."""
        state = WorkerState(
            worker=OWNER,
            incarnation=1,
            roles=[Role.DECODE, Role.PREFILL],
            status=WorkerStatus.READY,
            model=self._name,
            model_fingerprint=self._engine.fingerprint,
            tokenizer_fingerprint="",
            vocab_size=self.model.vocab_size,
            max_model_len=self.model.max_model_len,
            region=Region(transport="local", incarnation=1, layout=self._engine.layout, address={}),
            features=frozenset(Feature),
        )
        return [state] if role in state.roles else []

    def turn_away(
        self, tenant: Tenant, *, priority: int, first_token_s: float = math.inf, model: str | None = None
    ) -> None:
        """Refuse nobody: whoever asks waits for its turn."""

    async def submit(self, specs: Sequence[GenerationSpec]) -> Sequence[OfflineGeneration]:
        """Queue sequences. Raises InvalidRequestError, and UnavailableError once the engine ended."""
        if not self.ready:
            raise UnavailableError("the engine ended")
        made = [self._made(spec) for spec in specs]
        for generation in made:
            self._running[generation.request] = generation
        try:
            for generation in made:
                if generation.request.sequence.grammar is not None:
                    await self.model.built(generation.request.sequence)
        except BaseException:
            for generation in made:
                generation.cancel("left while its grammar was built")
            raise
        for generation in made:
            self._scheduler.enqueue(generation.request)
        self._pipeline.wake()
        return made

    def _made(self, spec: GenerationSpec) -> OfflineGeneration:
        job = Job(
            request_id=spec.request_id,
            attempt=1,
            gateway=OWNER,
            token_ids=pack_tokens(spec.token_ids),
            num_prompt_tokens=len(spec.token_ids),
            hash_root=self._root,
            sampling=spec.sampling,
            decode_workers=[],
            deadline_ms=0,
            priority=spec.priority,
            traceparent=spec.origin.traceparent,
            grammar=spec.grammar,
        )
        check_job(job, vocab_size=self.model.vocab_size, max_model_len=self.model.max_model_len)
        request = DecodeRequest(job=job, sequence=sequence_of(job), deadline_at=math.inf, first_position=0)
        return OfflineGeneration(self, spec, request)

    def cancel(self, generation: OfflineGeneration, reason: str) -> None:
        """Stop a sequence that runs; its blocks go back once no pass uses them."""
        request = generation.request
        if self._running.pop(request, None) is not None:
            request.stopped = reason
            self._scheduler.remove(request)
            self._pipeline.wake()

    # -- for the pipeline ------------------------------------------------------------------------------------------

    def plan(self, token_budget: int) -> list[Chunk]:
        return self._scheduler.plan(token_budget)

    def apply(self, results: Sequence[tuple[Chunk, Sampled | None]]) -> None:
        for chunk, sampled in results:
            request = self._scheduler.landed(chunk)
            if request.is_over:
                continue  # planned before its end was known
            further = () if sampled is None else sampled.further
            finish(self._pool, chunk, len(further))
            if sampled is not None and sampled.prompt_logprobs is not None:
                chunk.sequence.scored(chunk, sampled.prompt_logprobs)
            if chunk.sample:
                self._take(self._running[request], [sampled, *further])

    def _take(self, generation: OfflineGeneration, results: Sequence[Sampled | None]) -> None:
        """Append a pass's tokens, and end the sequence with the last of them."""
        request = generation.request
        count = request.take(results, max_model_len=self.model.max_model_len)
        if request.finish:
            publish_computed(self._pool, request.sequence)
            self._end(generation, None)
        elif count < len(results):
            unusable = results[count]
            if unusable is None:
                withdraw(self._pool, request.sequence)
            problem = StepFailedError("no finite logits") if unusable is None else None
            self._end(generation, problem or InvalidRequestError(unusable.problem if unusable else ""))
        else:
            generation.tell(is_over=False)

    def failed(self, chunks: Sequence[Chunk], error: Exception) -> None:
        for chunk in chunks:
            generation = self._running.get(self._scheduler.landed(chunk))
            if generation is not None:
                self._end(generation, StepFailedError(f"step failed: {type(error).__name__}: {error}"[:300]))

    def _end(self, generation: OfflineGeneration, error: ServingError | None) -> None:
        request = generation.request
        self._running.pop(request, None)
        request.ended_at = time.monotonic()
        self._scheduler.remove(request)
        if error is None:
            generation.tell(is_over=True)
        generation.mailbox.close(error)


class Workers:
    """The engine as a catalogue sees it."""

    def __init__(self, generations: OfflineGenerations) -> None:
        self._generations = generations

    def ready(self, role: Role) -> list[WorkerState]:
        return self._generations.ready_of(role)

    def weights(self, model: str) -> str:
        return self._generations.weights(model)


@contextlib.asynccontextmanager
async def computing(generations: OfflineGenerations) -> AsyncIterator[None]:
    """Compute while the context is open."""
    running = asyncio.create_task(generations.run())
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
