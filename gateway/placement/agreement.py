"""Agreement of workers with this gateway on tokenizers, weights and block hashes. Others get no work, and the reason is shown.

A worker of an older release that doesn't say something is taken to agree.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from common.blocks import BlockKind, hash_blocks
from common.messages import WorkerState
from common.pages import KVLayout
from common.peers import CONTESTED, Peers
from common.store import kind_of
from common.words import Role, WorkerStatus
from gateway.placement.incumbents import Incumbents
from gateway.placement.islands import Reach, reach_of, reaches
from gateway.request.placement import Difference, Unlike

log = logging.getLogger("baton.placement")

MAX_FACTS = 4_096
MAX_ALIKE = 64
# A scale and a zero point.
INT4_SCALES = ("bfloat16", 2)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Facts that workers must share to exchange blocks; equal if `name` is."""

    kind: BlockKind
    name: str = field(repr=False)
    # One worker's KV layout; pool sizes may differ.
    layout: KVLayout = field(repr=False, compare=False)

    @classmethod
    def of(cls, state: WorkerState) -> Blocks:
        layout = state.region.layout
        return cls(kind := kind_of(state), f"{kind} {layout.whole_pages}", layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """This gateway's facts of a served model: workers must have the same."""

    tokenizer: str  # fingerprint
    files: str = ""  # fingerprint of config and weights; "": no weights here
    called: str = ""  # the workers' name of it; "": the same


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts that are constant for a worker's incarnation."""

    incarnation: int
    blocks: Blocks
    hashes: bool  # its block hashes match this gateway's
    reach: Reach


class Agreement:
    """The check of the workers in `peers`. `models`: those that this gateway serves, by name; none: any."""

    def __init__(
        self, peers: Peers, models: Mapping[str, Own] = MappingProxyType({}), incumbents: Incumbents | None = None
    ) -> None:
        self._peers = peers
        self._models = dict(models)
        self._names = {own.called or name: name for name, own in models.items()}  # our name, by the workers'
        self._incumbents = incumbents or Incumbents()
        self._known: dict[str, _Facts] = {}
        self._ready: dict[Role, tuple[list[WorkerState], list[WorkerState]]] = {}  # workers heard, workers that agree
        self._decode: list[WorkerState] = []
        self._weights: dict[str, str] = {}  # by model
        self._blocks: dict[str, Blocks | None] = {}  # by weights
        self._alike: dict[tuple[Role, str], tuple[list[WorkerState], list[WorkerState]]] = {}  # as `_ready`, by blocks
        self._told: set[tuple[str, int, Unlike]] = set()

    def add(self, model: str, own: Own) -> None:
        """Serve a further model."""
        self._change(self._models | {model: own})

    def drop(self, model: str) -> None:
        """Serve a model no longer."""
        self._change({name: own for name, own in self._models.items() if name != model})

    def _change(self, models: Mapping[str, Own]) -> None:
        self._models = dict(models)
        self._names = {own.called or name: name for name, own in models.items()}
        self._ready.clear()  # with it go the choices among them

    def ready(self, role: Role) -> list[WorkerState]:
        """Ready workers of a role whose model matches ours: the same list object until it changes."""
        heard = self._peers.ready(role)
        known = self._ready.get(role)
        if known is None or known[0] is not heard:
            agree = [state for state in heard if self._has_ours(state)]
            known = self._ready[role] = heard, agree
        return known[1]

    def weights(self, model: str) -> str:
        """Fingerprint of the weights that most of the model's decode workers have; "" if none is ready.

        They differ only while weights are being replaced, or what is made of them.
        """
        ready = self._changed()
        if model not in self._weights:
            groups = defaultdict[str, list[WorkerState]](list)
            for state in ready:
                if self._model_of(state) == model:
                    groups[state.model_fingerprint].append(state)
            self._weights[model] = self._incumbents.choose(f"weights of {model}", groups) if groups else ""
        return self._weights[model]

    def blocks(self, weights: str = "") -> Blocks | None:
        """Blocks of most decode workers with these weights; None without one.

        They differ only while KV dtype or block size is being changed.
        """
        ready = self._changed()
        if weights not in self._blocks:
            groups = defaultdict[str, list[WorkerState]](list)
            for state in ready:
                if weights in ("", state.model_fingerprint):
                    groups[self._facts(state).blocks.name].append(state)
            chosen = groups[self._incumbents.choose(f"blocks of {weights}", groups)] if groups else []
            self._blocks[weights] = self._facts(chosen[0]).blocks if chosen else None
        return self._blocks[weights]

    def _changed(self) -> list[WorkerState]:
        """The ready decode workers, if they changed. Choices made among earlier ones are dropped."""
        ready = self.ready(Role.DECODE)
        if ready is not self._decode:
            self._decode, self._weights, self._blocks = ready, {}, {}
        return ready

    def with_blocks(self, role: Role, blocks: Blocks) -> list[WorkerState]:
        """Ready workers with these blocks: the same list object until it changes."""
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
        """Workers that Redis takes for candidates by their kind, but that are none of the chosen ones."""
        names = {state.worker for state in chosen}
        states = self._peers.states
        if len(states) == len(names):
            return []
        return [name for name, state in states.items() if name not in names and self._facts(state).blocks.kind == kind]

    # -- for people ----------------------------------------------------------------------------------------------------

    def differences(self) -> list[Difference]:
        """Every ready worker that gets no new work here, and why."""
        states = [state for _, state in sorted(self._peers.states.items()) if state.status is WorkerStatus.READY]
        contested = self._peers.contested
        # Workers of other gateways' models are not reported, unless no worker has this gateway's model.
        are_meant = len(self._models) == 1 and not any(state.model in self._names for state in states)
        found: list[Difference] = []
        for state in states:
            model = self._model_of(state)
            why: tuple[Unlike, str] | None = None
            if state.worker in contested:
                why = Unlike.NAME, CONTESTED
            elif model is not None:
                why = self._why_not(state, model)
            elif are_meant:
                why = Unlike.MODEL, self._otherwise_called(state)
            if why is not None:
                what, text = why
                one = Difference(
                    worker=state.worker,
                    incarnation=state.incarnation,
                    model=model or (next(iter(self._models)) if are_meant else state.model),
                    decodes=Role.DECODE in state.roles,
                    what=what,
                    text=text,
                )
                found.append(one)
        return found

    def tell(self) -> None:
        """Log differences that are new since the last call."""
        found = {(one.worker, one.incarnation, one.what): one for one in self.differences()}
        for one in (found[key] for key in sorted(found.keys() - self._told)):
            extra = {"worker": one.worker, "model": one.model, "what": one.what, "why": one.text}
            log.warning("worker.refused", extra=extra)
        self._told = set(found)

    def _otherwise_called(self, state: WorkerState) -> str:
        [called] = self._names
        return (
            f"it serves {state.model!r}, and nobody {called!r}: give the worker --served-model-name {called}, "
            f"or the gateway --worker-models {state.model}, if that is the same model"
        )

    def _why_not(self, state: WorkerState, model: str) -> tuple[Unlike, str] | None:
        facts, own = self._facts(state), self._models.get(model)
        if not facts.hashes:
            return Unlike.HASHES, "it hashes blocks otherwise than this gateway: give both the same release"
        if own is not None and not _reads_as(state, own):
            return Unlike.TOKENIZER, (
                f"its tokenizer.json ({state.tokenizer_fingerprint[:8]}) is not this gateway's for {model!r} "
                f"({own.tokenizer[:8]}): start both with the same model folder"
            )
        if own is not None and not _has_files(state, own):
            return Unlike.WEIGHTS, (
                f"its files of {model!r} ({state.files_fingerprint[:8]}) are not this gateway's ({own.files[:8]}): "
                "start both with the same model folder"
            )
        return None if Role.POOL in state.roles else self._why_no_blocks(state, model, facts)

    def _why_no_blocks(self, state: WorkerState, model: str, facts: _Facts) -> tuple[Unlike, str] | None:
        """The same of a worker that keeps blocks."""
        weights = self.weights(model)
        blocks = self.blocks(weights)
        if weights and state.model_fingerprint != weights:
            known = (facts.blocks, blocks or facts.blocks)
            apart = {any(group.window for group in each.layout.groups) for each in known}
            options = ", --max-model-len and --disable-hybrid-kv-cache-manager" if len(apart) > 1 else ""
            return Unlike.WEIGHTS, (
                f"its weights of {model!r} ({state.model_fingerprint[:8]}) are not those of most or the first workers "
                f"({weights[:8]}): start it with their model folder, --quantization{options}"
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

    def _model_of(self, state: WorkerState) -> str | None:
        """The name of a worker's model at this gateway; None: not served here."""
        return self._names.get(state.model) if self._models else state.model

    def _has_ours(self, state: WorkerState) -> bool:
        model = self._model_of(state)
        if model is None or not self._facts(state).hashes:
            return False
        own = self._models.get(model)
        return own is None or (_reads_as(state, own) and _has_files(state, own))

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


def _reads_as(state: WorkerState, own: Own) -> bool:
    return state.tokenizer_fingerprint in ("", own.tokenizer)


def _has_files(state: WorkerState, own: Own) -> bool:
    return not own.files or state.files_fingerprint in ("", own.files)


def kv_name(layout: KVLayout) -> str:
    """The word of `--kv-cache-dtype` for a pool's keys and values, else their dtype. int4's codes are bytes, as int8's are."""
    if layout.dtype == "uint8" and INT4_SCALES in {(part.dtype, part.dim) for part in layout.pages[1:]}:
        return "int4"
    return {"float8_e4m3fn": "fp8", "uint8": "int8"}.get(layout.dtype, layout.dtype)


def _other_blocks(its: Blocks, most: Blocks) -> str:
    if its.kind.block_size != most.kind.block_size:
        return f"its blocks have {its.kind.block_size} positions, those of most or the first workers {most.kind.block_size}"
    if (here := kv_name(its.layout)) != (there := kv_name(most.layout)):
        return f"its KV is {here}, that of most or the first workers {there}"
    return "what its blocks hold differs from most or the first workers' (heads, layers or a dtype)"


@lru_cache(maxsize=64)
def _probe_hash(kind: BlockKind) -> bytes:
    return hash_blocks(kind.root(), range(2 * kind.block_size), kind.block_size)[-1]
