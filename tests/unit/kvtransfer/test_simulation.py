"""Sender and LeaseTable hand requests over through a channel that loses, delays, reorders and repeats messages.

Virtual time, one seed a run, the real classes. Writes are one-sided, as through shared memory: the receiver can't refuse
them, and they land whenever they like until their push is over. Writers are killed and cut off; requests are cancelled. Held
against every run: no write lands in a block that is not its lease's, no sequence starts on bytes that are not its own, every
request ends, and at the end every block is free.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from common.blocks import pack_tokens
from common.errors import HandoffRefusedError
from common.messages import ReserveReply
from common.words import Refusal
from kvtransfer.lease import Lease, LeaseState, LeaseTable
from kvtransfer.plan import Cargo
from kvtransfer.sender import Run, Sender, SenderState

NUM_BLOCKS, BLOCK_SIZE = 10, 4
LEASE_S = 1.5
GIVE_UP_S = 3.0  # a request's deadline
AGAIN_S = 0.1
FENCE_S = 1.0  # from a writer's death until the receiver is sure of it
Stamp = tuple[str, int, int]  # request, attempt, index of the block in its prompt


class World:
    """The clock, the channel, and who is in it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.faults: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.loss = self.random.choice([0.0, 0.1, 0.3])
        self.repeats = self.random.choice([0.0, 0.2])
        self.slowest = self.random.choice([0.02, 0.3])
        self.receiver = Receiver(self)
        self.writers: list[Writer] = []

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), action))

    def send(self, handle: Callable[[Any], None], message: Any) -> None:
        """Deliver never, once or twice, some time."""
        copies = 1 + (self.random.random() < self.repeats)
        self.faults["repeated"] += copies - 1
        for _ in range(copies):
            if self.random.random() < self.loss:
                self.faults["lost"] += 1
            else:
                self.at(self.random.uniform(0.001, self.slowest), lambda: handle(message))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()


@dataclass(frozen=True)
class Message:
    kind: str
    writer: Writer
    request: str
    attempt: int
    lease: tuple[int, int] = (0, 0)
    num_tokens: int = 0
    digests: bytes = b""


