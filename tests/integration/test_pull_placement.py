"""From whom a prefill worker should pull a prompt's blocks, and what that does to the choice and the charges."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.placement.ledger import Ledger
from tests.integration.fleet import BLOCK_SIZE, FleetStore, a_holder, a_prompt, a_request, a_worker, holding

PULLS = {"pull_bytes_per_s": 1e9}
PROMPT = a_prompt()
KEPT = len(PROMPT) * BLOCK_SIZE


async def fleet(
    store: FleetStore, *, prefill: dict[str, Any] = PULLS, decode: dict[str, Any] = PULLS, digests: list[bytes] = PROMPT
) -> None:
    """A prefill worker, and a decode worker that generated what the next prompt begins with."""
    await store.register(a_worker("p0", "prefill", **prefill))
    await store.register(a_worker("d0", "decode", **decode))
    await store.announce("d0", 1, digests, [])


async def test_a_prompt_is_pulled_from_the_worker_that_generated_its_beginning(
    store: FleetStore, ledger: Ledger
) -> None:
    await fleet(store)
    placement = await ledger.place(a_request(digests=PROMPT, num_tokens=KEPT + 10))
    assert (placement.prefill, placement.holder, placement.holder_blocks) == ("p0", "d0", len(PROMPT))
    assert placement.costs["prefill_ms"] == pytest.approx(10 + placement.costs["pull_ms"], abs=0.2)
    assert await ledger.charged("p0", "prefill") == 10


async def test_nothing_is_pulled_that_the_prefill_worker_has(store: FleetStore, ledger: Ledger) -> None:
    await fleet(store)
    await store.announce("p0", 1, PROMPT, [])
    assert (await ledger.place(a_request(digests=PROMPT))).holder == ""


@pytest.mark.parametrize(
    "how",
    [
        {"prefill": {}},  # it does not ask
        {"decode": {}},  # it does not lend
        {"prefill": {"pull_bytes_per_s": 1e3}},
        {"prefill": PULLS | {"prefill_tokens_per_s": 1e6}},
        {"digests": PROMPT[:3]},
    ],
)
async def test_what_is_computed_sooner_or_is_little_is_computed(
    store: FleetStore, ledger: Ledger, how: dict[str, Any]
) -> None:
    await fleet(store, **how)
    placement = await ledger.place(a_request(digests=PROMPT, num_tokens=KEPT + 10))
    assert (placement.prefill, placement.holder, placement.holder_blocks) == ("p0", "", 0)
    assert "pull_ms" not in placement.costs
    assert await ledger.charged("p0", "prefill") == KEPT + 10


async def test_a_worker_with_both_roles_pulls_from_the_busy_one_that_generated(
    store: FleetStore, ledger: Ledger
) -> None:
    for worker in ("w0", "w1"):
        await store.register(a_worker(worker, "prefill", "decode", **PULLS))
    await store.announce("w0", 1, PROMPT, [])
    for number in range(3):
        await ledger.place(a_request(f"other {number}", digests=PROMPT, num_tokens=KEPT + 900))
    placement = await ledger.place(a_request(digests=PROMPT, num_tokens=KEPT + 10))
    assert (placement.prefill, placement.decode, placement.holder) == ("w1", [], "w0")


@pytest.mark.parametrize(("on_disk", "disk_bytes_per_s", "pulled"), [(0, 1.0, 10), (2, 1e8, 10), (2, 1.0, 6)])
async def test_what_a_holder_has_below_its_pool_costs_its_loading(
    store: FleetStore, ledger: Ledger, on_disk: int, disk_bytes_per_s: float, pulled: int
) -> None:
    """Where that is too dear, what the pool has is pulled."""
    prompt = a_prompt(blocks=10)
    await store.register(a_worker("p0", "prefill", **PULLS))
    await store.register(a_holder("d0", "decode", disk_bytes_per_s=disk_bytes_per_s, **PULLS))
    await holding(store, "d0", prompt, below=4, on_disk=on_disk)
    placement = await ledger.place(a_request(digests=prompt, num_tokens=10 * BLOCK_SIZE + 10))
    assert (placement.prefill, placement.holder, placement.holder_blocks) == ("p0", "d0", pulled)
    assert await ledger.charged("p0", "prefill") == (10 - pulled) * BLOCK_SIZE + 10
