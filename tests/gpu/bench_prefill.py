"""Prefill attention on a GPU: every version against float64, then times: `python tests/gpu/bench_prefill.py`.

Under 90 s on an H200. Prints errors, then milliseconds and TFLOP/s of the causal half, one line a version and shape; the best of
each case last.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from engine.kernels import triton_paged_prefill
from tests.unit.kernels.prefill_checks import Case, expected, make_case

try:
    from engine.kernels import gluon_prefill
except Exception:
    gluon_prefill = None  # type: ignore[assignment]
    print(f"no gluon_prefill: {traceback.format_exc(limit=3)}", flush=True)

DEVICE = "cuda"
BUDGET = 85.0  # seconds; what is not measured by then is left out
BEGAN = time.perf_counter()

# queries of a tile, positions of a loop step, warps, stages
TRITON_SHAPES = [
    (128, 64, 8, 5),
    (128, 64, 8, 3),
    (128, 128, 8, 3),
    (128, 128, 8, 5),
    (64, 64, 4, 5),
    (64, 128, 4, 3),
]

# new tokens and contexts of each sequence, what they stand for
TIMED = {
    "1x512": [(512, 512)],
    "1x2048": [(2048, 2048)],
    "1x8192": [(8192, 8192)],
    "8x1024": [(1024, 1024)] * 8,
    "4x2048+2048": [(2048, 4096)] * 4,
}
HEADS, HEAD_DIM, LAYERS = (32, 8), 128, 4

Launch = Callable[[Case, torch.Tensor], None]


def triton_version(shape: tuple[int, int, int, int] | None, case: Case) -> Launch:
    chosen = shape or triton_paged_prefill.prefill_shape(case.q.shape[2], case.q.element_size())
    tiles = case.tiles(chosen[0])

    def launch(case: Case, out: torch.Tensor) -> None:
        triton_paged_prefill.paged_prefill(
            case.q, case.kv_layer, case.query_start, case.context_len, case.block_table, tiles, out,
            scale=case.scale, window=case.window, shape=chosen,
        )  # fmt: skip

    return launch


def gluon_version(variant: object, case: Case) -> Launch:
    chosen = variant or gluon_prefill.prefill_variant(case.q.shape[2])
    tiles = case.tiles(gluon_prefill.tile_rows(chosen))

    def launch(case: Case, out: torch.Tensor) -> None:
        gluon_prefill.paged_prefill(
            case.q, case.kv_layer, case.query_start, case.context_len, case.block_table, tiles, out,
            scale=case.scale, window=case.window, variant=chosen,
        )  # fmt: skip

    return launch


def bulk_version(gather: bool, case: Case) -> Launch:
    """`triton_prefill`: keys and values one behind the other, or gathered from the pool first (timed with it)."""
    from engine.kernels import attention, triton_prefill

    num_kv_heads, head_dim = case.kv_layer.shape[3:]
    new, context = np.array(case.lengths).T
    longest = int(context.max())
    rows = attention.prefill_shape(head_dim, longest)[0]
    counts = -(-context // 16)
    tiles = torch.from_numpy(attention.deal_out_tiles(new, context, (np.cumsum(counts) - counts) * 16, rows=rows)).to(
        DEVICE
    )
    table = case.block_table.cpu()
    blocks = torch.tensor(
        [
            (int(table[sequence, index]), min(16, int(length) - index * 16))
            for sequence, length in enumerate(context)
            for index in range(counts[sequence])
        ],
        dtype=torch.int32, device=DEVICE,
    )  # fmt: skip
    q = case.q.contiguous()
    gathered = triton_prefill.gather_context(case.kv_layer, blocks)

    def launch(case: Case, out: torch.Tensor) -> None:
        keys, values = triton_prefill.gather_context(case.kv_layer, blocks) if gather else gathered
        triton_prefill.prefill(
            q, keys, values, tiles, out,
            num_kv_heads=num_kv_heads, scale=case.scale, window=case.window, max_context_len=longest,
        )  # fmt: skip

    return launch


def sdpa_version(backend: str, case: Case) -> Launch:
    """torch's own on contiguous tensors, without pages: a yardstick."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    new, context = case.lengths[0]
    if any(length != (new, context) for length in case.lengths) or new != context:
        raise NotImplementedError("equal lengths without a cached prefix only")
    q = torch.randn(len(case.lengths), case.q.shape[1], new, case.q.shape[2], device=DEVICE, dtype=case.q.dtype)
    k, v = torch.randn(2, len(q), case.kv_layer.shape[3], new, case.q.shape[2], device=DEVICE, dtype=q.dtype)

    def launch(case: Case, out: torch.Tensor) -> None:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return launch


