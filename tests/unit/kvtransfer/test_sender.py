"""The prefill worker's side of the handoff: what may be pushed when."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.blocks import pack_tokens
from common.errors import HandoffRefusedError
from common.messages import KVGroup, KVLayout, Region, ReserveReply
from common.words import Keeps
from kvtransfer.plan import Cargo, CargoGroup, Item
from kvtransfer.sender import Run, Sender, SenderState


def reply(destinations: list[int], *, first_block: int = 0) -> ReserveReply:
    return ReserveReply(granted=True, first_block=first_block, destination_blocks=pack_tokens(destinations))


def push(sender: Sender, run: Run | None, mark: int = 1) -> None:
    assert run is not None
    sender.pushed(run, bytes([mark]) * 8 * len(run.items))


def test_nothing_is_pushed_before_it_is_computed_and_reserved() -> None:
    computed, reserved = Sender(Cargo(num_tokens=40, block_size=16)), Sender(Cargo(num_tokens=40, block_size=16))
    computed.computed(40)
    reserved.reserved(reply([7, 8, 9]))

    assert computed.next_run() is None
    assert reserved.next_run() is None


def test_full_blocks_go_at_once_and_the_partial_one_after_the_last_chunk() -> None:
    sender = Sender(Cargo(num_tokens=40, block_size=16))
    sender.reserved(reply([7, 8, 9]))

    sender.computed(39)
    run = sender.next_run()
    assert run == Run(items=[Item(0, 0), Item(0, 1)], destination_blocks=[7, 8])
    push(sender, run)
    assert sender.next_run() is None

    sender.computed(40)
    assert sender.next_run() == Run(items=[Item(0, 2)], destination_blocks=[9])


def test_blocks_that_the_receiver_has_are_not_pushed() -> None:
    sender = Sender(Cargo(num_tokens=40, block_size=16))
    sender.computed(40)
    sender.reserved(reply([9], first_block=2))

    assert sender.next_run() == Run(items=[Item(0, 2)], destination_blocks=[9])


def test_a_state_goes_last_whatever_the_receiver_has() -> None:
    sender = Sender(Cargo(num_tokens=32, block_size=16, groups=[CargoGroup(), CargoGroup(blocks=2, first=1)]))
    with pytest.raises(HandoffRefusedError, match="the lease has 2 \\+ 0 blocks, the prompt 4"):
        sender.reserved(reply([], first_block=2))
    sender.reserved(reply([7, 8, 9], first_block=1))
    sender.computed(31)
    assert sender.next_run() is None
    sender.computed(32)
    assert sender.next_run() == Run(items=[Item(0, 1), Item(1, 1, 0), Item(1, 1, 1)], destination_blocks=[7, 8, 9])


def test_a_receiver_that_has_everything_gets_an_empty_manifest() -> None:
    sender = Sender(Cargo(num_tokens=32, block_size=16))
    sender.reserved(reply([], first_block=2))

    assert sender.state is SenderState.COMPLETE
    assert sender.manifest() == b""


def test_one_run_is_in_flight_at_most() -> None:
    sender = Sender(Cargo(num_tokens=40, block_size=16))
    sender.reserved(reply([7, 8, 9]))
    sender.computed(16)
    run = sender.next_run()
    sender.computed(40)

    assert sender.next_run() is None
    push(sender, run)
    assert sender.next_run() == Run(items=[Item(0, 1), Item(0, 2)], destination_blocks=[8, 9])  # coalesced


def test_nothing_more_is_pushed_after_an_abort() -> None:
    sender = Sender(Cargo(num_tokens=40, block_size=16))
    sender.reserved(reply([7, 8, 9]))
    sender.computed(32)
    run = sender.next_run()

    sender.abort()

    push(sender, run)  # it was in flight
    sender.computed(40)
    assert sender.next_run() is None
    assert sender.manifest() is None


@pytest.mark.parametrize("grant", [reply([1, 2]), reply([1, 2, 3], first_block=1), reply([1, 2, 3, 4])])
def test_a_lease_of_another_size_is_refused(grant: ReserveReply) -> None:
    with pytest.raises(HandoffRefusedError):
        Sender(Cargo(num_tokens=40, block_size=16)).reserved(grant)


def test_a_wrong_number_of_digests_fails_the_hand_over() -> None:
    sender = Sender(Cargo(num_tokens=32, block_size=16))
    sender.reserved(reply([7, 8]))
    sender.computed(32)
    run = sender.next_run()
    assert run is not None

    with pytest.raises(HandoffRefusedError):
        sender.pushed(run, b"12345678")

    assert sender.manifest() is None
    assert sender.next_run() is not None  # no run is in flight any more


def test_what_the_table_of_states_lacks_is_an_error() -> None:
    sender = Sender(Cargo(num_tokens=32, block_size=16))

    with pytest.raises(RuntimeError):
        sender.handed_off()
    sender.abort()
    sender.abort()  # giving up twice is not
    with pytest.raises(RuntimeError):
        sender.reserved(reply([7, 8]))


@given(
    num_tokens=st.integers(1, 200),
    cached=st.integers(0, 13),
    steps=st.lists(st.sampled_from(["compute", "take", "land"]), max_size=60),
    chunk=st.integers(1, 40),
)
def test_every_block_is_pushed_once_in_order_and_only_when_final(
    num_tokens: int, cached: int, steps: list[str], chunk: int
) -> None:
    num_blocks = -(-num_tokens // 16)
    first = min(cached, num_blocks)
    sender = Sender(Cargo(num_tokens=num_tokens, block_size=16))
    sender.reserved(reply(list(range(100 + first, 100 + num_blocks)), first_block=first))
    computed, run, taken = 0, None, []

    for step in [*steps, *["compute", "take", "land"] * (num_tokens + 1)]:
        if step == "compute":
            computed = min(num_tokens, computed + chunk)
            sender.computed(computed)
        elif step == "take" and run is None:
            run = sender.next_run()
            if run is not None:
                assert run.destination_blocks == [100 + item.entry for item in run.items]
                assert min(num_tokens, (run.items[-1].entry + 1) * 16) <= computed
                taken += [item.entry for item in run.items]
        elif step == "land" and run is not None:
            push(sender, run)
            run = None

    assert taken == list(range(first, num_blocks))
    digests = sender.manifest()
    assert digests is not None
    assert len(digests) == 8 * len(taken)


def test_a_prompt_is_counted_in_the_receivers_blocks() -> None:
    """A state takes another number of a narrower rank's blocks."""
    group = KVGroup(keeps=Keeps.STATE, parts=(), blocks_per_entry=3)
    layout = KVLayout(num_blocks=9, num_layers=1, block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    region = Region(transport="shm", incarnation=1, layout=msgspec.structs.replace(layout, groups=(group,)), address={})
    cargo = Cargo(num_tokens=4, block_size=4, groups=(CargoGroup(), CargoGroup(blocks=2)))
    sender = Sender(cargo)
    lease = ReserveReply(granted=True, destination_blocks=pack_tokens([5, 6, 7, 8]), first_entries=[0], region=region)

    sender.reserved(lease)

    sender.computed(4)
    run = sender.next_run()
    assert run is not None
    assert run.items == [Item(0, 0, 0), *(Item(1, 0, number) for number in range(3))]
