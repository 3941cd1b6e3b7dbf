"""The models that this gateway serves: their names, their workers' present state, and tallies of ended choices.

Names, aliases and tokenizers are configured, because text becomes tokens here. Fingerprint and longest context come from
heartbeats.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from common.messages import Feature, WorkerState
from common.words import Finish, Role
from gateway.answers.tokenizer import ChatTokenizer, Saved
from gateway.request.spec import cut_by_its_pool, longest, usual
from gateway.request.timeline import Timeline
from gateway.tenants.shares import NO_PRESET, Alias, Asker, Preset, Shares, chosen, main_model, served
from modelfiles.pooling import Pooling

ANY = "*"  # the alias that matches any other name
LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
# A host says every 0.5 s what it has.
LISTEN_S = 3.0
HUB_PREFIXES = ("hf.co/", "huggingface.co/")  # likewise, before a hub's model


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
    preset: Preset = NO_PRESET  # its name may bring one

    @property
    def is_ready(self) -> bool:
        return bool(self.fingerprint)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledFacts:
    """A model of vectors or scores, by its files."""

    pooling: Pooling
    saved: Saved = field(default_factory=Saved)
    vocab_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A served model as clients see it, under one of its names."""

    name: str
    own_name: str  # set if `name` is an alias
    created: int
    max_model_len: int | None
    tool_call_format: str | None  # None: calls stay in the text
    reasoning_format: str | None  # None: reasoning stays in the content
    whole_len: int | None  # the model's own, if the KV pool holds less
    whole_kv_mb: int | None  # MiB of a pool that would hold it
    can_chat: bool  # it has a chat template; otherwise it only completes text


