"""The models that this gateway serves: their names, and what their workers say of them now.

Names and tokenizers are configured, because text becomes tokens here. Fingerprint and longest context come from heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from common.messages import WorkerState
from common.words import Role
from gateway.answers.tokenizer import ChatTokenizer
from gateway.request.contexts import cut_by_its_pool, longest, usual


class ReadyWorkers(Protocol):
    """The workers that take new work: `gateway.placement.agreement.Agreement`, or a test's."""

    def ready(self, role: Role) -> Iterable[WorkerState]:
        """Those of a role."""
        ...

    def weights(self, model: str) -> str:
        """The fingerprint of the weights that requests for the model get; "" without a decode worker."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as it is served now."""

    name: str
    tokenizer: ChatTokenizer
    fingerprint: str = ""  # the weights' fingerprint; empty without a decode worker
    adapter: str = ""  # joins the hash root; "": the weights alone
    max_model_len: int | None = None  # longest prompt and answer in tokens; None: no decode worker is ready
    whole_len: int | None = None  # the model's own, where pools cut it; else None
    whole_kv_mb: int | None = None  # MiB of such a pool
    usual_len: int | None = None  # the same where the answer's length is left open
    follows_grammars: bool = True  # all workers do; those of the release before would ignore one

    @property
    def is_ready(self) -> bool:
        return bool(self.fingerprint)


class Catalogue:
    """Finds models by name."""

    def __init__(self, tokenizers: Mapping[str, ChatTokenizer], workers: ReadyWorkers) -> None:
        self._tokenizers = dict(tokenizers)
        self._fleet = workers

    @property
    def names(self) -> tuple[str, ...]:
        """In configured order."""
        return tuple(self._tokenizers)

    def __contains__(self, name: object) -> bool:
        return name in self._tokenizers

    def find(self, name: str) -> Served | None:
        tokenizer = self._tokenizers.get(name)
        if tokenizer is None:
            return None
        fingerprint = self.fingerprint(name)
        decode, prefill = (self._workers(role, fingerprint) for role in (Role.DECODE, Role.PREFILL))
        cut = cut_by_its_pool(decode)
        return Served(
            name=name,
            tokenizer=tokenizer,
            fingerprint=fingerprint,
            max_model_len=longest(decode),
            usual_len=usual(decode),
            whole_len=cut.whole_len if cut is not None else None,
            whole_kv_mb=cut.whole_kv_mb if cut is not None else None,
            follows_grammars=all(state.grammars for state in (*decode, *prefill)),
        )

    def all(self) -> list[Served]:
        return [served for name in self._tokenizers if (served := self.find(name)) is not None]

    def fingerprint(self, name: str) -> str:
        """See `ReadyWorkers.weights`; "" for a model that is not served."""
        return self._fleet.weights(name) if name in self._tokenizers else ""

    def _workers(self, role: Role, fingerprint: str) -> list[WorkerState]:
        """The ready workers with these weights."""
        return [state for state in self._fleet.ready(role) if state.model_fingerprint == fingerprint]