class Receiver:
    """A decode worker's intake without its I/O: real table, a pool of stamps instead of KV."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.table = LeaseTable(incarnation=1 << 40)
        self.free = set(range(NUM_BLOCKS))
        self.content: list[Stamp | None] = [None] * NUM_BLOCKS
        self.leases: dict[int, tuple[Lease, Writer, ReserveReply]] = {}
        self.verdicts: dict[tuple[int, int], str] = {}
        self.accepted: list[tuple[str, int]] = []
        world.at(AGAIN_S, self.look_after_leases)

    def handle(self, message: Message) -> None:
        writer, answer = message.writer, {"reserve": self.reserve, "handoff": self.hand_over}.get(message.kind)
        if answer is not None:
            self.world.send(writer.replied, (message, answer(message)))
        elif message.kind == "writer_done":
            freed = self.table.writer_done(
                lease_id=message.lease[0], generation=message.lease[1], writer_incarnation=writer.incarnation
            )
            self.give_back(freed)
        elif self.table.cancel(self.world.now, message.request, message.attempt) is not None:
            self.world.faults["cancelled"] += 1

    def reserve(self, message: Message) -> ReserveReply:
        num_blocks = -(-message.num_tokens // BLOCK_SIZE)
        if num_blocks > len(self.free):
            self.world.faults["full"] += 1
            return ReserveReply(granted=False, reason=Refusal.FULL)
        blocks = self.world.random.sample(sorted(self.free), num_blocks)
        try:
            lease = self.table.reserve(
                self.world.now,
                request_id=message.request,
                attempt=message.attempt,
                writer=message.writer.name,
                writer_incarnation=message.writer.incarnation,
                blocks=blocks,
                expires_at=self.world.now + LEASE_S,
            )
        except HandoffRefusedError as error:
            return ReserveReply(granted=False, reason=error.refusal)
        if lease.lease_id not in self.leases:
            self.free -= set(blocks)
            reply = ReserveReply(
                granted=True,
                lease_id=lease.lease_id,
                generation=lease.generation,
                destination_blocks=pack_tokens(blocks),
            )
            self.leases[lease.lease_id] = (lease, message.writer, reply)
        return self.leases[lease.lease_id][2]

    def land(self, lease_id: int, block: int, stamp: Stamp) -> None:
        """A write lands: one-sided, whoever the block belongs to now."""
        lease = self.leases[lease_id][0]
        assert block in lease.blocks
        assert lease.state in (LeaseState.RESERVED, LeaseState.QUARANTINED), "a write landed after the lease's end"
        assert block not in self.free
        self.content[block] = stamp

    def hand_over(self, message: Message) -> str:
        if message.lease in self.verdicts:
            return self.verdicts[message.lease]
        try:
            lease = self.table.begin_verify(
                self.world.now,
                lease_id=message.lease[0],
                generation=message.lease[1],
                request_id=message.request,
                attempt=message.attempt,
                writer=message.writer.name,
                writer_incarnation=message.writer.incarnation,
            )
        except HandoffRefusedError as error:
            return error.message
        stamps: list[Stamp] = [(message.request, message.attempt, index) for index in range(len(lease.blocks))]
        assert [self.content[block] for block in lease.blocks] == stamps, "the manifest lies"
        if message.digests == digests_of(stamps):
            blocks = self.table.accept(lease.lease_id)
            self.accepted.append((message.request, message.attempt))
            self.world.at(self.world.random.uniform(0.05, 0.5), lambda: self.give_back(blocks))
            verdict = "accepted"
        else:
            self.give_back(self.table.reject(lease.lease_id))
            verdict = "digest"
        self.verdicts[message.lease] = verdict
        return verdict

    def look_after_leases(self) -> None:
        self.table.expire(self.world.now)
        for lease, writer, _ in self.leases.values():
            if lease.state is LeaseState.QUARANTINED:
                self.world.send(
                    writer.lease_aborted, (lease.request_id, lease.attempt, lease.lease_id, lease.generation)
                )
        self.world.at(AGAIN_S, self.look_after_leases)

    def fence(self, writer: str, incarnation: int) -> None:
        """The writer's process is gone, as `Intake` learns from its transport: each of its leases ends."""
        for lease, _, _ in self.leases.values():
            if (lease.writer, lease.writer_incarnation) == (writer, incarnation):
                freed = self.table.writer_done(
                    lease_id=lease.lease_id, generation=lease.generation, writer_incarnation=incarnation
                )
                self.give_back(freed)

    def give_back(self, blocks: list[int]) -> None:
        assert self.free.isdisjoint(blocks)
        self.free |= set(blocks)


@dataclass(eq=False)
class Handoff:
    """One request at its writer."""

    request: str
    attempt: int
    num_tokens: int
    sender: Sender
    lease: tuple[int, int] | None = None
    computed: int = 0
    in_flight: int = 0  # blocks of the run that have not landed
    over: str = ""

    def is_pushing(self) -> bool:
        return self.in_flight > 0


class Writer:
    """A prefill worker's handoffs without their I/O: real senders."""

    def __init__(self, world: World, name: str, incarnation: int) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.alive = True
        self.handoffs: dict[tuple[str, int], Handoff] = {}

    def start(self, request: str, attempt: int, num_tokens: int) -> None:
        if self.alive:
            sender = Sender(Cargo(num_tokens=num_tokens, block_size=BLOCK_SIZE))
            handoff = self.handoffs[request, attempt] = Handoff(request, attempt, num_tokens, sender)
            self.world.at(GIVE_UP_S, lambda: self.give_up(handoff, "deadline"))
            self.compute(handoff)
            self.advance(handoff)

    def kill(self) -> None:
        """No write of it lands after this; the receiver learns of it later."""
        self.alive = False
        for handoff in self.handoffs.values():
            handoff.over = handoff.over or "killed"
        receiver = self.world.receiver
        self.world.at(FENCE_S, lambda: receiver.fence(self.name, self.incarnation))

    def compute(self, handoff: Handoff) -> None:
        if handoff.computed < handoff.num_tokens and not handoff.over:
            handoff.computed += min(self.world.random.randint(1, 7), handoff.num_tokens - handoff.computed)
            handoff.sender.computed(handoff.computed)
            self.world.at(0.02, lambda: self.compute(handoff))

    def advance(self, handoff: Handoff) -> None:
        """What `prefill.handoff` does, again and again until the request is over here."""
        if handoff.over or not self.alive:
            return
        run = handoff.sender.next_run()
        if handoff.sender.state is SenderState.COMPUTING:
            self.tell("reserve", handoff)
        elif run is not None:
            self.push(handoff, run)
        elif handoff.sender.manifest() is not None:
            self.tell("handoff", handoff, digests=handoff.sender.manifest() or b"")
        self.world.at(AGAIN_S, lambda: self.advance(handoff))

    def push(self, handoff: Handoff, run: Run) -> None:
        assert handoff.lease is not None
        handoff.in_flight = len(run.items)
        for index, block in zip([item.entry for item in run.items], run.destination_blocks, strict=True):
            delay = self.world.random.uniform(0.0, self.world.random.choice([0.01, 2 * LEASE_S]))
            self.world.at(delay, lambda index=index, block=block: self.landed(handoff, run, index, block))  # type: ignore[misc]

    def landed(self, handoff: Handoff, run: Run, index: int, block: int) -> None:
        if not self.alive or handoff.lease is None:
            return
        self.world.receiver.land(handoff.lease[0], block, (handoff.request, handoff.attempt, index))
        handoff.in_flight -= 1
        if handoff.in_flight == 0:
            stamps: list[Stamp] = [(handoff.request, handoff.attempt, each.entry) for each in run.items]
            handoff.sender.pushed(run, digests_of(stamps))
            if handoff.over:
                self.say_goodbye(handoff, handoff.lease)

    def replied(self, answer: tuple[Message, ReserveReply | str]) -> None:
        message, reply = answer
        handoff = self.handoffs.get((message.request, message.attempt))
        if handoff is None or not self.alive:
            return
        if isinstance(reply, ReserveReply):
            if reply.granted and handoff.sender.state is SenderState.COMPUTING and not handoff.over:
                handoff.lease = (reply.lease_id, reply.generation)
                handoff.sender.reserved(reply)
        elif handoff.over or handoff.lease != message.lease:
            return
        elif reply == "accepted":
            handoff.sender.handed_off()
            handoff.over = "handed off"
        else:
            self.give_up(handoff, reply)

    def lease_aborted(self, lease: tuple[str, int, int, int]) -> None:
        """Any abort ends the attempt, also of a lease that it doesn't know: its grant may still be on the way."""
        request, attempt, lease_id, generation = lease
        handoff = self.handoffs.get((request, attempt))
        if handoff is not None and self.alive:
            self.give_up(handoff, "aborted")
            self.say_goodbye(handoff, (lease_id, generation))

    def give_up(self, handoff: Handoff, reason: str) -> None:
        if not handoff.over:
            handoff.over = reason
            handoff.sender.abort()
            if handoff.lease is not None:
                self.say_goodbye(handoff, handoff.lease)

    def say_goodbye(self, handoff: Handoff, lease: tuple[int, int]) -> None:
        """Only when no write under this lease is in flight. Lost: the receiver asks again."""
        if handoff.lease != lease or not handoff.is_pushing():
            self.tell("writer_done", handoff, lease=lease)

    def tell(self, kind: str, handoff: Handoff, *, digests: bytes = b"", lease: tuple[int, int] | None = None) -> None:
        message = Message(
            kind,
            self,
            handoff.request,
            handoff.attempt,
            lease=lease or handoff.lease or (0, 0),
            num_tokens=handoff.num_tokens,
            digests=digests,
        )
        self.world.send(self.world.receiver.handle, message)


def digests_of(stamps: list[Stamp]) -> bytes:
    return b"".join(f"{request[-1]}{attempt % 10}{index:06d}".encode() for request, attempt, index in stamps)


def play(seed: int) -> World:
    world = World(seed)
    dice = world.random
    for name in ("p", "q"):
        world.writers += [Writer(world, name, incarnation) for incarnation in (1, 2)]
    for number in range(8):
        request, num_tokens, start = f"r{number}", dice.randint(1, 4 * BLOCK_SIZE), dice.uniform(0, 2)
        for attempt in range(1, dice.choice([2, 2, 3])):
            writer = dice.choice(world.writers)
            begin = lambda w=writer, r=request, a=attempt, n=num_tokens: w.start(r, a, n)  # noqa: E731
            world.at(start + (attempt - 1) * dice.uniform(0.0, 1.0), begin)
            if dice.random() < 0.3:
                cancel = Message("cancel", writer, request, attempt)
                world.at(start + dice.uniform(0, 2), lambda m=cancel: world.send(world.receiver.handle, m))  # type: ignore[misc]
    for writer in world.writers:
        if dice.random() < 0.4:
            world.at(dice.uniform(0, 3), writer.kill)
    world.run(until=60.0)
    return world


def check(world: World) -> None:
    """What must hold when everything is quiet; what must hold before is asserted where it happens."""
    handoffs = [handoff for writer in world.writers for handoff in writer.handoffs.values()]
    assert all(handoff.over for handoff in handoffs), "a request never ended"
    assert world.receiver.table.held_blocks == 0
    assert world.receiver.free == set(range(NUM_BLOCKS)), "blocks leaked"
    assert len(set(world.receiver.accepted)) == len(world.receiver.accepted), "accepted twice"


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("batch", [*range(2), *(pytest.param(one, marks=pytest.mark.long) for one in range(2, 20))])
def test_every_request_ends_and_no_write_lands_in_somebody_elses_block(batch: int) -> None:
    """10,000 seeds in all."""
    ends: Counter[str] = Counter()
    for seed in range(batch * 500, batch * 500 + 500):
        try:
            world = play(seed)
            check(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        ends += world.faults
        ends["accepted"] += len(world.receiver.accepted)
        ends.update(handoff.over for writer in world.writers for handoff in writer.handoffs.values())
    wanted = {"lost", "repeated", "accepted", "handed off", "killed", "aborted", "deadline", "cancelled", "full"}
    assert {name for name in wanted if ends[name] < 100} == set()  # the simulation is worth its name


def free_by_time_alone(patch: pytest.MonkeyPatch) -> None:
    """Blocks of an expired lease go back while a write may be on its way."""
    look = Receiver.look_after_leases

    def too_early(self: Receiver) -> None:
        for lease in self.table.expire(self.world.now):
            self.give_back(
                self.table.writer_done(
                    lease_id=lease.lease_id,
                    generation=lease.generation,
                    writer_incarnation=lease.writer_incarnation,
                )
            )
        look(self)

    patch.setattr(Receiver, "look_after_leases", too_early)


def manifest_before_the_last_push(patch: pytest.MonkeyPatch) -> None:
    """The writer vouches for blocks that are still on their way."""
    full = Sender._complete_if_done

    def too_early(self: Sender) -> None:
        full(self)
        if self.state is SenderState.STREAMING and self._num_pushed:
            missing = len(self._destinations) - self._num_pushed
            self._digests += bytes(8 * missing)
            self._move(SenderState.COMPLETE)

    patch.setattr(Sender, "_complete_if_done", too_early)


def goodbye_ignored(patch: pytest.MonkeyPatch) -> None:
    """The receiver never takes a writer's word that it is through."""
    patch.setattr(LeaseTable, "writer_done", lambda self, **_: [])


def goodbye_with_writes_in_flight(patch: pytest.MonkeyPatch) -> None:
    """The writer gives a lease up before its push is over."""
    patch.setattr(Handoff, "is_pushing", lambda self: False)


def accepted_again(patch: pytest.MonkeyPatch) -> None:
    """A manifest that comes twice is judged twice."""
    patch.setattr(LeaseTable, "accept", lambda self, lease_id: list(self._leases[lease_id].blocks))


@pytest.mark.parametrize(
    "plant",
    [
        free_by_time_alone,
        manifest_before_the_last_push,
        goodbye_ignored,
        goodbye_with_writes_in_flight,
        accepted_again,
    ],
)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(300):
        try:
            check(play(seed))
        except (AssertionError, RuntimeError):
            return
    raise AssertionError("300 seeds found nothing")


def test_the_same_seed_is_the_same_run() -> None:
    first, second = play(7), play(7)

    assert first.receiver.accepted == second.receiver.accepted
    assert first.receiver.content == second.receiver.content
