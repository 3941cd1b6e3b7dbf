"""Which workers agree with this gateway on what tokens and blocks mean. The others get no work, and people are told why.

A worker of an older release that doesn't say something is taken to agree.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from common.blocks import BlockKind, hash_blocks
from common.messages import WorkerState
from common.pages import KV_NAMES, KVLayout
from common.peers import CONTESTED, Peers
from common.store import kind_of
from common.words import Role, WorkerStatus
from gateway.placement.islands import Reach, reach_of, reaches
from gateway.request.placement import Difference, Unlike

log = logging.getLogger("baton.placement")

MAX_FACTS = 4_096
MAX_ALIKE = 64


@dataclass(frozen=True, slots=True)
class Blocks:
    """What workers must have in common to exchange blocks: equal where `name` is."""

    kind: BlockKind
    name: str = field(repr=False)
    # Of one of them: pools differ in size.
    layout: KVLayout = field(repr=False, compare=False)

    @classmethod
    def of(cls, state: WorkerState) -> Blocks:
        layout = state.region.layout
        return cls(kind := kind_of(state), f"{kind} {layout.pages}", layout)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What doesn't change in a worker's life."""

    incarnation: int
    blocks: Blocks
    hashes: bool  # whether it hashes blocks as this gateway does
    reach: Reach


