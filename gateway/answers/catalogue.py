"""The models that this gateway serves: their names, their workers' present state, and tallies of ended choices.

Names, aliases and tokenizers are configured, because text becomes tokens here. Fingerprint and longest context come from
heartbeats.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from common.messages import Feature, WorkerState
from common.words import Finish, Role
from gateway.answers.tokenizer import ChatTokenizer
from gateway.request.spec import cut_by_its_pool, longest, usual
from gateway.request.timeline import Timeline

ANY = "*"  # the alias that matches any other name
LATEST = ":latest"  # the tag that Ollama's clients add to a name without one


class ReadyWorkers(Protocol):
    """The workers that take new work: `gateway.placement.agreement.Agreement`, or a test's."""

    def ready(self, role: Role) -> Iterable[WorkerState]:
        """Ready workers of a role."""
        ...

    def weights(self, model: str) -> str:
        """Fingerprint of the weights that serve the model's requests; "" without a decode worker."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A served model in its present state."""

    name: str  # its own: workers, metrics and budgets use no other
    asked_as: str  # the name that the client used: this one or an alias
    tokenizer: ChatTokenizer
    fingerprint: str = ""  # the weights' fingerprint; empty without a decode worker
    adapter: str = ""  # joins the hash root; "": the weights alone
    max_model_len: int | None = None  # longest prompt and answer in tokens; None: no decode worker is ready
    whole_len: int | None = None  # the model's own, if pools hold less; else None
    whole_kv_mb: int | None = None  # MiB of such a pool
    usual_len: int | None = None  # the same if the answer's length is left open
    follows_grammars: bool = True  # all workers support them; those of the previous release would ignore one

    @property
    def is_ready(self) -> bool:
        return bool(self.fingerprint)


class Catalogue:
    """A lookup of models by name. Iterating yields the names that clients may use."""

    def __init__(
        self,
        tokenizers: Mapping[str, ChatTokenizer],
        workers: ReadyWorkers,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`aliases`: further names -> the model's own; `*` is any other name."""
        self._tokenizers = dict(tokenizers)
        self._fleet = workers
        self._aliases = dict(aliases)

    @property
    def names(self) -> tuple[str, ...]:
        """The models' own, in configured order."""
        return tuple(self._tokenizers)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.own_name(name) in self._tokenizers

    def __iter__(self) -> Iterator[str]:
        """The models' own names, then the aliases."""
        yield from self._tokenizers
        yield from (alias for alias in self._aliases if alias != ANY)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def own_name(self, name: str) -> str:
        """The model's own name; `name` itself if it is unknown. "" is the first model; `:latest` is optional."""
        if not name:
            return next(iter(self._tokenizers), "")
        if name in self._tokenizers:
            return name
        other = name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST
        found = self._aliases.get(name) or (other if other in self._tokenizers else self._aliases.get(other))
        return found or self._aliases.get(ANY, name)

    def find(self, name: str) -> Served | None:
        asked_as, name = name, self.own_name(name)
        tokenizer = self._tokenizers.get(name)
        if tokenizer is None:
            return None
        fingerprint = self.fingerprint(name)
        decode, prefill = (self._workers(role, fingerprint) for role in (Role.DECODE, Role.PREFILL))
        cut = cut_by_its_pool(decode)
        return Served(
            name=name,
            asked_as=asked_as or name,
            tokenizer=tokenizer,
            fingerprint=fingerprint,
            max_model_len=longest(decode),
            usual_len=usual(decode),
            whole_len=cut.whole_len if cut is not None else None,
            whole_kv_mb=cut.whole_kv_mb if cut is not None else None,
            follows_grammars=all(Feature.GRAMMARS in state.can for state in (*decode, *prefill)),
        )

    def all(self) -> list[Served]:
        """Each model once."""
        return [served for name in self._tokenizers if (served := self.find(name)) is not None]

    def listed(self) -> list[Served]:
        """Each name that clients may use."""
        return [served for name in self if (served := self.find(name)) is not None]

    def fingerprint(self, name: str) -> str:
        """See `ReadyWorkers.weights`; "" for a model that is not served."""
        return self._fleet.weights(name) if name in self._tokenizers else ""

    def _workers(self, role: Role, fingerprint: str) -> list[WorkerState]:
        """The ready workers with these weights."""
        return [state for state in self._fleet.ready(role) if state.model_fingerprint == fingerprint]


@dataclass(slots=True)
class Tally:
    """One model's tally. Seconds are from a request's receipt."""

    succeeded: int = 0
    succeeded_s: float = 0.0
    waited_s: float = 0.0  # part of `succeeded_s`: until the last attempt was placed
    failed: int = 0  # cancelled ones, too
    failed_s: float = 0.0
    last_unix_ms: int = 0  # end of the newest; 0: none


class Tallies:
    """The tallies of the models with these names: names that clients make up are not counted."""

    def __init__(self, models: Sequence[str]) -> None:
        self._tallies = {name: Tally() for name in models}

    def of(self, model: str) -> Tally:
        return self._tallies.get(model, Tally())

    def observe(self, timeline: Timeline) -> None:
        """Count an ended choice."""
        tally = self._tallies.get(timeline.model)
        if tally is None or timeline.ended_at is None:
            return
        seconds = timeline.ended_at - timeline.received_at
        tally.last_unix_ms = int(time.time() * 1000)
        if timeline.status in (Finish.STOP, Finish.LENGTH):
            attempt = timeline.attempt
            tally.succeeded += 1
            tally.succeeded_s += seconds
            tally.waited_s += attempt.began_at - timeline.received_at if attempt is not None else 0.0
        else:
            tally.failed += 1
            tally.failed_s += seconds
