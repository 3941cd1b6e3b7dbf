"""Sizes of workers in their machine's memory, known before they are started."""

from __future__ import annotations

from pathlib import Path

from kvtransfer.transports import frees_pools
from modelfiles.files import is_model
from modelfiles.pooling import PREFIX_BYTES, is_pooled, shares_prefixes
from services.runtime.checks.memory import bytes_in_memory, has_bfloat16
from services.runtime.checks.weights import weights_of
from services.worker.host_share import HostMB
from services.worker.options import WorkerOptions


def bytes_of(worker: WorkerOptions, folder: Path) -> int:
    """About the bytes that a worker takes of host memory; 0 for one whose weights are elsewhere, or not here yet."""
    if worker.processor != "cpu" or worker.fake or not is_model(folder):
        return 0
    weights = bytes_in_memory(
        weights_of(folder),
        on_cpu=True,
        dtype=worker.dtype,
        quantization=worker.quantization,
        has_bfloat16=has_bfloat16(),
    )
    kept = worker.kv_memory_mb << 20
    if is_pooled(folder):
        kept = kept or PREFIX_BYTES["cpu"] if shares_prefixes(folder) else 0
    return weights + kept


def stays_awake(worker: WorkerOptions) -> str:
    """The reason that such a worker can't sleep (`worker.parking`), with the flag and a remedy; "" if it can."""
    if not frees_pools(worker.kv_transport, worker.processor):
        return (
            f"--transport {worker.kv_transport}: peers know a GPU's KV cache by its address: "
            "take --transport local, which prefill workers can't, or no time of sleep"
        )
    if worker.processor != "cpu" and HostMB.parse(worker.kv_host_mb).mb != 0:
        return (
            f"--kv-host-mb {worker.kv_host_mb}: it knows a GPU's KV cache by its address: take 0, or no time of sleep"
        )
    return ""