def versions() -> dict[str, Callable[[Case], Launch]]:
    made: dict[str, Callable[[Case], Launch]] = {}
    for shape in TRITON_SHAPES:
        made[f"triton {shape}"] = lambda case, shape=shape: triton_version(shape, case)
    if gluon_prefill is not None:
        for variant in gluon_prefill.VARIANTS:
            made[f"gluon {tuple(variant)}"] = lambda case, variant=variant: gluon_version(variant, case)
    made["bulk"] = lambda case: bulk_version(False, case)
    made["bulk, gathered"] = lambda case: bulk_version(True, case)
    for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        made[f"sdpa {backend}"] = lambda case, backend=backend: sdpa_version(backend, case)
    return made


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return " | ".join(lines[:3])[:400]


def error_of(launch: Launch, case: Case, wanted: torch.Tensor) -> float:
    errors = []
    for _ in range(2):  # twice: a race shows as a moving error
        out = case.poisoned_out()
        launch(case, out)
        torch.cuda.synchronize()
        errors.append(float((out.double() - wanted).norm() / wanted.norm()))
    return float(np.max(errors))  # NaN if one is


def random_lengths(count: int, longest: int) -> list[tuple[int, int]]:
    lengths = []
    for _ in range(count):
        new = int(torch.randint(1, longest, ()))
        lengths.append((new, new + int(torch.randint(0, 2, ())) * int(torch.randint(0, 2 * longest, ()))))
    return lengths


def check_all() -> None:
    """Each case with the default of each version, the usual one with every shape and variant."""
    cases = [
        (4, 128, torch.bfloat16, 0),
        (4, 128, torch.float16, 100),
        (1, 64, torch.bfloat16, 0),
        (8, 64, torch.float16, 300),
    ]
    cases += [
        (4, 96, torch.bfloat16, 0),
        (2, 256, torch.bfloat16, 0),
        (2, 256, torch.float16, 64),
        (8, 128, torch.bfloat16, 1),
    ]
    cases += [(1, 128, torch.bfloat16, 0), (4, 64, torch.float32, 50), (4, 128, torch.float32, 0)]
    fixed = [(1, 1), (128, 128), (129, 129), (5, 700), (64, 1000), (300, 2222), (16, 16), (700, 700), (1, 333)]
    for index, (group, head_dim, dtype, window) in enumerate(cases):
        for lengths in [fixed] if index else [fixed, random_lengths(7, 900), [(1500, 4001)]]:
            case = make_case(lengths, (8 if group < 8 else 16, (8 if group < 8 else 16) // group), head_dim, dtype,
                             device=DEVICE, window=window)  # fmt: skip
            wanted = expected(case)
            tried: dict[str, Callable[[Case], Launch]] = {"triton": lambda case: triton_version(None, case)}
            if gluon_prefill is not None and gluon_prefill.applies(case.q, case.kv_layer):
                tried["gluon"] = lambda case: gluon_version(None, case)
            if index == 0:
                tried = {name: make for name, make in versions().items() if name.startswith(("triton", "gluon"))}
            for name, make in tried.items():
                try:
                    error = error_of(make(case), case, wanted)
                    limit = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
                    verdict = "ok" if error < limit else "WRONG"
                except Exception as failure:
                    error, verdict = float("nan"), first_line(failure)
                what = f"G={group} D={head_dim} {str(dtype)[6:]} window={window} S={len(lengths)}"
                print(f"check {what} {name}: {error:.1e} {verdict}", flush=True)


def milliseconds(launch: Launch, cases: list[Case], out: torch.Tensor) -> float:
    """Median of replays of a graph that goes through all the layers, so that a layer's KV is not in the cache from before."""
    launch(cases[0], out)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch(cases[0], out)
    end.record()
    torch.cuda.synchronize()
    repeats = max(1, min(5, int(2 / max(start.elapsed_time(end), 0.01) / len(cases))))
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for case in cases:
                launch(case, out)
    graph.replay()
    times = []
    for _ in range(12):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / repeats / len(cases))
    return float(np.median(times[2:]))


