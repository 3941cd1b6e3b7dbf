"""Our kernels alone: time, share of the floor, and relative error against float64, at the shapes of Llama-3.1-8B.

    python -m benchmarks.kernels                the table, within a minute on an H200; also part of `benchmarks.engine`
    python -m benchmarks.kernels --quantised    the same of quantised weights, each format's products and experts
    python -m benchmarks.kernels --op NAME      implementations of an op side by side: see `ops/command.py`
    TRITON_INTERPRET=1 python -m benchmarks.kernels --errors    errors alone, of quantised weights: by Triton's interpreter

A time is the median of runs with a cold L2 cache. An error is |kernel - exact| / |exact| over a whole output, for attention over
some rows. Its floor is the error of rounding the exact result to bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from benchmarks import environment
from benchmarks.engine.ceilings import measure_ceilings
from benchmarks.engine.floors import Ceilings
from benchmarks.kernels.case import Case, errors
from benchmarks.kernels.ops.command import main as compare_implementations
from benchmarks.kernels.quantised import REAL, print_errors, quantised_cases
from benchmarks.results_format import Result, number
from engine.kernels import activation, attention, linear, norm, rope
from engine.kernels.codes import KINDS, LATENT_KINDS, Kind, coded, decoded, numbers_of
from engine.kernels.device import describe
from engine.kernels.mla import mla_attention, opened
from engine.kernels.sparse import selected_positions, sparse_attention

DTYPE = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, FEATURES, HIDDEN = 32, 8, 128, 4096, 14336
LATENT_HEADS, LATENTS, ROTATED = 16, 512, 64
INDEX_HEADS, INDEX_DIM, CHOSEN = 64, 128, 2048  # DeepSeek-V3.2's
BLOCK = 16
SCALE = HEAD_DIM**-0.5
COMPARED_ROWS = 48  # rows of an attention output


@torch.inference_mode()
def measure_kernels(device: torch.device, ceilings: Ceilings, cases: Iterable[Case] | None = None) -> list[Result]:
    """Measure a time in microseconds and an error of each kernel; without `cases`, of those of 16-bit weights."""
    from triton.testing import do_bench

    torch.manual_seed(0)
    results = []
    for case in _cases(device) if cases is None else cases:
        error, rounding = errors(case, DTYPE)
        milliseconds = float(do_bench(case.run, warmup=20, rep=80, return_mode="median"))
        floor = max(case.num_bytes / ceilings.bytes_per_s, case.flops / ceilings.flops_per_s)
        results += [
            Result(name=f"kernel_{case.name}", value=milliseconds * 1e3, unit="us", better="lower", floor=floor * 1e6),
            Result(
                name=f"kernel_{case.name}_error",
                value=error * 1e3,
                unit="1e-3 of float64",
                better="lower",
                floor=rounding * 1e3,
            ),
        ]
    return results


def _random(*shape: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=device) * scale).to(DTYPE)


def _cases(device: torch.device) -> Iterator[Case]:
    yield from _row_cases(device)
    for rows in (1, 32, 128):
        yield from _product_cases(device, rows)
    yield _decode_case(device, 64, 1088)
    yield _decode_case(device, 32, 8256)
    for kind in KINDS:
        yield _decode_case(device, 64, 1088, kind)
        yield _decode_case(device, 32, 8256, kind)
    for kept in (None, *LATENT_KINDS):
        yield _latent_case(device, 64, 1088, kept)
        yield _latent_case(device, 32, 8256, kept)
    for count, context in ((1, 32768), (1, 131072), (32, 8256)):
        yield from _sparse_cases(device, count, context)
    yield _selection_case(device, 8192, 8192)
    yield _selection_case(device, 2048, 131072)
    yield _prefill_case(device, 2048, 2048)
    yield _prefill_case(device, 8192, 8192)
    yield _prefill_case(device, 2048, 4096)


def _row_cases(device: torch.device, rows: int = 2048) -> Iterator[Case]:
    x, residual, weight = (_random(*shape, device=device) for shape in [(rows, FEATURES)] * 2 + [(FEATURES,)])

    def normed() -> torch.Tensor:
        total = (x + residual).double()
        return weight.double() * total / (total.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()

    moved = 4 * x.nbytes
    yield Case("norm", lambda: norm.add_rms_norm(x, residual, weight, 1e-5)[0], normed, lambda out: out, moved, 0.0)

    gate_up = _random(rows, 2 * HIDDEN, device=device)
    gate, up = gate_up.chunk(2, dim=-1)
    yield Case(
        "activation",
        lambda: activation.act_and_mul(gate_up),
        lambda: torch.nn.functional.silu(gate.double()) * up.double(),
        lambda out: out,
        1.5 * gate_up.nbytes,
        0.0,
    )

    qkv = _random(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    angles = torch.rand(rows, HEAD_DIM // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    pool = _random(-(-rows // BLOCK), 2, BLOCK, KV_HEADS, HEAD_DIM, device=device)

    def rotated() -> torch.Tensor:
        heads = qkv.double().unflatten(-1, (-1, HEAD_DIM))[:, :HEADS]
        first, second = heads.chunk(2, dim=-1)
        cos, sin = cos_sin.double()[:, None].chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    yield Case(
        "rope_and_write_kv",
        lambda: rope.rope_and_write_kv(qkv, positions, cos_sin, positions, pool, rope.Heads()),
        rotated,
        lambda out: out,
        2 * qkv.nbytes,
        0.0,
    )


def _product_cases(device: torch.device, rows: int) -> Iterator[Case]:
    x = _random(rows, FEATURES, device=device)
    qkv = _random((HEADS + 2 * KV_HEADS) * HEAD_DIM, FEATURES, device=device, scale=FEATURES**-0.5)
    gate_up = _random(2 * HIDDEN, FEATURES, device=device, scale=FEATURES**-0.5)
    yield Case(
        f"linear_b{rows}",
        lambda: linear.linear(x, qkv, None),
        lambda: x.double() @ qkv.double().T,
        lambda out: out,
        qkv.nbytes,
        2.0 * rows * qkv.numel(),
    )

    def gated() -> torch.Tensor:
        gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    yield Case(
        f"gated_linear_b{rows}",
        lambda: linear.gated_linear(x, gate_up, None),
        gated,
        lambda out: out,
        gate_up.nbytes,
        2.0 * rows * gate_up.numel(),
    )


def _decode_case(device: torch.device, count: int, context: int, kind: Kind | None = None) -> Case:
    """`kind`: what the pool keeps keys and values as."""
    width = -(-context // BLOCK)
    numbers = _random(count * width, 2, BLOCK, KV_HEADS, HEAD_DIM, device=device)
    pool, codes = (numbers, None) if kind is None else coded(numbers, kind)
    kept = numbers if kind is None else numbers_of(pool, torch.arange(count * width, device=device), codes)
    table = torch.randperm(count * width, device=device).int().view(count, width)
    parts = [pool] if codes is None or codes.scales is None else [pool, codes.scales]
    head_bytes = sum(part.shape[-1] * part.element_size() for part in parts)
    q = _random(count, HEADS, HEAD_DIM, device=device)
    plan = _decode_plan(device, table, context, KV_HEADS)

    def exact() -> torch.Tensor:
        rows = [_attended(q[[row]], kept, table[row], context, [context - 1]) for row in range(COMPARED_ROWS // 3)]
        return torch.cat(rows)

    return Case(
        f"decode_b{count}_ctx{context}{f'_{kind}' if kind else ''}",
        lambda: attention.paged_attention(q, pool, plan, attention.Scores(scale=SCALE), codes=codes),
        exact,
        lambda out: out[: COMPARED_ROWS // 3],
        count * context * 2 * KV_HEADS * head_bytes,
        4.0 * count * context * HEADS * HEAD_DIM,
    )


def _decode_plan(device: torch.device, table: torch.Tensor, context: int, num_kv_heads: int) -> attention.AttentionPlan:
    count, width = table.shape
    at_once = attention.items_at_once(describe(device), num_kv_heads)
    items, parts = attention.deal_out(np.full(count, context), window=0, at_once=at_once, queries=1)
    attention.point(items, 0, width)
    dealt = attention.DecodeItems(torch.from_numpy(items).to(device), torch.from_numpy(parts).to(device))
    batch = None
    if device.type == "cpu":  # what the plain version reads
        rows = torch.arange(count + 1, dtype=torch.int32)
        batch = attention.AttentionBatch(rows, torch.full((count,), context, dtype=torch.int32), table, 1, context)
    return attention.AttentionPlan(count, batch, {0: dealt}, table, None)


def _latent_case(device: torch.device, count: int, context: int, kind: Kind | None) -> Case:
    """DeepSeek's latents with 16 heads, a rank's of eight; `kind`: what the pool keeps latents as."""
    width, size = -(-context // BLOCK), LATENTS + ROTATED
    both = _random(count * width, 1, BLOCK, 1, size, device=device)
    kept = opened([both], LATENTS, None, DTYPE)
    numbers = both
    if kind is not None:
        pages, codes = coded(both[..., :LATENTS].expand(-1, 2, -1, -1, -1), kind)
        scales = None if codes.scales is None else codes.scales[:, :1]
        kept = opened(
            [pages[:, :1], both[..., LATENTS:], *([] if scales is None else [scales])], LATENTS, codes.factors, DTYPE
        )
        numbers = torch.cat((decoded(pages[:, :1], scales, codes.factors[0], DTYPE), both[..., LATENTS:]), dim=-1)
    table = torch.randperm(count * width, device=device).int().view(count, width)
    q = _random(count, LATENT_HEADS, size, device=device)
    plan, scale = _decode_plan(device, table, context, 1), size**-0.5

    def exact() -> torch.Tensor:
        found = []
        for row in range(COMPARED_ROWS // 3):
            rows = numbers[table[row].long()].flatten(0, -2)[:context].double()
            found.append((q[row].double() @ rows.T * scale).softmax(dim=-1) @ rows[:, :LATENTS])
        return torch.stack(found)

    return Case(
        f"latents_b{count}_ctx{context}{f'_{kind}' if kind else ''}",
        lambda: mla_attention(q, kept, plan, rank=LATENTS, scale=scale),
        exact,
        lambda out: out[: COMPARED_ROWS // 3],
        count * context * (LATENTS * kept.latents.element_size() + 2 * ROTATED + (4 if kind == "int8" else 0)),
        2.0 * count * context * LATENT_HEADS * (size + LATENTS),
    )


def _sparse_cases(device: torch.device, count: int, context: int) -> Iterator[Case]:
    """Make cases of DeepSeek-V3.2's sparse attention: positions are chosen, and attended to by 16 heads."""
    width, size, compared = -(-context // BLOCK), LATENTS + ROTATED, slice(COMPARED_ROWS // 3)
    table = torch.randperm(count * width, device=device).int().view(count, width)
    plan, positions = _decode_plan(device, table, context, 1), torch.full((count,), context - 1, device=device).int()
    keys = _random(count * width, 1, BLOCK, 1, INDEX_DIM, device=device)
    q, weights = _random(count, INDEX_HEADS, INDEX_DIM, device=device), torch.rand(count, INDEX_HEADS, device=device)

    def scores() -> torch.Tensor:
        known = keys[table[compared].long()].flatten(1, -2)[:, :context].double()
        products = (q[compared].double() @ known.transpose(1, 2)).clamp(min=0)
        return (weights[compared, None].double() @ products)[:, 0]

    yield Case(
        f"chosen_positions_b{count}_ctx{context}",
        lambda: selected_positions(q, weights, positions, keys, plan, CHOSEN, context),
        lambda: scores().topk(CHOSEN).values.sort().values,
        lambda out: scores().gather(1, out[compared].long()).sort().values,
        2.0 * count * context * INDEX_DIM,
        2.0 * count * context * INDEX_HEADS * INDEX_DIM,
    )
    both = _random(count * width, 1, BLOCK, 1, size, device=device)
    kept, asking = opened([both], LATENTS, None, DTYPE), _random(count, LATENT_HEADS, size, device=device)
    lists = torch.stack([torch.randperm(context, device=device)[:CHOSEN].sort().values.int() for _ in range(count)])
    scale = size**-0.5

    def exact() -> torch.Tensor:
        rows = both[table[compared].long()].flatten(1, -2).double()
        rows = rows.gather(1, lists[compared, :, None].long().expand(-1, -1, size))
        return (asking[compared].double() @ rows.transpose(1, 2) * scale).softmax(dim=-1) @ rows[..., :LATENTS]

    yield Case(
        f"chosen_latents_b{count}_ctx{context}",
        lambda: sparse_attention(asking, kept, plan, lists, rank=LATENTS, scale=scale),
        exact,
        lambda out: out[compared],
        2.0 * count * CHOSEN * size,
        2.0 * count * CHOSEN * LATENT_HEADS * (size + LATENTS),
    )


def _selection_case(device: torch.device, new: int, context: int) -> Case:
    """Make a case of DeepSeek-V3.2's choice of positions for `new` tokens at the end of a prompt."""
    table = torch.randperm(context // BLOCK, device=device).int()[None]
    positions = torch.arange(context - new, context, dtype=torch.int32, device=device)
    keys = _random(context // BLOCK, 1, BLOCK, 1, INDEX_DIM, device=device)
    q, weights = _random(new, INDEX_HEADS, INDEX_DIM, device=device), torch.rand(new, INDEX_HEADS, device=device)
    tiles = attention.deal_out_tiles(np.array([new]), np.array([context]), np.zeros(1, dtype=np.int64), rows=128)
    prompts = attention.PrefillPlan(_batch_of(table, new, context), torch.from_numpy(tiles).to(device), 128, 0, None)
    plan = attention.AttentionPlan(0, None, {}, table, prompts)
    first = max(0, CHOSEN - context + new)
    compared = torch.linspace(first, new - 1, COMPARED_ROWS // 3).long().to(device)

    def scores() -> torch.Tensor:
        known = keys[table[0].long()].flatten(0, -2).double()
        rows = [weights[row].double() @ (q[row].double() @ known.T).clamp(min=0) for row in compared]
        return torch.stack(rows).masked_fill(torch.arange(context, device=device) > positions[compared, None], -1.0)

    return Case(
        f"chosen_positions_{new}_of_{context}",
        lambda: selected_positions(q, weights, positions, keys, plan, CHOSEN, context),
        lambda: scores().topk(CHOSEN).values.sort().values,
        lambda out: scores().gather(1, out[compared].long()).sort().values,
        2.0 * context * INDEX_DIM,
        2.0 * (new - first) * (context - (new - first - 1) / 2) * INDEX_HEADS * INDEX_DIM,
    )


def _batch_of(table: torch.Tensor, new: int, context: int) -> attention.AttentionBatch:
    """The batch of one prompt with `new` tokens at the end of its context."""
    starts, contexts = (torch.tensor(each, dtype=torch.int32, device=table.device) for each in ([0, new], [context]))
    return attention.AttentionBatch(starts, contexts, table, new, context)


def _prefill_case(device: torch.device, new: int, context: int) -> Case:
    """Make a case of `new` tokens at the end of a context.

    If all are new, attention reads the projection's keys and values; else gathering them from the pool is timed, too.
    """
    blocks = context // BLOCK
    pool = _random(blocks, 2, BLOCK, KV_HEADS, HEAD_DIM, device=device)
    table = torch.randperm(blocks, device=device).int()[None]
    q = _random(new, HEADS, HEAD_DIM, device=device)
    kv = pool[table[0].long()].transpose(0, 1).reshape(2, context, KV_HEADS * HEAD_DIM)
    qkv = torch.cat((q.flatten(1), *kv[:, context - new :]), dim=-1)
    batch = _batch_of(table, new, context)
    cut = attention.tiling(device, q.dtype, attention.HeadShape(HEADS, KV_HEADS, HEAD_DIM), is_plain=True)
    rows, start = cut.rows(new, behind=new < context), np.zeros(1, dtype=np.int64)
    tiles = cut.deal_out(np.array([new]), np.array([context]), start, rows=rows)
    gathered = torch.stack((table[0], torch.full_like(table[0], BLOCK)), dim=1) if new < context else None
    prompts = attention.PrefillPlan(batch, torch.from_numpy(tiles).to(device), rows, cut.at_once, gathered)
    plan = attention.AttentionPlan(0, None, {}, table, prompts)
    compared = torch.linspace(0, new - 1, COMPARED_ROWS).long().tolist()
    return Case(
        f"prefill_{new}" if new == context else f"prefill_{new}_after_{context - new}",
        lambda: attention.paged_attention(q, pool, plan, attention.Scores(scale=SCALE), qkv=qkv),
        lambda: _attended(q[compared], pool, table[0], context, [context - new + row for row in compared]),
        lambda out: out[compared],
        2.0 * (2 * q.nbytes + 2 * context * KV_HEADS * HEAD_DIM),
        4.0 * HEADS * HEAD_DIM * (new * (context - new) + new * (new + 1) / 2),
    )


def _attended(
    q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, context: int, positions: Sequence[int]
) -> torch.Tensor:
    """[rows, Hq, D] in float64: one row a time."""
    keys, values = pool[table.long()].transpose(1, 2).flatten(0, 1)[:context].double().unbind(1)
    out = []
    for row, position in zip(q.double(), positions, strict=True):
        grouped = row.unflatten(0, (KV_HEADS, -1))
        scores = torch.einsum("hgd,chd->hgc", grouped, keys[: position + 1]) * SCALE
        out.append(torch.einsum("hgc,chd->hgd", scores.softmax(dim=-1), values[: position + 1]).flatten(0, 1))
    return torch.stack(out)


def main(arguments: Sequence[str]) -> int:
    """Print the table; without a GPU there are only errors."""
    if any(argument.partition("=")[0] == "--op" for argument in arguments):
        return compare_implementations(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--quantised", action="store_true", help="kernels of quantised weights")
    parser.add_argument("--errors", action="store_true", help="only errors, of quantised weights: by the interpreter")
    options = parser.parse_args(arguments)
    if options.errors:
        return print_errors()
    device = environment.device_of("benchmarks.kernels", "cuda")
    cases = quantised_cases(device, REAL, DTYPE) if options.quantised else None
    results = measure_kernels(device, measure_ceilings(device, DTYPE, quick=False), cases)
    for timed, error in zip(results[::2], results[1::2], strict=True):
        print(
            f"{timed.name:34}{number(timed.value):>10} us  {timed.fraction_of_floor:6.1%} of floor"
            f"{error.value:9.3f}e-3 error, {error.floor:.3f}e-3 of it rounding"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
