"""The models that this gateway serves: their names, and their workers' present state.

Names, aliases and tokenizers are configured, because text becomes tokens here. Fingerprint and longest context come from
heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from common.messages import Feature, WorkerState
from common.words import Role
from gateway.answers.tokenizer import ChatTokenizer
from gateway.request.spec import cut_by_its_pool, longest, usual

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
