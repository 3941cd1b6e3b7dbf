"""Start-up checks of `baton up`: problems that would appear later are reported here, in a line each."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from common import PREFIX
from common.settings import ROOT, ConfigError
from kvtransfer.liveness import SHM_FOLDER
from kvtransfer.transports import reaches_others
from modelfiles.files import is_model
from services.host.needs import stays_awake
from services.runtime.checks.finding import Finding
from services.runtime.checks.gpus import Gpu, check_gpus, torch_build, visible_gpus
from services.runtime.checks.memory import available_bytes, check_fit
from services.runtime.checks.model import check_context, check_model
from services.runtime.commands import remedy
from services.runtime.loading import as_environment
from services.runtime.running import Running, read_running
from services.runtime.servers import port_is_free
from services.runtime.settings import no_model
from services.up.settings import DEMO, UpSettings, gpus_of
from services.worker.host_share import HostMB
from services.worker.options import WorkerOptions
from services.worker.refusals import refusals

NEEDED = ("fastapi", "uvicorn", "tokenizers", "torch", "safetensors")
DAY_S = 86_400


def examine(settings: UpSettings) -> Iterator[Finding]:
    """Findings against these settings on this machine, cheapest first."""
    found = list(before_the_model(settings))
    yield from found
    if any(finding.check == "running" for finding in found):
        return
    yield from _host_memory(settings, available_bytes(), SHM_FOLDER)
    gpus = visible_gpus() if settings.processor != "cpu" else None
    yield from _devices(settings, gpus)
    found = list(_model(settings, gpus))
    yield from found
    if not settings.fake and all(finding.level != "fail" for finding in found):
        yield from _read(settings)


def before_the_model(settings: UpSettings) -> Iterator[Finding]:
    """Findings that don't need the model, which may have to be fetched."""
    running = read_running(settings.data_dir)
    if running is not None:
        yield already_runs(running, settings.data_dir, now=time.time())
        return
    yield from _packages()
    yield from _transport(settings)
    yield from _ranks(settings)
    yield from _sleep(settings)
    yield from _templates(settings)
    yield from ports(settings)


def already_runs(running: Running, folder: Path, *, now: float) -> Finding:
    """The error for a second `up` in the same folder."""
    form = "%H:%M" if now - running.started_unix < DAY_S else "%d %B, %H:%M"
    since = time.strftime(form, time.localtime(running.started_unix))
    text = f"Baton runs here since {since}: {running.url} (--data-dir {folder})"
    return Finding(
        "running", "fail", text, f"`{command()} chat` talks to it; another one takes its own --data-dir and --port"
    )


def command() -> str:
    """The command that starts Baton here."""
    return "./baton" if (ROOT / "Makefile").is_file() else "baton"


def ports(settings: UpSettings) -> Iterator[Finding]:
    """Findings about ports in use."""
    own = (("--own-port", port) for port in settings.own_ports)
    rpc = [("--grpc-port", settings.grpc_port)] if settings.grpc_port else []
    for flag, port in (*settings.public_ports.items(), *rpc, *own):
        if not port_is_free(port, settings.host):
            yield in_use(flag, port)


def in_use(flag: str, port: int) -> Finding:
    return Finding("port", "fail", f"{flag} {port}: in use", "stop what uses it, or choose another port")


def _packages() -> Iterator[Finding]:
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        what = "package" if len(missing) == 1 else "packages"
        yield Finding("packages", "fail", f"`baton up` needs the {what} {', '.join(missing)}: {remedy()}")


def _transport(settings: UpSettings) -> Iterator[Finding]:
    if not reaches_others(settings.kv_transport) and settings.prefills.most:
        text = f"--transport {settings.kv_transport}: {settings.prefill} prefill workers have to hand their KV over"
        yield Finding("transport", "fail", text, "use --prefill 0, or another one")


def _ranks(settings: UpSettings) -> Iterator[Finding]:
    for width, depth in dict.fromkeys(zip(settings.widths, settings.depths, strict=True)):
        if refused := _refused(settings, width, depth):
            yield Finding("ranks", "fail", refused)


