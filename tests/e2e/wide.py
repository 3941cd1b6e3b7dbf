"""A whole Baton whose workers have so many ranks or stages each, and what it must answer."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.e2e.asking import all_idle, complete, until, watching
from tests.e2e.cluster import Cluster
from tests.models import build_tiny_model
from tests.ports import own_port
from tests.reference import greedy_tokens

NEW_TOKENS = 12
LENGTHS = (1, 16, 33, 150)  # the cluster's token budget is 64: 150 tokens are three chunks


class WideCluster(Cluster):
    """`widths`: a worker's ranks, or stages (`depths`), by its name; 1 for the others. All take `flags`.

    `nodes`: the nodes, by a worker's name, that have its stages; a further one is the process `NAME.NUMBER`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        widths: Mapping[str, int] | None = None,
        depths: Mapping[str, int] | None = None,
        nodes: Mapping[str, int] | None = None,
        flags: Sequence[str] = (),
        **options: object,
    ) -> None:
        super().__init__(folder, **options)  # type: ignore[arg-type]
        self._widths, self._depths, self._more = widths or {}, depths or {}, flags
        self._meetings = {name: (count, own_port()) for name, count in (nodes or {}).items()}

    async def start(self, name: str) -> None:
        await super().start(name)
        if "." not in name and name in self._meetings:
            for number in range(1, self._meetings[name][0]):
                await self.start(f"{name}.{number}")

    def _worker_flags(self, name: str) -> list[str]:
        name, _, number = name.partition(".")
        ranks = ["-tp", str(self._widths.get(name, 1)), "-pp", str(self._depths.get(name, 1))]
        if name in self._meetings:
            count, port = self._meetings[name]
            ranks += ["--nnodes", f"{count}:{number or 0}@127.0.0.1:{port}"]
            if number:  # of a model in a folder of its own
                ranks += ["--model", str(self._others[f"{name}.{number}"][1])] if self._others else []
        return [*super()._worker_flags(name), *ranks, *self._more]


def ranks_of(leader: int) -> list[int]:
    """The processes of a worker's further ranks; none while it starts none."""
    try:
        children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in children if b"services.rank" in Path(f"/proc/{child}/cmdline").read_bytes()]


def pools_of(process: int) -> set[Path]:
    """The pool in shared memory that a process made: it has its lock, and others' pools are mapped without one."""
    own = [
        os.readlink(link)
        for link in Path(f"/proc/{process}/fd").iterdir()
        if link.is_symlink() and "lock:" in Path(f"/proc/{process}/fdinfo/{link.name}").read_text()
    ]
    return {Path(name) for name in own if "/dev/shm/baton-kv-" in name and os.stat(name).st_size}


async def check(
    tmp_path: Path,
    *,
    prefill: int,
    decode: int,
    model: Path | None = None,
    are_stages: tuple[bool, bool] = (False, False),
    within: int = 1,
    nodes: Mapping[str, int] | None = None,
    **options: object,
) -> None:
    """Prompts alone, again with cached prefixes, and in a batch. `are_stages`: of the prefill and the decode worker.

    `within`: the ranks of each stage. `nodes`: see `WideCluster`.
    """
    model = model or build_tiny_model(tmp_path / "llama", "llama")
    rng = random.Random(7)
    prompts = [[rng.randrange(10, 400) for _ in range(length)] for length in LENGTHS]
    mixed = [[rng.randrange(10, 400) for _ in range(rng.randint(1, 120))] for _ in range(8)]
    expected = greedy_tokens(model, [*prompts, *mixed], NEW_TOKENS)
    processes = {"prefill-0": prefill, "decode-0": decode}
    depths = {name: count for (name, count), is_deep in zip(processes.items(), are_stages, strict=True) if is_deep}
    widths = {name: within if name in depths else count for name, count in processes.items()}
    processes |= {name: count * within for name, count in depths.items()}
    options = {"max_batch_tokens": 64, **options}
    async with (
        WideCluster(tmp_path / "run", model=model, widths=widths, depths=depths, nodes=nodes, **options) as cluster,
        watching(cluster) as (_, peers),
        httpx.AsyncClient(base_url=cluster.url, timeout=60) as client,
    ):
        ask = partial(complete, client, max_tokens=NEW_TOKENS)
        alone = [await ask(prompt) for prompt in prompts]
        again = [await ask(prompt) for prompt in prompts]
        batch = await asyncio.gather(*map(ask, mixed))
        await until(peers, lambda states: len(states) == 2 and all_idle(states))
        states = peers.states
    answers = [*alone, *again, *batch]
    assert [answer["tokens"] for answer in answers] == [*expected[: len(LENGTHS)], *expected]
    size = states["decode-0"].region.layout.block_size  # a large state needs larger blocks
    assert [cached_of(answer) for answer in again] == [(length - 1) // size * size for length in LENGTHS]
    assert {name: len(state.region.each) for name, state in states.items()} == processes
    assert states["decode-0"].totals.refused_handoffs == 0
    totals, layout = states["prefill-0"].totals, states["prefill-0"].region.layout
    own = [
        msgspec.structs.replace(part, layers=part.all_layers or part.layers) for part in layout.pages
    ]  # all stages' layers
    sent = widths["prefill-0"] * sum(part.block_bytes(size) for part in own)
    assert totals.pushed_bytes == totals.pushed_blocks * sent


def cached_of(answer: dict[str, Any]) -> int:
    """Cached tokens of the prompt."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def ended(handle: int) -> None:
    """Wait for the end of a process that is no child."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, over.set)
    await over.wait()
    loop.remove_reader(handle)
    os.close(handle)