class Agreement:
    """Looks at the workers that `peers` hears. `tokenizers`: the fingerprint of each model that this gateway serves."""

    def __init__(self, peers: Peers, tokenizers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._peers = peers
        self._tokenizers = dict(tokenizers)
        self._known: dict[str, _Facts] = {}
        self._ready: dict[Role, tuple[list[WorkerState], list[WorkerState]]] = {}  # those heard, those that agree
        self._decode: list[WorkerState] = []
        self._blocks: dict[str, Blocks | None] = {}  # by weights, of those
        self._alike: dict[tuple[Role, str], tuple[list[WorkerState], list[WorkerState]]] = {}  # as `_ready`, by blocks
        self._told: set[tuple[str, int, Unlike]] = set()

    def ready(self, role: Role) -> list[WorkerState]:
        """The ready workers of a role whose tokens and hashes mean what they mean here: the same list until they change."""
        heard = self._peers.ready(role)
        known = self._ready.get(role)
        if known is None or known[0] is not heard:
            agree = [state for state in heard if self._facts(state).hashes and self._reads_as_here(state)]
            known = self._ready[role] = heard, agree
        return known[1]

    def blocks(self, weights: str = "") -> Blocks | None:
        """What most decode workers with these weights have; None without one.

        They differ only while KV dtype or block size is being changed.
        """
        ready = self.ready(Role.DECODE)
        if ready is not self._decode:
            self._decode, self._blocks = ready, {}
        if weights not in self._blocks:
            self._blocks[weights] = self._most([one for one in ready if weights in ("", one.model_fingerprint)])
        return self._blocks[weights]

    def _most(self, decode: Sequence[WorkerState]) -> Blocks | None:
        found = {blocks.name: blocks for blocks in (self._facts(state).blocks for state in decode)}
        if len(found) < 2:
            return next(iter(found.values()), None)
        counts = Counter(self._facts(state).blocks.name for state in decode)
        return found[min(counts, key=lambda name: (-counts[name], name))]

    def with_blocks(self, role: Role, blocks: Blocks) -> list[WorkerState]:
        """Of the ready ones, those with these blocks: the same list until they change."""
        ready, known = self.ready(role), self._alike.get((role, blocks.name))
        if known is None or known[0] is not ready:
            if len(self._alike) >= MAX_ALIKE:
                self._alike.clear()
            alike = [state for state in ready if self._facts(state).blocks.name == blocks.name]
            known = self._alike[role, blocks.name] = ready, alike
        return known[1]

    def reach(self, state: WorkerState) -> Reach:
        return self._facts(state).reach

    def strangers(self, kind: BlockKind, chosen: Iterable[WorkerState]) -> list[str]:
        """Workers that Redis takes for candidates because of their kind, and that are none of the chosen ones."""
        names = {state.worker for state in chosen}
        states = self._peers.states
        if len(states) == len(names):
            return []
        return [name for name, state in states.items() if name not in names and self._facts(state).blocks.kind == kind]

    # -- for people ----------------------------------------------------------------------------------------------------

    def differences(self, weights: Callable[[str], str]) -> list[Difference]:
        """Every ready worker that gets no new work here, and why. `weights`: see `Catalogue.fingerprint`."""
        states = [state for _, state in sorted(self._peers.states.items()) if state.status is WorkerStatus.READY]
        contested, named = self._peers.contested, {state.model for state in states} & self._tokenizers.keys()
        found: list[Difference] = []
        for state in states:
            model = self._called_here(state.model, is_named=bool(named))
            what, text = Unlike.NAME, CONTESTED
            if state.worker not in contested:
                why = None if model is None else self._why_not(state, model, weights(model))
                if why is None:
                    continue
                what, text = why
            one = Difference(
                worker=state.worker,
                incarnation=state.incarnation,
                model=model or state.model,
                decodes=Role.DECODE in state.roles,
                what=what,
                text=text,
            )
            found.append(one)
        return found

    def tell(self, weights: Callable[[str], str]) -> None:
        """Log the differences that are new since the last call."""
        found = {(one.worker, one.incarnation, one.what): one for one in self.differences(weights)}
        for one in (found[key] for key in sorted(found.keys() - self._told)):
            extra = {"worker": one.worker, "model": one.model, "what": one.what, "why": one.text}
            log.warning("worker.refused", extra=extra)
        self._told = set(found)

    def _called_here(self, model: str, *, is_named: bool) -> str | None:
        """The model's name at this gateway; None for other gateways' models. A single model may have another name here."""
        if model in self._tokenizers or not self._tokenizers:
            return model
        return next(iter(self._tokenizers)) if len(self._tokenizers) == 1 and not is_named else None

    def _why_not(self, state: WorkerState, model: str, weights: str) -> tuple[Unlike, str] | None:
        facts = self._facts(state)
        if not facts.hashes:
            return Unlike.HASHES, "it hashes blocks otherwise than this gateway: give both the same release"
        if not self._reads_as_here(state):
            return Unlike.TOKENIZER, (
                f"its tokenizer.json ({state.tokenizer_fingerprint[:8]}) is not this gateway's for {model!r} "
                f"({self._tokenizer_of(state.model)[:8]}): start both with the same model folder"
            )
        if model != state.model and not weights and self.ready(Role.DECODE):
            return Unlike.MODEL, (
                f"it serves {state.model!r}, and others something else, but nobody {model!r}: "
                f"give the workers --served-model-name {model}, or the gateway --served-models"
            )
        blocks = self.blocks(weights)
        if weights and state.model_fingerprint != weights:
            apart = {bool(each.layout.column_blocks) for each in (facts.blocks, blocks or facts.blocks)}
            options = ", --max-model-len and --disable-hybrid-kv-cache-manager" if len(apart) > 1 else ""
            return Unlike.WEIGHTS, (
                f"its weights of {model!r} ({state.model_fingerprint[:8]}) are not those of most decode workers "
                f"({weights[:8]}): start it with their model folder{options}"
            )
        if blocks is not None and blocks != facts.blocks:
            return Unlike.BLOCKS, f"{_other_blocks(facts.blocks, blocks)}: give all workers of a model the same options"
        if Role.DECODE not in state.roles and not self._reaches_one(facts.reach, weights):
            return Unlike.TRANSPORT, (
                f"it hands KV over by {facts.reach.transport}, by which it reaches no decode worker: "
                "give all the same --transport, ucx between hosts"
            )
        return None

    def _reaches_one(self, reach: Reach, weights: str) -> bool:
        decode = [state for state in self.ready(Role.DECODE) if weights in ("", state.model_fingerprint)]
        return not decode or any(reaches(reach, self._facts(state).reach) for state in decode)

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _reads_as_here(self, state: WorkerState) -> bool:
        ours = self._tokenizer_of(state.model)
        return not ours or state.tokenizer_fingerprint in ("", ours)

    def _tokenizer_of(self, model: str) -> str:
        """The tokenizer that a worker of this model must have; "" for other gateways' models."""
        only = next(iter(self._tokenizers.values())) if len(self._tokenizers) == 1 else ""
        return self._tokenizers.get(model, only)

    def _facts(self, state: WorkerState) -> _Facts:
        known = self._known.get(state.worker)
        if known is None or known.incarnation != state.incarnation:
            if len(self._known) >= MAX_FACTS:
                self._known.clear()
            blocks = Blocks.of(state)
            hashes = not state.parity_hash or state.parity_hash == _probe_hash(blocks.kind)
            known = _Facts(state.incarnation, blocks, hashes, reach_of(state))
            self._known[state.worker] = known
        return known


def _other_blocks(its: Blocks, most: Blocks) -> str:
    if its.kind.block_size != most.kind.block_size:
        return f"its blocks have {its.kind.block_size} positions, those of most decode workers {most.kind.block_size}"
    if its.kind.kv_dtype != most.kind.kv_dtype:
        here, there = (KV_NAMES.get(kind.kv_dtype, kind.kv_dtype) for kind in (its.kind, most.kind))
        return f"its KV is {here}, that of most decode workers {there}"
    return "what its blocks hold differs from most decode workers' (heads, layers or a dtype)"


@lru_cache(maxsize=64)
def _probe_hash(kind: BlockKind) -> bytes:
    return hash_blocks(kind.root(), range(2 * kind.block_size), kind.block_size)[-1]
