"""Whose word a message is: what contradicts its subject or itself is told apart, for every kind that there is."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from common import messages, subjects
from common.messages import Cancel
from common.messages.arrivals import claimed_by, contradiction, speaker_of
from tests.unit.common.samples import sample

WORKER, OTHER = "decode-0", "decode-1"  # `sample` says the first in each text
HEARD = {
    subjects.gateway("g", WORKER): get_args(messages.ToGateway),
    subjects.frames("g", WORKER): (messages.Frame,),
    subjects.peer("w", WORKER): get_args(messages.FromPeer),
    subjects.order("w", WORKER): get_args(messages.FromGateway),
    subjects.plan("w", WORKER): (messages.SetRoles,),
    subjects.heartbeat(WORKER): (messages.WorkerState,),
    subjects.gateway_heartbeat(WORKER): (messages.GatewayState,),
    subjects.planner(WORKER): (messages.PlannerState,),
}
CASES = [(subject, kind) for subject, kinds in HEARD.items() for kind in kinds]
# An order is about what the speaker may order.
NAMELESS = (messages.SetRoles, messages.Drain)


def said(kind: type[Any]) -> msgspec.Struct:
    message: msgspec.Struct = sample(kind)
    return message


@pytest.mark.parametrize(("subject", "kind"), CASES)
def test_a_message_in_its_speakers_name_is_let_through(subject: str, kind: type[Any]) -> None:
    assert contradiction(subject, said(kind)) == ""


@pytest.mark.parametrize(("subject", "kind"), CASES)
def test_a_message_in_anothers_name_is_forged_whatever_its_kind(subject: str, kind: type[Any]) -> None:
    elsewhere = f"{subject.removesuffix(WORKER)}{OTHER}"
    assert speaker_of(elsewhere) == OTHER
    wrong = contradiction(elsewhere, said(kind))
    assert wrong == ("" if kind in NAMELESS else f"{OTHER} speaks as '{WORKER}'")


@pytest.mark.parametrize(
    "subject", [subjects.worker("w"), subjects.gateway("g"), subjects.frames("g"), subjects.PLANNER]
)
def test_the_first_releases_subjects_name_no_speaker(subject: str) -> None:
    assert speaker_of(subject) == ""


def test_a_cancel_of_a_peer_says_whose_lease_it_is_about() -> None:
    cancel = Cancel(request_id="r", attempt=1)
    assert contradiction(subjects.peer("w", WORKER), cancel) == "decode-0 ends a request without its name"
    assert contradiction(subjects.order("w", "gateway"), cancel) == "gateway ends a request without its name"


@pytest.mark.parametrize("name", ["", "a.b", "x" * 65, "a b", "*", ">"])
def test_a_name_that_could_widen_a_subject_is_nobodys(name: str) -> None:
    state = msgspec.structs.replace(said(messages.WorkerState), worker=name)
    assert claimed_by(state) == name
    assert contradiction("unnamed", state)


def test_a_heartbeat_whose_region_is_of_another_life_contradicts_itself() -> None:
    state = msgspec.structs.replace(said(messages.WorkerState), incarnation=8)
    assert contradiction(subjects.heartbeat(WORKER), state) == "its region is another incarnation's"
