"""The decision table for silent requests, without I/O or a clock.

docs/failures.md shows the same table; a test holds the two equal. The first rule that applies decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gateway.request.ends import End
from gateway.request.state import Phase

ANY_PHASE = tuple(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Timeouts in seconds for each kind of silence."""

    gap_resend_s: float = 0.2
    gap_lost_s: float = 5.0  # nobody has the missing frame
    decoding_s: float = 0.75
    handoff_s: float = 15.0
    prefilled_s: float = 0.5
    claimed_s: float = 2.0
    unclaimed_s: float = 10.0
    job_check_s: float = 5.0


class Measure(Enum):
    """The kind of silence that a rule measures."""

    GAP = "a frame is missing"
    PROGRESS = "no progress"
    WORD = "no progress, and no worker said that it has the request"


class Need(Enum):
    """An additional condition."""

    NOTHING = ""
    ANOTHER_PREFILLER = "another worker prefills; twice as long after each attempt"
    QUEUED_JOB = "the job was queued"


class Action(Enum):
    """The gateway's reaction."""

    WAIT = "wait"
    ASK_DECODER = "ask the decode worker"
    ASK_CLAIMER = "ask the worker that claimed it"
    LOOK_FOR_JOB = "look whether the job is still queued"
    MOVE = "start another attempt"
    MOVE_ELSEWHERE = "start another attempt, not on the same worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table."""

    phases: tuple[Phase, ...]
    measure: Measure
    longer_than_s: float
    need: Need = Need.NOTHING
    doubles: bool = False  # doubled after each fruitless attempt
    action: Action
    end: End | None = None  # how a move ends the attempt

    @property
    def why(self) -> str:
        """The reason of the move, in logs and timelines."""
        return self.end.text if self.end is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    phase: Phase
    progress_s: float  # since the current attempt was heard of
    known_s: float  # since a worker confirmed that it has the request
    gap_s: float = 0.0  # since a frame was found missing; 0: none
    fruitless: int = 1  # attempts without progress, this one included
    has_queued_job: bool = False
    has_other_prefiller: bool = False

    def lasts(self, measure: Measure) -> float:
        match measure:
            case Measure.GAP:
                return self.gap_s
            case Measure.PROGRESS:
                return self.progress_s
            case Measure.WORD:
                return min(self.progress_s, self.known_s)

    def meets(self, need: Need) -> bool:
        match need:
            case Need.NOTHING:
                return True
            case Need.ANOTHER_PREFILLER:
                return self.has_other_prefiller
            case Need.QUEUED_JOB:
                return self.has_queued_job


def rules(patience: Patience) -> tuple[Rule, ...]:
    """The table, in order of precedence."""
    return (
        Rule(
            phases=ANY_PHASE,
            measure=Measure.GAP,
            longer_than_s=patience.gap_lost_s,
            action=Action.MOVE,
            end=End.TOKENS_MISSING,
        ),
        Rule(
            phases=ANY_PHASE,
            measure=Measure.GAP,
            longer_than_s=patience.gap_resend_s,
            action=Action.ASK_DECODER,
        ),
        Rule(
            phases=(Phase.DECODING,),
            measure=Measure.PROGRESS,
            longer_than_s=patience.decoding_s,
            action=Action.ASK_DECODER,
        ),
        Rule(
            phases=(Phase.PREFILLED,),
            measure=Measure.PROGRESS,
            longer_than_s=patience.handoff_s,
            action=Action.MOVE,
            end=End.NOT_TAKEN_OVER,
        ),
        Rule(
            phases=(Phase.PREFILLED,),
            measure=Measure.WORD,
            longer_than_s=patience.prefilled_s,
            action=Action.ASK_CLAIMER,
        ),
        Rule(
            phases=(Phase.CLAIMED,),
            measure=Measure.WORD,
            longer_than_s=patience.claimed_s,
            action=Action.ASK_CLAIMER,
        ),
        Rule(
            phases=(Phase.QUEUED,),
            measure=Measure.PROGRESS,
            longer_than_s=patience.unclaimed_s,
            need=Need.ANOTHER_PREFILLER,
            doubles=True,
            action=Action.MOVE_ELSEWHERE,
            end=End.NOT_CLAIMED,
        ),
        Rule(
            phases=(Phase.QUEUED,),
            measure=Measure.WORD,
            longer_than_s=patience.job_check_s,
            need=Need.QUEUED_JOB,
            action=Action.LOOK_FOR_JOB,
        ),
    )


RULES = rules(Patience())


def diagnose(silence: Silence) -> tuple[Action, End | None]:
    """The action, and how a move ends the attempt."""
    for rule in RULES:
        if (
            silence.phase in rule.phases
            and silence.lasts(rule.measure)
            > rule.longer_than_s * (2.0 ** (silence.fruitless - 1) if rule.doubles else 1)
            and silence.meets(rule.need)
        ):
            return rule.action, rule.end
    return Action.WAIT, None
