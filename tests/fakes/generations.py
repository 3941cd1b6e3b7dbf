"""`gateway.request.spec.Generations` without workers: every request is answered with a scripted list of tokens."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from common.errors import ServingError
from common.messages import Feature, Grammar, KVLayout, PromptLogprobs, Region, TokenLogprobs, WorkerState
from gateway.answers.catalogue import Catalogue
from gateway.answers.tokenizer import ChatTokenizer
from gateway.request.placement import Difference
from gateway.request.spec import GenerationSpec, Load, TokenEvent
from gateway.request.timeline import Timeline, Timelines
from gateway.tenants.tenants import Tenant


class ScriptedGenerations:
    """Answers with `script(spec)`, cut at `max_tokens` and after a stop token as a worker would.

    `refuse` is raised by `submit`; `fail` after `fail_after` tokens. With `hold_after` a generation waits there until it is
    cancelled or `release` is set. `per_event` tokens travel in one event.
    """

    model = "scripted"
    max_model_len: int | None = 256
    not_ready_reason = ""
    waiting = {"low": (0, 0), "normal": (2, 300), "high": (1, 5)}  # noqa: RUF012 - read only
    ready_workers = {"prefill": 1, "decode": 2}  # noqa: RUF012 - read only
    differences: list[Difference] = []  # noqa: RUF012 - read only
    workers: list[WorkerState] = []  # noqa: RUF012 - read only
    counters = {"placed:load": 3, "retries": 2}  # noqa: RUF012 - read only

    def __init__(self, script: Callable[[GenerationSpec], Sequence[int]]) -> None:
        self.script = script
        self.submitted: list[GenerationSpec] = []
        self.running: dict[str, ScriptedGeneration] = {}
        self.called: list[str] = []  # ids of requests that ended by a tool call
        self.cancelled: dict[str, str] = {}  # request id -> reason, of those that had not ended
        self.changed = asyncio.Condition()
        self.refuse: ServingError | None = None
        self.turned_away: ServingError | None = None  # raised before anything was read
        self.asked: list[tuple[int, float]] = []  # of `turn_away`
        self.fail: Exception | None = None
        self.fail_after = 0
        self.hold_after: int | None = None
        self.release = asyncio.Event()
        self.entrance = asyncio.Event()  # submissions wait for it
        self.entrance.set()
        self.per_event = 1
        self.logprob: Callable[[int], float] = lambda token: -0.5
        self.cached_tokens = 0
        self.timelines = Timelines()

    def fleet(self) -> list[WorkerState]:
        return self.workers

    @property
    def ready(self) -> bool:
        return not self.not_ready_reason

    @property
    def in_flight(self) -> int:
        return len(self.running)

    def catalogue(
        self,
        tokenizer: ChatTokenizer,
        *,
        name: str = "",
        also: Sequence[str] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> Catalogue:
        """One model, for which a worker is ready that reads `max_model_len` tokens; `also`: others with the same tokenizer."""
        return Catalogue(dict.fromkeys((name or self.model, *also), tokenizer), ScriptedWorkers(self), aliases)

    def worker(self, role: str) -> WorkerState:
        layout = KVLayout(num_blocks=1 << 26, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
        return WorkerState(
            worker=f"scripted-{role}", incarnation=1, roles=[role], status="ready", model=self.model,
            model_fingerprint="scripted", tokenizer_fingerprint="", vocab_size=1 << 20,
            max_model_len=self.max_model_len or 1 << 30,
            region=Region(transport="shm", incarnation=1, layout=layout, address={}), features=frozenset(Feature),
        )  # fmt: skip

    @property
    def loads(self) -> dict[str, Load]:
        return {self.model: Load(in_flight=self.in_flight, waiting=self.waiting, counters=self.counters)}

    def turn_away(
        self, tenant: Tenant, *, priority: int, first_token_s: float = math.inf, model: str | None = None
    ) -> None:
        self.asked.append((priority, first_token_s))
        if self.turned_away is not None:
            raise self.turned_away

    async def submit(self, specs: Sequence[GenerationSpec]) -> list[ScriptedGeneration]:
        if self.refuse is not None:
            raise self.refuse
        self.submitted += specs
        generations = [ScriptedGeneration(self, spec) for spec in specs]
        self.running |= {generation.spec.request_id: generation for generation in generations}
        try:
            await self.notify()
            await self.entrance.wait()
        except BaseException:
            for generation in generations:
                generation.cancel("left while it waited")
            raise
        return generations

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Return when `predicate` holds; it is looked at after every submission and end."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(predicate)


class ScriptedWorkers:
    """One of each role, whose weights are `scripted`."""

    def __init__(self, owner: ScriptedGenerations) -> None:
        self._owner = owner

    def ready(self, role: str) -> list[WorkerState]:
        return [self._owner.worker(role)]

    def weights(self, model: str) -> str:
        return "scripted"


class ScriptedGeneration:
    """It is its own mailbox: each event is made when it is asked for, and the next one is there in the next turn of the loop."""

    def __init__(self, owner: ScriptedGenerations, spec: GenerationSpec) -> None:
        self.spec = spec
        self.timings = {"admission": 1.0, "prefill": 2.0}
        self.timeline = Timeline(
            request_id=spec.request_id,
            received_at=spec.origin.received_at,
            submitted_at=spec.origin.received_at,
            prompt_tokens=0,
        )
        self.position = 0  # how far it was asked
        self.is_over = False
        self.followed: Grammar | None = spec.grammar
        self.mailbox = self
        self.has_more = False  # it says so itself
        self.plain: list[int] = []
        self._owner = owner
        self._next = 0
        self._script: tuple[list[int], str] | None = None
        self._wake: Callable[[], None] = lambda: None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def token_ids(self) -> list[int]:
        return [*self.spec.token_ids, *(self._script or ([], ""))[0][: self._next]]

    def listen(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        wake()

    def take(self, at_most: int) -> TokenEvent | None:
        owner, sampling = self._owner, self.spec.sampling
        if self.is_over:
            return None
        self._script = self._script or self._answer()
        tokens, finish = self._script
        self.position = position = self._next
        if owner.hold_after is not None and position >= owner.hold_after and not owner.release.is_set():
            self._spawn(self._released())
            return None
        if owner.fail is not None and position >= owner.fail_after:
            raise owner.fail
        new = tokens[position : position + min(owner.per_event, at_most)]
        logprobs = [] if sampling.logprobs is None else [self._logprobs(token, sampling.logprobs) for token in new]
        self._next += len(new)
        if self._next >= len(tokens):
            self._end()
        else:
            asyncio.get_running_loop().call_soon(self._wake)
        return TokenEvent(
            position=position,
            token_ids=new,
            logprobs=logprobs,
            finish=finish if self._next >= len(tokens) else "",
            cached_tokens=owner.cached_tokens if position == 0 else -1,
            prompt_logprobs=None if position else self._prompt_logprobs(),
        )

    def cancel(self, reason: str) -> None:
        if self.spec.request_id in self._owner.running:
            self._owner.cancelled[self.spec.request_id] = reason
            self._end()
            self._wake()

    def called(self) -> None:
        self._owner.called.append(self.spec.request_id)

    def end_reasoning(self, grammar: Grammar) -> bool:
        """What closes it comes next, and then what the script has behind it."""
        closing = grammar.after or []
        tokens, finish = self._script = self._script or self._answer()
        ends = [at for at in range(len(tokens)) if tokens[at : at + len(closing)] == closing]
        if self.is_over or (ends and ends[0] + len(closing) <= self._next):
            return False
        behind = tokens[ends[0] + len(closing) :] if ends else self.spec.sampling.stop_token_ids[:1]
        self._script = [*tokens[: self._next], *closing, *behind], finish
        self.followed = grammar
        return True

    def _end(self) -> None:
        self.is_over = True
        self._owner.running.pop(self.spec.request_id, None)
        self._spawn(self._owner.notify())

    async def _released(self) -> None:
        await self._owner.release.wait()
        self._wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer(self) -> tuple[list[int], str]:
        sampling = self.spec.sampling
        tokens = list(self._owner.script(self.spec))[: sampling.max_tokens]
        for position, token in enumerate(tokens):
            if token in sampling.stop_token_ids and position >= sampling.min_tokens:
                return tokens[: position + 1], "stop"
        return tokens, "length"

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """Token t has the logprob -t / 1024, and is the likeliest."""
        count, tokens = self.spec.sampling.prompt_logprobs, self.spec.token_ids[1:]
        if count is None:
            return None
        logprobs = [-token / 1024 for token in tokens]
        return PromptLogprobs(
            logprobs=struct.pack(f"<{len(tokens)}f", *logprobs),
            ranks=struct.pack(f"<{len(tokens)}I", *[1] * len(tokens)),
            top_ids=struct.pack(f"<{len(tokens) * count}I", *(token for token in tokens for _ in range(count))),
            top_logprobs=struct.pack(f"<{len(tokens) * count}f", *(value for value in logprobs for _ in range(count))),
        )

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        tops = [token, *(other for other in range(40, 40 + count) if other != token)][:count]
        return TokenLogprobs(
            logprob=self._owner.logprob(token), top_ids=tops, top_logprobs=[-0.5 - index for index in range(len(tops))]
        )
