"""The device's measured limits, by which the work of `floors` is divided: copy bandwidth, product rate, upload rate."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.engine.floors import Ceilings

REPEATED_RUNS = 8


@torch.inference_mode()
def measure_ceilings(device: torch.device, dtype: torch.dtype, *, quick: bool) -> Ceilings:
    """Measure each limit as the best of a few runs, on random data: a GPU is faster on zeros."""
    side, num_bytes = (256, 8 << 20) if quick else (8192, 4 << 30)
    return Ceilings(
        bytes_per_s=2 * num_bytes / _copy_seconds(num_bytes, device),
        read_bytes_per_s=num_bytes / _read_seconds(num_bytes, device),
        flops_per_s=2 * side**3 / _product_seconds(side, device, dtype),
        upload_bytes_per_s=num_bytes / 4 / _upload_seconds(num_bytes // 4, device),
    )


def _copy_seconds(num_bytes: int, device: torch.device) -> float:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return best_seconds(lambda: target.copy_(source), device)


def _read_seconds(num_bytes: int, device: torch.device) -> float:
    source = torch.randint(0, 255, (1024, num_bytes // 4096), device=device).float()  # enough rows for every core
    return best_seconds(lambda: source.sum(dim=1), device)


def _product_seconds(side: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(left)
    return sustained_seconds(lambda: torch.mm(left, right, out=product), device)


def _upload_seconds(num_bytes: int, device: torch.device) -> float:
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    landing = torch.empty_like(host, device=device)
    return best_seconds(lambda: landing.copy_(host, non_blocking=True), device)


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the time of the shortest of several runs, after one to warm up."""
    return min(_times(work, device))


def sustained_seconds(work: Callable[[], object], device: torch.device, *, runs: int = 20) -> float:
    """Return a run's mean time in the best of several series.

    A product's rate falls with the device's clock under load, so a short burst would flatter.
    """

    def series() -> None:
        for _ in range(runs):
            work()

    return min(_times(series, device)) / runs


def _times(work: Callable[[], object], device: torch.device) -> list[float]:
    times = []
    for _ in range(REPEATED_RUNS + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return times[1:]


def synchronize(device: torch.device) -> None:
    """Wait for the device; the CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
