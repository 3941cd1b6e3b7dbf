"""The tokens of a sequence that it drafts from: the client's prediction, the prompt, the answer."""

from __future__ import annotations

from decode.drafts.occurrences import Occurrences
from decode.drafts.settings import MatchLengths
from engine.sequence import Sequence

SLICE = 4096  # tokens that a call indexes at most
MOST_ANSWER_SLOTS = 32_768  # an index is made for this many generated tokens at most


class OwnTokens:
    """The index of a sequence's own tokens: its prediction is one text, prompt and answer are another."""

    def __init__(self, sequence: Sequence, lengths: MatchLengths) -> None:
        self._least = lengths.least
        self._prediction: list[int] = sequence.prediction
        answer = min(sequence.sampling.max_tokens, MOST_ANSWER_SLOTS)
        capacity = len(self._prediction) + sequence.num_prompt_tokens + answer
        self.occurrences = Occurrences(lengths, capacity=capacity)
        self._offset = len(self._prediction) + 1 if self._prediction else 0  # where the prompt begins in the index
        self.matched = 0  # tokens of the last match

    def catch_up(self, sequence: Sequence) -> None:
        """Index the next slice, the prediction first."""
        known = len(self.occurrences)
        if known < self._offset:
            self.occurrences.extend(self._prediction[known : known + SLICE])
            if len(self.occurrences) == len(self._prediction):
                self.occurrences.end()
        elif known - self._offset < len(sequence.token_ids):
            known -= self._offset
            self.occurrences.extend(sequence.token_ids[known : known + SLICE])

    def foretold(self, sequence: Sequence) -> list[int] | None:
        """The prediction's rest while the answer is its beginning, and too short for a match; None otherwise."""
        num_generated = sequence.num_generated
        if num_generated >= self._least or num_generated >= len(self._prediction):
            return None
        generated = sequence.token_ids[sequence.num_prompt_tokens :]
        return self._prediction[num_generated:] if self._prediction[:num_generated] == generated else None