def _refused(settings: UpSettings, width: int, depth: int) -> str:
    """Return why workers of so many ranks and stages can't be; "" if that depends on their model."""
    try:
        settings.check_beside(width, depth)
    except ConfigError as error:
        return str(error)
    return ""


def _sleep(settings: UpSettings) -> Iterator[Finding]:
    if settings.model_sleeps_s and (why := stays_awake(settings)):
        yield Finding(
            "sleep", "warn", f"--keep-alive {settings.keep_alive}: models are unloaded and don't sleep: {why}"
        )


def _read(settings: UpSettings) -> Iterator[Finding]:
    """Findings about models that workers would refuse: that ranks can't share, or stages, and fields of their configuration.

    Reading takes seconds. Where a nursery imports what that needs, it says the latter as soon, before it bears a worker.
    """
    reads_all = settings.loads_on_demand or settings.processor != "cpu"
    common = as_environment(settings, WorkerOptions) | {f"{PREFIX}DEVICE": settings.device.partition(",")[0]}
    asked = [
        common
        | {
            f"{PREFIX}MODEL": str(folder),
            f"{PREFIX}TENSOR_PARALLEL_SIZE": str(width),
            f"{PREFIX}PIPELINE_PARALLEL_SIZE": str(depth),
        }
        for folder in settings.generating.values()
        for width, depth in dict.fromkeys(zip(settings.widths, settings.depths, strict=True))
        if not _refused(settings, width, depth)  # said already
        and (width * depth > 1 or (reads_all and folder.resolve() != DEMO))
    ]
    if reads_all:
        asked += [common | {f"{PREFIX}MODEL": str(folder)} for folder in settings.pooling.values()]
    for said, worker in zip(refusals(asked), asked, strict=True):
        if said:
            yield Finding("model", "fail", f"--model {worker[f'{PREFIX}MODEL']}: {said}")


def _host_memory(settings: UpSettings, available: int | None, shared: Path) -> Iterator[Finding]:
    """Findings about the memory below the pools: it fills as blocks come, and a machine without it would kill a process."""
    host, workers = HostMB.parse(settings.kv_host_mb), settings.generators
    size, asked, what = available, host.resolved(num_workers=workers) * workers << 20, "memory that is free"
    if host.is_shared:
        size = shutil.disk_usage(shared).total if shared.is_dir() else 0
        asked, what = host.resolved() << 20, f"size of {shared}"
    if size is not None and asked > size:
        each = f" for each of {workers} workers" if workers > 1 and not host.is_shared else ""
        text = f"--kv-host-mb {settings.kv_host_mb}{each}: more than the {size >> 20} MiB, the {what}"
        yield Finding("host memory", "fail", text, "give less, or auto, which is half of what is free")


def _templates(settings: UpSettings) -> Iterator[Finding]:
    for model in settings.folders:
        try:
            settings.template(model)
        except ConfigError as error:
            yield Finding("template", "fail", str(error))


def _devices(settings: UpSettings, gpus: list[Gpu] | None) -> Iterator[Finding]:
    if settings.processor == "cpu":
        return
    devices = gpus_of(settings.device, settings.processes)
    yield check_gpus(settings.device, devices, torch_build(), gpus)
    if len(set(devices)) < len(devices) and not settings.kv_memory_mb:
        text = f"--device {settings.device}: workers share a GPU; say what each may take with --kv-memory-mb"
        yield Finding("device", "fail", text)


def _model(settings: UpSettings, gpus: list[Gpu] | None) -> Iterator[Finding]:
    models = list(settings.folders.values())
    if settings.fake:  # the fake device computes nothing: any folder with a tokenizer will do
        yield from (Finding("model", "fail", no_model(model)) for model in models if not is_model(model))
        return
    found = [finding for model in models for finding in check_model(model, impl=settings.model_impl)]
    yield from found
    if any(finding.level == "fail" for finding in found):
        return
    for model in models:
        yield from check_context(model, settings.max_model_len)
        yield check_fit(
            model,
            gpus=gpus,
            dtype=settings.dtype,
            quantization=settings.quantization,
            ranks=min(settings.processes, default=1),
        )
