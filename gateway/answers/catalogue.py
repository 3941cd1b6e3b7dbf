"""The models that this gateway serves: their names, and what their workers say of them now.

Names and tokenizers are configured, because text becomes tokens here. Fingerprint and longest context come from heartbeats. A
worker belongs to the model whose name it announces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.messages import WorkerState
from common.words import Role
from gateway.answers.tokenizer import ChatTokenizer
from gateway.request.contexts import longest, usual

ReadyWorkers = Callable[[Role], Iterable[WorkerState]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as it is served now."""

    name: str
    tokenizer: ChatTokenizer
    fingerprint: str = ""  # the weights' fingerprint; empty without a decode worker
    adapter: str = ""  # joins the hash root; "": the weights alone
    max_model_len: int | None = None  # longest prompt and answer in tokens; None: no decode worker is ready
    usual_len: int | None = None  # the same where the answer's length is left open
    follows_grammars: bool = True  # all workers do; those of the release before would ignore one

    @property
    def is_ready(self) -> bool:
        return bool(self.fingerprint)


class Catalogue:
    """Finds models by name. `ready(role)`: the workers that take new work of a role, in another list when they change."""

    def __init__(self, tokenizers: Mapping[str, ChatTokenizer], ready: ReadyWorkers) -> None:
        self._tokenizers = dict(tokenizers)
        self._ready = ready
        self._seen: Iterable[WorkerState] | None = None  # whose weights are known
        self._weights: dict[str, str] = {}

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
        return Served(
            name=name,
            tokenizer=tokenizer,
            fingerprint=fingerprint,
            max_model_len=longest(decode),
            usual_len=usual(decode),
            follows_grammars=all(state.grammars for state in (*decode, *prefill)),
        )

    def all(self) -> list[Served]:
        return [served for name in self._tokenizers if (served := self.find(name)) is not None]

    def fingerprint(self, name: str) -> str:
        """The weights that most decode workers of the model have; "" when none is ready.

        They differ only while weights are being replaced.
        """
        decode = self._ready(Role.DECODE)
        if decode is not self._seen:
            self._seen, self._weights = decode, {}
        if name not in self._weights and name in self._tokenizers:
            self._weights[name] = weights_of(name, self._tokenizers.keys(), list(decode))
        return self._weights.get(name, "")

    def _workers(self, role: Role, fingerprint: str) -> list[WorkerState]:
        """The ready workers with these weights."""
        return [state for state in self._ready(role) if state.model_fingerprint == fingerprint]


def weights_of(name: str, served: Collection[str], decode: Sequence[WorkerState]) -> str:
    """See `Catalogue.fingerprint`; of the ready decode workers."""
    if name not in served:
        return ""
    named = [state for state in decode if state.model == name]
    if not named and len(served) == 1 and len({state.model_fingerprint for state in decode}) == 1:
        named = list(decode)  # a gateway of a single model may name it as it likes
    counts = Counter(state.model_fingerprint for state in named)
    return min(counts, key=lambda weights: (-counts[weights], weights), default="")
