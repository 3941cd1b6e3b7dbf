"""The client's predicted text is drafted from the answer's first token on."""

from __future__ import annotations

import pytest

from decode.drafts import own
from decode.drafts.settings import LookupSettings
from decode.drafts.suffix import Lookup
from engine.sequence import Sequence
from tests.unit.decode.drafts.lookups import sequence_of

PREDICTION = [*range(100, 160)]


def predicted(answer: list[int], prompt: list[int] | None = None, prediction: list[int] = PREDICTION) -> Sequence:
    prompt = prompt or [1, 2, 3, 4]
    sequence = sequence_of([*prompt, *answer], prompt=len(prompt))
    sequence.prediction = list(prediction)
    return sequence


@pytest.mark.parametrize("known", range(6))
def test_an_answer_that_begins_as_predicted_goes_on_so(known: int) -> None:
    lookup = Lookup(LookupSettings())
    assert lookup.draft(predicted(PREDICTION[:known]), 3) == PREDICTION[known : known + 3]


def test_it_goes_on_behind_a_place_that_differs() -> None:
    lookup = Lookup(LookupSettings())
    answer = [*PREDICTION[:10], 7, 8, 9]
    assert lookup.draft(predicted(answer), 4) == []
    assert lookup.draft(predicted([*answer, *PREDICTION[20:23]]), 4) == PREDICTION[23:26]


def test_another_beginning_drafts_nothing_of_it() -> None:
    lookup = Lookup(LookupSettings())
    assert lookup.draft(predicted([7]), 4) == []
    assert lookup.draft(predicted(PREDICTION, prediction=PREDICTION[:2]), 4) == []


def test_its_end_is_no_beginning_of_the_prompt() -> None:
    lookup = Lookup(LookupSettings())
    assert lookup.draft(predicted(PREDICTION), 4) == []
    assert lookup.draft(predicted(PREDICTION[:58]), 4) == PREDICTION[58:]


def test_a_long_prediction_is_indexed_in_slices_before_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "SLICE", 25)
    lookup = Lookup(LookupSettings())
    sequence = predicted([5, *PREDICTION[40:44]], prompt=[*range(200, 250)])
    assert [bool(lookup.draft(sequence, 2)) for _ in range(4)] == [False, True, True, True]
    sequence.token_ids += [210, 211, 212]
    assert [lookup.draft(sequence, 2) for _ in range(3)][-1] == [213, 214]
