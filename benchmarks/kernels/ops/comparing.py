"""The comparison of an op's implementations at one shape: what each returns, how long it takes, and the floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import torch

from benchmarks.engine.ceilings import measure_ceilings, sustained_seconds
from benchmarks.kernels.case import Case, errors

Run = Callable[[], torch.Tensor]
WARM_RUNS, TIMED_RUNS, FLUSHED_BYTES = 3, 25, 256 << 20
OURS, PLAIN = "ours", "torch, plain"
NO_ERROR = -1.0


class MissingLibrary(Exception):
    """A library that is not installed, or can't be imported here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to compute an op. `prepare` does what a server does once a pass or a start, and returns what is timed."""

    prepare: Callable[[], Run]
    output: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda out: out)  # the result in the form of ours
    in_graph: bool = True  # timed as replays of a CUDA graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One op at one shape. `exact` in float64 is compared with `compared` of each implementation's output."""

    op: str
    shape: str
    implementations: Mapping[str, Implementation]
    exact: Callable[[], torch.Tensor]
    compared: Callable[[torch.Tensor], torch.Tensor]
    num_bytes: float
    flops: float
    is_fp8: bool = False  # both operands of the products have 8 bits


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One implementation at one shape, measured or with the reason why not."""

    op: str
    shape: str
    implementation: str
    floor_us: float
    us: float | None = None
    error: float = NO_ERROR  # |result - exact| / |exact|
    is_captured: bool = True
    remark: str = ""  # "failed: …", "not installed", or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The measured rates of the device."""

    bytes_per_s: float
    flops_per_s: float
    fp8_flops_per_s: float

    def floor_us(self, comparison: Comparison) -> float:
        rate = self.fp8_flops_per_s if comparison.is_fp8 else self.flops_per_s
        return 1e6 * max(comparison.num_bytes / self.bytes_per_s, comparison.flops / rate)


def limits_of(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure the rates, reading bandwidth included: attention and products hardly write."""
    found = measure_ceilings(device, dtype, quick=device.type != "cuda")
    bandwidth = max(found.bytes_per_s, found.read_bytes_per_s)
    return Limits(
        bytes_per_s=bandwidth, flops_per_s=found.flops_per_s, fp8_flops_per_s=_fp8_rate(device, found.flops_per_s)
    )


def _fp8_rate(device: torch.device, otherwise: float, side: int = 8192) -> float:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return otherwise
    left, right = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def product() -> torch.Tensor:
        found: torch.Tensor = torch._scaled_mm(
            left, right.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return found

    return 2 * side**3 / sustained_seconds(product, device)


def compare(comparison: Comparison, name: str, limits: Limits, device: torch.device, dtype: torch.dtype) -> Row:
    """Measure one implementation; an exception becomes a row that says so."""

    def row(**found: object) -> Row:
        return Row(
            op=comparison.op, shape=comparison.shape, implementation=name, floor_us=limits.floor_us(comparison), **found
        )  # type: ignore[arg-type]

    chosen = comparison.implementations[name]
    try:
        run = chosen.prepare()
        case = Case(
            name,
            run,
            comparison.exact,
            lambda out: comparison.compared(chosen.output(out)),
            comparison.num_bytes,
            comparison.flops,
        )
        error, _ = errors(case, dtype)
        microseconds, is_captured = measure(run, device, in_graph=chosen.in_graph)
    except MissingLibrary as missing:
        return row(remark=str(missing))
    except Exception as failure:  # any library may fail in any way, and the others' rows still count
        return row(remark=f"failed: {type(failure).__name__}: {_first_line(failure)}")
    return row(us=microseconds, error=error, is_captured=is_captured)


def _first_line(failure: Exception) -> str:
    return (str(failure).strip().splitlines() or [""])[0].replace("|", "/")[:160]


def measure(run: Run, device: torch.device, *, in_graph: bool) -> tuple[float, bool]:
    """Return the median time in microseconds with a cold L2 cache, and True if a graph was replayed."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e6, False
    for _ in range(WARM_RUNS):
        run()
    torch.cuda.synchronize(device)
    timed, is_captured = (_captured(run), True) if in_graph else (run, False)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TIMED_RUNS)]
    for begin, end in events:
        flushed.zero_()
        begin.record()
        timed()
        end.record()
    torch.cuda.synchronize(device)
    times = sorted(begin.elapsed_time(end) for begin, end in events)
    return times[len(times) // 2] * 1e3, is_captured


def _captured(run: Run) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return kept  # the graph writes to it

    return replay
