"""The receiver's lease table: cases by name, then any order of events that Hypothesis can think of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import HandoffRefusedError
from common.words import Refusal
from kvtransfer.lease import MAX_TOMBSTONES, TOMBSTONE_S, Lease, LeaseState, LeaseTable
from tests.examples import examples

LEASE_S = 10.0


def reserve(table: LeaseTable, blocks: list[int], *, now: float = 0.0, **changes: Any) -> Lease:
    claim: dict[str, Any] = {"request_id": "r", "attempt": 1, "writer": "p", "writer_incarnation": 5}
    return table.reserve(now, **(claim | changes), blocks=blocks, expires_at=now + LEASE_S)


def begin_verify(table: LeaseTable, lease: Lease, *, now: float = 0.0, **changes: Any) -> Lease:
    claim: dict[str, Any] = {
        "lease_id": lease.lease_id,
        "generation": lease.generation,
        "request_id": lease.request_id,
        "attempt": lease.attempt,
        "writer": lease.writer,
        "writer_incarnation": lease.writer_incarnation,
    }
    return table.begin_verify(now, **(claim | changes))


def writer_done(table: LeaseTable, lease: Lease, **changes: Any) -> list[int]:
    claim: dict[str, Any] = {
        "lease_id": lease.lease_id,
        "generation": lease.generation,
        "writer_incarnation": lease.writer_incarnation,
    }
    return table.writer_done(**(claim | changes))


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable(incarnation=1000)


def test_an_accepted_lease_gives_its_blocks_to_the_sequence(table: LeaseTable) -> None:
    lease = reserve(table, [1, 2])
    begin_verify(table, lease)

    assert table.accept(lease.lease_id) == [1, 2]
    assert lease.state is LeaseState.ACCEPTED
    assert table.held_blocks == 0


def test_a_rejected_lease_gives_its_blocks_back(table: LeaseTable) -> None:
    lease = reserve(table, [1, 2])
    begin_verify(table, lease)

    assert table.reject(lease.lease_id) == [1, 2]
    assert table.held_blocks == 0


def test_reserving_again_returns_the_same_lease_and_takes_nothing(table: LeaseTable) -> None:
    lease = reserve(table, [1, 2])

    assert reserve(table, [3, 4]) is lease
    assert lease.blocks == [1, 2]
    assert table.held_blocks == 2


@pytest.mark.parametrize("changes", [{"attempt": 2}, {"writer": "q"}, {"writer_incarnation": 6}])
def test_a_newer_attempt_or_writer_supersedes_the_older_lease(table: LeaseTable, changes: dict[str, Any]) -> None:
    older = reserve(table, [1])

    newer = reserve(table, [2], **changes)

    assert (older.state, newer.state) == (LeaseState.QUARANTINED, LeaseState.RESERVED)
    assert table.held_blocks == 2  # the older writer may still write
    assert older.generation != newer.generation


def test_an_older_attempt_is_stale(table: LeaseTable) -> None:
    reserve(table, [1], attempt=2)

    with pytest.raises(HandoffRefusedError, match="stale"):
        reserve(table, [2], attempt=1)


def test_who_asks_while_an_earlier_manifest_is_checked_is_told_to_ask_again(table: LeaseTable) -> None:
    lease = reserve(table, [1], attempt=1)
    begin_verify(table, lease)

    with pytest.raises(HandoffRefusedError) as refused:
        reserve(table, [2], attempt=2)
    assert refused.value.refusal is Refusal.VERIFYING
    assert not refused.value.refusal.is_final
    table.reject(lease.lease_id)
    assert reserve(table, [2], attempt=2).state is LeaseState.RESERVED


@pytest.mark.parametrize(
    "changes",
    [
        {"lease_id": 99},
        {"generation": 99},
        {"request_id": "other"},
        {"attempt": 2},
        {"writer": "q"},
        {"writer_incarnation": 6},
    ],
)
def test_a_manifest_that_differs_in_anything_is_stale(table: LeaseTable, changes: dict[str, Any]) -> None:
    lease = reserve(table, [1])

    with pytest.raises(HandoffRefusedError, match="stale"):
        begin_verify(table, lease, **changes)
    assert lease.state is LeaseState.RESERVED


def test_a_late_manifest_is_expired_and_its_blocks_stay_in_quarantine(table: LeaseTable) -> None:
    lease = reserve(table, [1])

    with pytest.raises(HandoffRefusedError, match="expired"):
        begin_verify(table, lease, now=LEASE_S)
    assert lease.state is LeaseState.QUARANTINED
    assert writer_done(table, lease) == [1]


def test_a_renewed_lease_lasts_longer_and_an_ended_one_stays_ended(table: LeaseTable) -> None:
    lease = reserve(table, [1])

    table.renew(lease.lease_id, 3 * LEASE_S)
    table.renew(lease.lease_id, 2 * LEASE_S)  # an answer that came late

    assert table.expire(3 * LEASE_S - 1) == []
    assert table.expire(3 * LEASE_S) == [lease]
    table.renew(lease.lease_id, 9 * LEASE_S)
    table.renew(lease.lease_id + 1, 9 * LEASE_S)
    assert lease.state is LeaseState.QUARANTINED
    assert writer_done(table, lease) == [1]


def test_a_cancelled_attempt_is_refused_from_then_on_and_a_newer_one_is_not(table: LeaseTable) -> None:
    lease = reserve(table, [1])

    assert table.cancel(0.0, "r", 1) is lease
    assert table.cancel(0.0, "r", 1) is None

    with pytest.raises(HandoffRefusedError, match="cancelled"):
        begin_verify(table, lease)
    with pytest.raises(HandoffRefusedError, match="cancelled"):
        reserve(table, [2])
    assert reserve(table, [2], attempt=2).state is LeaseState.RESERVED


def test_time_alone_frees_nothing(table: LeaseTable) -> None:
    lease = reserve(table, [1, 2])

    assert table.expire(LEASE_S) == [lease]
    assert table.expire(1e9) == []

    assert table.held_blocks == 2
    assert writer_done(table, lease, generation=lease.generation + 1) == []
    assert writer_done(table, lease, writer_incarnation=6) == []
    assert writer_done(table, lease) == [1, 2]
    assert writer_done(table, lease) == []


def test_a_lease_that_its_writer_does_not_know_waits_for_its_writer_too(table: LeaseTable) -> None:
    lease = reserve(table, [1, 2])

    assert table.give_up(lease.lease_id)
    assert not table.give_up(lease.lease_id)
    assert not table.give_up(lease.lease_id + 1)

    assert table.held_blocks == 2
    with pytest.raises(HandoffRefusedError, match="expired"):
        begin_verify(table, lease)
    assert writer_done(table, lease) == [1, 2]


def test_a_lease_that_is_verified_is_not_given_up(table: LeaseTable) -> None:
    lease = reserve(table, [1])
    begin_verify(table, lease)

    assert not table.give_up(lease.lease_id)

    assert table.accept(lease.lease_id) == [1]


def test_a_writer_that_is_gone_frees_open_and_quarantined_leases_but_not_one_that_is_verified(
    table: LeaseTable,
) -> None:
    cancelled, opened = reserve(table, [1], request_id="a"), reserve(table, [2], request_id="b")
    table.cancel(0.0, "a", 1)
    verified = begin_verify(table, reserve(table, [3], request_id="c"))

    assert [writer_done(table, lease) for lease in (cancelled, opened, verified)] == [[1], [2], []]
    assert [lease.state for lease in (cancelled, opened)] == [LeaseState.RELEASED, LeaseState.RELEASED]
    assert verified.state is LeaseState.VERIFYING
    assert table.held_blocks == 1


def test_a_manifest_is_not_undone_by_its_writers_goodbye(table: LeaseTable) -> None:
    lease = reserve(table, [1])
    begin_verify(table, lease)

    assert writer_done(table, lease) == []
    assert table.accept(lease.lease_id) == [1]


def test_a_cancellation_during_the_verification_is_remembered(table: LeaseTable) -> None:
    lease = reserve(table, [1])
    begin_verify(table, lease)

    assert table.cancel(0.0, "r", 1) is lease
    assert lease.cancelled


def test_tombstones_are_bounded_in_number_and_age(table: LeaseTable) -> None:
    for index in range(MAX_TOMBSTONES + 1):
        table.cancel(0.0, f"r{index}", 1)

    assert reserve(table, [1], request_id="r0")  # forgotten: the oldest
    with pytest.raises(HandoffRefusedError):
        reserve(table, [2], request_id="r1")
    table.cancel(TOMBSTONE_S + 1, "new", 1)
    assert reserve(table, [2], request_id="r1")


def test_generations_of_two_incarnations_differ() -> None:
    first, second = LeaseTable(incarnation=1000), LeaseTable(incarnation=1001)

    old, new = reserve(first, [1]), reserve(second, [1])

    assert old.lease_id == new.lease_id
    with pytest.raises(HandoffRefusedError, match="stale"):
        begin_verify(second, new, generation=old.generation)


requests = st.sampled_from(["a", "b"])
attempts = st.integers(1, 3)
writers = st.sampled_from([("p", 1), ("p", 2), ("q", 1)])
picks = st.integers(0, 10**6)


class AnyOrder(RuleBasedStateMachine):
    """Against a model that knows of every lease ever made whether its writer may still write."""

    @initialize()
    def start(self) -> None:
        self.table = LeaseTable(incarnation=77)
        self.now = 0.0
        self.free = set(range(12))
        self.leases: list[Lease] = []
        self.writing: dict[int, frozenset[int]] = {}  # lease id -> blocks that its writer may still write into
        self.serving: set[int] = set()  # blocks of accepted sequences
        self.cancelled: dict[str, int] = {}

    def give_back(self, blocks: list[int]) -> None:
        assert len(set(blocks)) == len(blocks)
        assert self.free.isdisjoint(blocks)
        for held in self.writing.values():
            assert held.isdisjoint(blocks)
        self.free |= set(blocks)

    def pick(self, number: int) -> Lease:
        return self.leases[number % len(self.leases)]

    @precondition(lambda self: len(self.free) >= 2)
    @rule(request=requests, attempt=attempts, writer=writers)
    def reserve(self, request: str, attempt: int, writer: tuple[str, int]) -> None:
        blocks = sorted(self.free)[:2]
        try:
            lease = self.table.reserve(
                self.now,
                request_id=request,
                attempt=attempt,
                writer=writer[0],
                writer_incarnation=writer[1],
                blocks=blocks,
                expires_at=self.now + LEASE_S,
            )
        except HandoffRefusedError:
            return
        assert attempt > self.cancelled.get(request, 0)
        if lease not in self.leases:
            assert lease.blocks == blocks
            self.leases.append(lease)
            self.free -= set(blocks)
            self.writing[lease.lease_id] = frozenset(blocks)

    @precondition(lambda self: self.leases)
    @rule(number=picks, wrong=st.sampled_from(["", "", "", "generation", "attempt", "writer_incarnation"]))
    def manifest(self, number: int, wrong: str) -> None:
        lease = self.pick(number)
        may = lease.state is LeaseState.RESERVED and self.now < lease.expires_at and not wrong
        changes = {wrong: getattr(lease, wrong) + 1} if wrong else {}
        try:
            begin_verify(self.table, lease, now=self.now, **changes)
        except HandoffRefusedError:
            assert not may or lease.attempt <= self.cancelled.get(lease.request_id, 0)
            return
        assert may
        del self.writing[lease.lease_id]  # a manifest is sent when no write is in flight and none will follow

    @precondition(lambda self: any(lease.state is LeaseState.VERIFYING for lease in self.leases))
    @rule(number=picks, fits=st.booleans())
    def verdict(self, number: int, fits: bool) -> None:
        verifying = [lease for lease in self.leases if lease.state is LeaseState.VERIFYING]
        lease = verifying[number % len(verifying)]
        if fits and not lease.cancelled:
            self.serving |= set(self.table.accept(lease.lease_id))
        else:
            self.give_back(self.table.reject(lease.lease_id))

    @rule(request=requests, attempt=attempts)
    def cancel(self, request: str, attempt: int) -> None:
        self.table.cancel(self.now, request, attempt)
        self.cancelled[request] = max(attempt, self.cancelled.get(request, 0))

    @precondition(lambda self: self.leases)
    @rule(number=picks)
    def give_up(self, number: int) -> None:
        lease = self.pick(number)
        was_open = lease.state is LeaseState.RESERVED
        assert self.table.give_up(lease.lease_id) == was_open

    @precondition(lambda self: self.leases)
    @rule(number=picks, seconds=st.floats(0, 2 * LEASE_S))
    def renew(self, number: int, seconds: float) -> None:
        lease = self.pick(number)
        before, state = lease.expires_at, lease.state
        self.table.renew(lease.lease_id, self.now + seconds)
        lasts = max(before, self.now + seconds) if state is LeaseState.RESERVED else before
        assert (lease.state, lease.expires_at) == (state, lasts)

    @rule(seconds=st.floats(0, 2 * LEASE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.table.expire(self.now):
            assert lease.expires_at <= self.now

    @precondition(lambda self: self.leases)
    @rule(number=picks, wrong=st.sampled_from(["", "", "generation", "writer_incarnation"]))
    def goodbye(self, number: int, wrong: str) -> None:
        lease = self.pick(number)
        if wrong:
            assert writer_done(self.table, lease, **{wrong: getattr(lease, wrong) + 1}) == []
            return
        self.writing.pop(lease.lease_id, None)
        self.give_back(writer_done(self.table, lease))

    @rule(writer=writers)
    def fence(self, writer: tuple[str, int]) -> None:
        """The writer's process is gone: each of its leases ends."""
        for lease in self.leases:
            if (lease.writer, lease.writer_incarnation) == writer:
                self.writing.pop(lease.lease_id, None)
                self.give_back(writer_done(self.table, lease))

    @rule()
    def finish(self) -> None:
        self.free |= self.serving
        self.serving = set()

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        assert self.table.held_blocks + len(self.free) + len(self.serving) == 12

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.expire(self.now + 2 * LEASE_S)
        for lease in self.leases:
            if lease.state is LeaseState.VERIFYING:
                self.give_back(self.table.reject(lease.lease_id))
        for writer in (("p", 1), ("p", 2), ("q", 1)):
            self.fence(writer)
        assert self.table.held_blocks == 0
        ended = {LeaseState.ACCEPTED, LeaseState.RELEASED}
        assert {lease.state for lease in self.leases} <= ended


AnyOrder.TestCase.settings = examples(50, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase
