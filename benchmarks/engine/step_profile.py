"""A profile of one cell's passes: time in kernels, idle, and on the host."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.engine.cells import Bench, Cell, Decode, FirstToken, Offline, PrefillRate
from benchmarks.engine.floors import ModelCost
from benchmarks.engine.workload import Workload
from engine.engine import Chunk, Engine, Pass
from engine.spec.model import ModelSpec

LISTED_KERNELS = 25
# What a kernel is for: the first pattern that its name matches says it. Ours match by their whole names, libraries' by a part.
GROUPS = (
    ("attention", r"^_(attend|combine|decode|decode_codes|prefill|gather)$"),
    ("gemm", r"^_(few_rows|linear)$"),
    ("experts", r"^_(few|many|route|group)$"),
    ("norm, rope, activation", r"^_(norm|normed|rows|gated|rope|silu_and_mul|embed)$"),
    ("sampling", r"^_(survey|pick|fill_bins|plan|collect|cut|bisect|members|draw_kept|count)$"),
    ("attention", r"attention|attn|flash|fmha"),
    ("gemm helper", r"splitk.*reduce"),
    ("gemm", r"gemm|gemv|matmul|nvjet|cutlass|cublas|xmma"),
    ("sampling", r"sampl|argmax|softmax|topk|sort"),
    ("copies", r"memcpy|memset|copy"),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of a kernel; microseconds."""

    name: str
    start: float
    duration: float


@dataclass(slots=True)
class TimedEngine:
    """An engine that notes how long `launch` keeps the host busy."""

    engine: Engine
    launch_s: float = 0.0
    launches: int = 0

    def launch(self, chunks: list[Chunk]) -> Pass:
        started = time.perf_counter()
        launched = self.engine.launch(chunks)
        self.launch_s += time.perf_counter() - started
        self.launches += 1
        return launched


async def profile_cell(cell: Cell, bench: Bench, model: ModelSpec) -> str:
    """Run a short form of the cell three times and return the report.

    The runs are a warm-up, one for the host's part, and one under the profiler.
    """
    cell = _shortened(cell)
    await cell.run(bench)
    host = await _host_part(cell, bench)
    on_gpu = bench.engine.kv.is_cuda
    counted = TimedEngine(bench.engine)
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        await cell.run(replace(bench, engine=_Proxy(counted)))  # type: ignore[arg-type]
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(prefix="trace-", suffix=".json") as trace:
        profiler.export_chrome_trace(trace.name)
        kernels = read_trace(Path(trace.name))
    return host + report(kernels, passes=counted.launches, cost=bench.cost, model=model, cell=cell)


async def _host_part(cell: Cell, bench: Bench) -> str:
    timed, workloads = TimedEngine(bench.engine), list[Workload]()
    cpu_started = time.process_time()
    await cell.run(replace(bench, engine=_Proxy(timed), started=workloads))  # type: ignore[arg-type]
    cpu_s = time.process_time() - cpu_started
    sums = {
        "plan": sum(workload.plan_s for workload in workloads),
        "launch": timed.launch_s,
        "apply": sum(workload.apply_s for workload in workloads),
        "CPU time of all threads, set-up included": cpu_s,
    }
    parts = ", ".join(f"{name} {1e3 * seconds / timed.launches:.3f}" for name, seconds in sums.items())
    return f"profile of {cell.name}: {timed.launches} passes; the host's ms a pass: {parts}\n"


def report(kernels: list[Kernel], *, passes: int, cost: ModelCost, model: ModelSpec, cell: Cell) -> str:
    """Return the device's part of a profile: groups, then the kernels that take longest.

    Shares are of the time from the first kernel to the last. A kernel that begins while another runs has as its own what it
    takes beyond that one's end: with programmatic dependent launch most of its duration is waiting.
    """
    if not kernels:
        return "no kernels seen on the device\n"
    span = max(kernel.start + kernel.duration for kernel in kernels) - min(kernel.start for kernel in kernels)
    own = own_us(kernels)
    idle = span - sum(own)
    groups: dict[str, float] = defaultdict(float)
    for kernel, its_own in zip(kernels, own, strict=True):
        groups[group_of(kernel.name)] += its_own
    num_bytes = _group_bytes(cost, cell)
    lines = [f"device: {span / 1e3:.3f} ms from first to last kernel, {span / 1e3 / passes:.3f} ms a pass", ""]
    lines += [f"{'group':<28}{'ms a pass':>12}{'share':>9}{'GB/s':>9}"]
    for name, duration in sorted(groups.items(), key=lambda item: -item[1]):
        rate = f"{num_bytes[name] * passes / duration / 1e3:9.0f}" if name in num_bytes and duration else " " * 9
        lines.append(f"{name:<28}{duration / 1e3 / passes:>12.4f}{duration / span:>9.1%}{rate}")
    lines.append(f"{'gaps (device idle)':<28}{idle / 1e3 / passes:>12.4f}{idle / span:>9.1%}")
    lines += ["", f"{'count':>8}{'a pass':>9}{'mean us':>10}{'own us':>9}{'share':>8}{'GB/s':>8}  kernel"]
    labelled = label_products(kernels, model, passes)
    sums: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for kernel, its_own, label in zip(kernels, own, labelled, strict=True):
        sums[label, kernel.name].append((its_own, kernel.duration))
    product_bytes = _product_bytes(model, cost.item_bytes) if isinstance(cell, Decode) else {}
    for (label, name), times in sorted(sums.items(), key=lambda item: -sum(own for own, _ in item[1]))[:LISTED_KERNELS]:
        total, duration, count = sum(own for own, _ in times), sum(all for _, all in times), len(times)
        rate = f"{product_bytes[label] * count / total / 1e3:8.0f}" if label in product_bytes and total else " " * 8
        lines.append(
            f"{count:>8}{count / passes:>9.1f}{duration / count:>10.2f}{total / count:>9.2f}{total / span:>8.1%}{rate}"
            f"  {label:<8}{name[:110]}"
        )
    return "\n".join(lines) + "\n"


def group_of(name: str) -> str:
    """The purpose of a kernel."""
    for group, pattern in GROUPS:
        if re.search(pattern, name, re.IGNORECASE):
            return group
    return "other"


def own_us(kernels: Sequence[Kernel]) -> list[float]:
    """Microseconds of each kernel in which none ran that had begun before it."""
    own, end = [0.0] * len(kernels), float("-inf")
    for index in sorted(range(len(kernels)), key=lambda index: kernels[index].start):
        stop = kernels[index].start + kernels[index].duration
        own[index] = max(0.0, stop - max(end, kernels[index].start))
        end = max(end, stop)
    return own


def label_products(kernels: list[Kernel], model: ModelSpec, passes: int) -> list[str]:
    """Say which weight each matrix product reads, by its place in the pass.

    The label is "" where a pass has not four products a layer and one for the head.
    """
    order = sorted(range(len(kernels)), key=lambda index: kernels[index].start)
    products = [index for index in order if group_of(kernels[index].name) == "gemm"]
    names = ["qkv", "output", "gate_up", "down"] * model.num_layers + ["head"]
    labels = [""] * len(kernels)
    if len(products) == len(names) * passes:
        for position, index in enumerate(products):
            labels[index] = names[position % len(names)]
    return labels


def read_trace(file: Path) -> list[Kernel]:
    """The kernels and copies of a Chrome trace of torch's profiler."""
    events = json.loads(file.read_bytes())["traceEvents"]
    wanted = ("kernel", "gpu_memcpy", "gpu_memset")
    return [Kernel(event["name"], event["ts"], event["dur"]) for event in events if event.get("cat") in wanted]


class _Proxy:
    """The engine with a `launch` that is timed."""

    def __init__(self, timed: TimedEngine) -> None:
        self._engine = timed.engine
        self.launch = timed.launch

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def _shortened(cell: Cell) -> Cell:
    match cell:
        case Decode():
            return replace(cell, steps=min(cell.steps, 30), warm_up=min(cell.warm_up, 5))
        case FirstToken():
            return replace(cell, runs=min(cell.runs, 4), warm_up=1)
        case PrefillRate():
            return replace(cell, prompts=min(cell.prompts, 48), warm_up=1)
        case Offline():
            return replace(cell, requests=min(cell.requests, 64), warm_up=1)


def _group_bytes(cost: ModelCost, cell: Cell) -> dict[str, float]:
    """Bytes that a pass of a memory-bound cell must read, by group."""
    if not isinstance(cell, Decode):
        return {}
    return {"gemm": cost.weight_bytes, "attention": cell.batch * cost.read_bytes(cell.context)}


def _product_bytes(model: ModelSpec, item_bytes: int) -> Counter[str]:
    """Bytes read by the GEMMs of all layers, which are alike, and of the head."""
    hidden, mixer, mlp = model.hidden_size, model.layers[0].mixer, model.layers[0].mlp
    return Counter(
        qkv=(mixer.q_size + 2 * mixer.kv_size) * hidden * item_bytes,
        output=mixer.q_size * hidden * item_bytes,
        gate_up=2 * mlp.size * hidden * item_bytes,
        down=mlp.size * hidden * item_bytes,
        head=model.vocab_size * hidden * item_bytes,
    )
