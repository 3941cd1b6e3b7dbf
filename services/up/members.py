"""The processes of a `baton up`: their names, each worker's model and devices, and the plan of its host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common import PREFIX
from services.host.needs import bytes_of, stays_awake
from services.host.plan import HostedWorker, HostPlan, PulledPlan
from services.runtime.names import made_up
from services.runtime.permissions import WORKERS, Member, Role
from services.up.settings import UpSettings, devices_of
from services.worker.kv_events import of_ranks

SLOT = "*"  # begins the name of a set of workers without a model
WIDTH, DEPTH = f"{PREFIX}TENSOR_PARALLEL_SIZE", f"{PREFIX}PIPELINE_PARALLEL_SIZE"


class WorkersModel(NamedTuple):
    """The model of one worker."""

    name: str
    folder: Path
    is_spare: bool = False  # the worker comes and goes with the planner's counts

    @property
    def is_slot(self) -> bool:
        """True for a model that is pulled later."""
        return self.name.startswith(SLOT)


def members_of(settings: UpSettings, tag: str) -> dict[str, Member]:
    """The services by their local names; names on the bus add host and tag."""
    models, prefills, decodes = len(settings.generating) + settings.slots, settings.prefills, settings.decodes
    pools = decodes.least * len(settings.pooling) + decodes.most * settings.slots
    roles: dict[str, Role] = {f"prefill-{index}": "prefill" for index in range(prefills.most * models)}
    roles |= {f"decode-{index}": "decode" for index in range(decodes.most * models)}
    roles |= {f"pool-{index}": "pool" for index in range(pools)}
    roles |= {"planner": "planner"} if settings.planner else {}
    roles |= {"host": "host"} if settings.loads_on_demand and models else {}
    several, own = settings.gateways > 1, settings.gateway_id
    gateways = [f"gateway-{index}" for index in range(settings.gateways)] if several else ["gateway"]
    members = {name: Member(role, made_up(name, tag)) for name, role in roles.items()}
    for index, name in enumerate(gateways):
        members[name] = Member("gateway", (f"{own}-{index}" if several else own) if own else made_up(name, tag))
    return members


def models_of_workers(settings: UpSettings) -> list[WorkersModel]:
    """Each worker's model, in the order of `members_of`: a role's workers are dealt out in turn, spare ones last."""
    slots = dict.fromkeys(slots_of(settings), Path())
    generating, decodes = settings.generating | slots, settings.decodes
    return [
        WorkersModel(name, folder, number >= bounds.least)
        for bounds, models in (
            (settings.prefills, generating),
            (decodes, generating),
            (decodes._replace(most=decodes.least), settings.pooling),
            (decodes, slots),
        )
        for number in range(bounds.most)
        for name, folder in models.items()
    ]


def slots_of(settings: UpSettings) -> list[str]:
    """Names of the sets of workers that models have which are pulled later."""
    return [f"{SLOT}{number}" for number in range(settings.slots)]


def is_hosted(role: Role, model: WorkersModel) -> bool:
    """True for a worker that the host starts. Those that pool start with `up`, but for models that are pulled later."""
    return role in WORKERS or (role == "pool" and model.is_slot)


class Deals:
    """Devices, ranks, stages and sockets of events, dealt out among workers in the order of `members_of`."""

    def __init__(self, settings: UpSettings) -> None:
        events = of_ranks(settings.kv_events_config, settings.workers)
        devices = devices_of(settings.device, settings.processes)
        self._left = zip(devices, settings.widths, settings.depths, events, strict=True)

    def next(self) -> dict[str, str]:
        """The variables of the next worker."""
        device, width, depth, events = next(self._left)
        return {
            f"{PREFIX}DEVICE": device,
            WIDTH: str(width),
            DEPTH: str(depth),
            f"{PREFIX}KV_EVENTS_CONFIG": events,
        }

    def beside(self, slot: Sequence[HostedWorker]) -> dict[str, str]:
        """The variables of a slot's next worker that pools: it runs in place of one that decodes, on its device."""
        decode = [worker.variables[f"{PREFIX}DEVICE"] for worker in slot if worker.service == "decode"]
        return {f"{PREFIX}DEVICE": decode[sum(worker.service == "pool" for worker in slot)]}


class Hosted:
    """The workers that the host starts: those of each model, and of each slot; and its plan."""

    def __init__(self, settings: UpSettings) -> None:
        self._settings = settings
        self._own: dict[str, list[HostedWorker]] = {}
        self._spare: dict[str, list[HostedWorker]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._own

    def of(self, model: WorkersModel) -> list[HostedWorker]:
        """All of a model's workers so far."""
        return [*self._own.get(model.name, []), *self._spare.get(model.name, [])]

    def add(self, model: WorkersModel, name: str, member: Member, variables: Mapping[str, str], log_file: Path) -> None:
        settings, on_cpu = self._settings, self._settings.processor == "cpu"
        processes = int(variables.get(WIDTH, 1)) * int(variables.get(DEPTH, 1))
        worker = HostedWorker(
            name=name,
            id=member.id,
            service=member.role,
            variables=dict(variables),
            log_file=str(log_file),
            needs_bytes=0 if model.is_slot else bytes_of(settings, model.folder),
            threads=settings.threads * processes if on_cpu else 0,
        )
        (self._spare if model.is_spare else self._own).setdefault(model.name, []).append(worker)

    def plan(self) -> HostPlan:
        settings, slots = self._settings, slots_of(self._settings)
        models, spares = (
            {name: workers for name, workers in each.items() if name not in slots} for each in (self._own, self._spare)
        )
        pulled = PulledPlan(
            patterns=settings.patterns,
            slots=[self._own[name] for name in slots],
            spares=[self._spare.get(name, []) for name in slots],
        )
        return HostPlan(
            models=models,
            pulled=pulled if slots else None,
            max_loaded=settings.max_loaded,
            drain_s=settings.drain_s,
            forks=settings.processor == "cpu",
            stays_awake=stays_awake(settings),
            parks_s=settings.model_sleeps_s,
            needs_bytes={name: sum(worker.needs_bytes for worker in workers) for name, workers in models.items()},
            spares=spares,
        )