class Catalogue:
    """A lookup of models by name. Iterating yields the names that clients may use."""

    def __init__(
        self,
        tokenizers: Mapping[str, ChatTokenizer],
        workers: ReadyWorkers,
        aliases: Mapping[str, Alias] = MappingProxyType({}),
        pooled: Mapping[str, PooledFacts] = MappingProxyType({}),
        patterns: Sequence[str] = (),
        *,
        num_pooling: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """`aliases`: further names -> the model's own, or several models with their shares; `*` is any other name.

        `pooled`: models of vectors and scores, which generate nothing. `patterns`: of names of models that may come later.
        `num_pooling(name)`: ready workers of a model that pools.
        """
        self._num_pooling = num_pooling
        self._patterns, self._came = tuple(patterns), set[str]()
        self.coming: set[str] = set()  # they are being read
        self._listens_until = time.monotonic() + LISTEN_S
        # The models that are or were here: it grows as they come.
        self.labels = [*tokenizers, *pooled]
        self.pooled = dict(pooled)
        self._tokenizers = dict(tokenizers)
        self._fleet = workers
        self._configured = dict(aliases)
        self._aliases = dict(aliases)  # and those made at run time
        self._presets: Mapping[str, Preset] = {}
        self._made: tuple[Mapping[str, Shares], Mapping[str, Preset]] = {}, {}

    def may_come(self, name: str) -> bool:
        """True if a model of this name is served once a host offers it."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)

    def is_coming(self, name: str) -> bool:
        """True if a model of this name may be served in a moment: it is being read, or hosts may not have been heard yet."""
        plain = of_hub(name)
        return plain in self.coming or (time.monotonic() < self._listens_until and self.may_come(plain))

    @property
    def came(self) -> frozenset[str]:
        """The models that came later."""
        return frozenset(self._came)

    @property
    def own_names(self) -> frozenset[str]:
        """The names of all models, also of those that make no text."""
        return frozenset((*self._tokenizers, *self.pooled))

    def add(self, name: str, tokenizer: ChatTokenizer) -> None:
        """Serve a further model."""
        self._tokenizers[name] = tokenizer
        self._has_come(name)

    def add_pooled(self, name: str, facts: PooledFacts) -> None:
        """Serve a further model of vectors or scores."""
        self.pooled[name] = facts
        self._has_come(name)

    def _has_come(self, name: str) -> None:
        self._came.add(name)
        if name not in self.labels:
            self.labels.append(name)
        self.take_aliases(*self._made)

    def drop(self, name: str) -> None:
        """Serve one no longer that came later."""
        self._came.discard(name)
        self._tokenizers.pop(name, None)
        self.pooled.pop(name, None)
        self.take_aliases(*self._made)

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

    @property
    def aliases(self) -> Mapping[str, Alias]:
        """The present aliases: one model, or several with their shares."""
        return MappingProxyType(self._aliases)

    def take_aliases(self, made: Mapping[str, Shares], presets: Mapping[str, Preset] = MappingProxyType({})) -> None:
        """Replace the aliases that were made at run time. They win over configured ones, and never hide a model."""
        self._made = made, presets
        self._presets = {name: preset for name, preset in presets.items() if preset != NO_PRESET}
        own = self.own_names
        here = {name: served(shares, own) for name, shares in made.items() if name not in own}
        self._aliases = self._configured | {name: shares for name, shares in here.items() if shares}

    def pooled_name(self, name: str) -> str:
        """The model of vectors or scores that a client's name means, its own or an alias; "" for none.

        "" is the only one.
        """
        if not name:
            return next(iter(self.pooled)) if len(self.pooled) == 1 else ""
        for each in (name, name.removesuffix(LATEST), of_hub(name)):
            meant = main_model(self._aliases.get(each, each))
            if meant in self.pooled:
                return meant
        return ""

    @property
    def pooled_names(self) -> dict[str, str]:
        """All names of models of vectors and scores, with the models' own."""
        return {**{name: name for name in self.pooled}, **self.pooled_aliases}

    @property
    def pooled_aliases(self) -> dict[str, str]:
        """Further names of models of vectors and scores, with the models' own."""
        named = {name: main_model(alias) for name, alias in self._aliases.items() if name != ANY}
        return {name: model for name, model in named.items() if model in self.pooled}

    def preset(self, name: str) -> Preset:
        """The preset of a name."""
        meant = self._meant(name) if self._presets else ""
        return NO_PRESET if meant in self._tokenizers else self._presets.get(meant, NO_PRESET)

    def own_name(self, name: str) -> str:
        """The model's own name; `name` itself if it is unknown. "" is the first model; `:latest` is optional.

        It is the largest share's where an alias has several.
        """
        meant = self._meant(name)
        return meant if meant in self._tokenizers else main_model(self._aliases.get(meant, name))

    def choose(self, name: str, asker: Asker) -> str:
        """As `own_name`; where an alias has several models, the one that answers this request."""
        meant = self._meant(name)
        shares = () if meant in self._tokenizers else self._aliases.get(meant, ())
        return self.own_name(name) if isinstance(shares, str) or not shares else chosen(meant, shares, asker)

    def shared_alias(self, name: str) -> str:
        """The alias that a name means, if it has several models; else ""."""
        meant = self._meant(name)
        return "" if meant in self._tokenizers or isinstance(self._aliases.get(meant, ""), str) else meant

    def _meant(self, name: str) -> str:
        """The configured name, a model's or an alias's, that a client's name stands for; "" for an unknown one."""
        if not name:
            return next(iter(self._tokenizers), "")
        other = name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST
        known = (each for each in (name, other) if each in self._tokenizers or each in self._aliases)
        return next(known, "") or self._pulled_as(name) or (ANY if ANY in self._aliases else "")

    def _pulled_as(self, name: str) -> str:
        """The model that came later and that a client may call so, too: `hf.co/…`, or without the only quantisation there is."""
        if not self._came:
            return ""
        plain, came = of_hub(name), self._came & self._tokenizers.keys()
        kinds = [plain] if plain in came else [each for each in came if each.startswith(f"{plain}:")]
        return kinds[0] if len(kinds) == 1 else ""

    def find(self, name: str, own_name: str = "") -> Served | None:
        """A model; `own_name`: the one chosen of an alias's."""
        asked_as, name = name, own_name or self.own_name(name)
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
            preset=self.preset(asked_as),
        )

    def pools(self, name: str) -> bool:
        """True if a worker of such a model is ready."""
        return self._num_pooling(name) > 0

    def unknown(self, name: str) -> str:
        """The message for a client that asks for text of a model that isn't here, or makes none."""
        pooled = self.pooled_name(name) or ("" if name or self._tokenizers else next(iter(self.pooled), ""))
        if pooled and (name or not self._tokenizers):
            where = "/rerank, /score or /classify" if self.pooled[pooled].pooling.labels else "/v1/embeddings"
            return f"the model {name!r} makes no text: ask it at {where}"
        return f"the model {name!r} does not exist; this gateway serves {', '.join(map(repr, (*self, *self.pooled)))}"

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


def of_hub(name: str) -> str:
    """A hub model's name as `baton pull` takes it, of Ollama's `hf.co/org/name:Q4_K_M`."""
    for prefix in HUB_PREFIXES:
        name = name.removeprefix(prefix)
    return name.removesuffix(LATEST)


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
        """`models` may grow."""
        self._models, self._tallies = models, dict[str, Tally]()

    def of(self, model: str) -> Tally:
        return self._tallies.get(model, Tally())

    def observe(self, timeline: Timeline) -> None:
        """Count an ended choice."""
        if timeline.model not in self._models or timeline.ended_at is None:
            return
        tally = self._tallies.setdefault(timeline.model, Tally())
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