def time_all() -> None:
    summary = []
    for label, lengths in TIMED.items():
        case = make_case(lengths, HEADS, HEAD_DIM, torch.bfloat16, device=DEVICE)
        num_blocks = len(case.kv_layer)
        pool = torch.randn(num_blocks, LAYERS, 2, 16, HEADS[1], HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        layers = [
            Case(case.q, pool[:, layer], case.query_start, case.context_len, case.block_table, lengths, 0, case.scale)
            for layer in range(LAYERS)
        ]
        flops = sum(4 * HEADS[0] * HEAD_DIM * (new * (context - new) + new * new / 2) for new, context in lengths)
        best: dict[str, tuple[float, str]] = {}
        for name, make in versions().items():
            if time.perf_counter() - BEGAN > BUDGET:
                print("out of time", flush=True)
                break
            try:
                ms = milliseconds(make(layers[0]), layers, case.poisoned_out())
                print(f"{label:12} {name:44} {ms:8.4f} ms {flops / ms / 1e9:6.0f} TFLOP/s", flush=True)
                kind = name.split(" (")[0]
                best[kind] = min(best.get(kind, (1e9, "")), (ms, name))
            except Exception as failure:
                print(f"{label:12} {name:44} {first_line(failure)}", flush=True)
        summary += [
            f"best {label:12} {name:44} {ms:8.4f} ms {flops / ms / 1e9:6.0f} TFLOP/s"
            for ms, name in sorted(best.values())
        ]
    print("\n".join(summary), flush=True)


def compile_one(name: str) -> None:
    case = make_case([(200, 300)], HEADS, HEAD_DIM, torch.bfloat16, device=DEVICE)
    versions()[name](case)(case, case.poisoned_out())
    torch.cuda.synchronize()


def warm_cache() -> None:
    """Compile in processes side by side: what they leave in Triton's cache costs this one nothing."""
    names = [name for name in versions() if name.startswith(("triton", "gluon"))]
    waiting, limit = list(names), max(2, min(14, (os.cpu_count() or 4) - 2))
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    while waiting or running:
        while waiting and len(running) < limit:
            name = waiting.pop(0)
            running.append(
                (
                    name,
                    subprocess.Popen(
                        [sys.executable, __file__, name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    ),
                )
            )
        for name, process in list(running):
            code = process.poll()
            if code is None and time.perf_counter() - BEGAN > 40:
                process.kill()
                code = -1
            if code is not None:
                running.remove((name, process))
                if code:
                    print(f"compiling or running {name} alone failed with {code}", flush=True)
        time.sleep(0.05)
    print(f"compiled after {time.perf_counter() - BEGAN:.1f} s", flush=True)


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for step in (warm_cache, check_all, time_all):
        try:
            step()
        except Exception:
            print(f"FAILED {step.__name__}\n{traceback.format_exc(limit=6)}", flush=True)
    print(f"took {time.perf_counter() - BEGAN:.1f} s", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compile_one(sys.argv[1])
    else:
        main()
