"""Parts of TGI's answers, as plain dicts for the JSON encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.messages import TokenLogprobs
from common.words import Finish
from gateway.answers.choice import Piece, ScoredPrompt
from gateway.answers.detokenizer import Detokenizer
from gateway.answers.tokenizer import ChatTokenizer
from gateway.http.problem import Json

MIN_LOGPROB = -9999.0  # JSON has no infinity


def finish_reason(tokenizer: ChatTokenizer, finish: Finish, last_token: int | None) -> str:
    """TGI's word for the end of a text."""
    if finish != Finish.STOP:
        return "length"
    return "eos_token" if last_token in tokenizer.eos_ids else "stop_sequence"


class TokenTexts:
    """Each token of an answer with the text that it adds: the non-special ones, joined, are the answer's text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self.said = 0  # characters

    def token(self, token_id: int, logprob: float) -> Json:
        """The next token."""
        text = self._detokenizer.add(token_id)
        self.said += len(text)
        return _token(self._tokenizer, token_id, logprob, text)

    def last_token(self, token_id: int, logprob: float, text: str) -> Json:
        """The last token of an answer whose whole text this is: it gets the remaining text, up to a stop string."""
        rest = text[self.said :]
        self.said = len(text)
        return _token(self._tokenizer, token_id, logprob, rest)


def _token(tokenizer: ChatTokenizer, token_id: int, logprob: float, text: str) -> Json:
    special = token_id in tokenizer.special_ids or token_id in tokenizer.eos_ids
    shown = tokenizer.token_text(token_id) if special else text
    return {"id": token_id, "text": shown, "logprob": max(logprob, MIN_LOGPROB), "special": special}


def tokens_of(tokenizer: ChatTokenizer, piece: Piece) -> list[Json]:
    """The tokens of a whole answer."""
    texts, told = TokenTexts(tokenizer), list(zip(piece.token_ids, piece.logprobs, strict=False))
    found = [texts.token(token_id, entry.logprob) for token_id, entry in told[:-1]]
    return found + [texts.last_token(token_id, entry.logprob, piece.text) for token_id, entry in told[-1:]]


def top_tokens(tokenizer: ChatTokenizer, logprobs: TokenLogprobs) -> list[Json]:
    """The most likely tokens at one position."""
    likely = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    return [_token(tokenizer, token_id, value, tokenizer.token_text(token_id)) for token_id, value in likely]


def prefill_tokens(tokenizer: ChatTokenizer, prompt: ScoredPrompt | None) -> list[Json]:
    """A prompt's tokens; the first one has no logprob."""
    if prompt is None:
        return []
    first = prompt.token_ids[0]
    known = [(token_id, max(entry.logprob, MIN_LOGPROB)) for token_id, _, entry in prompt.entries()]
    return [
        {"id": token_id, "text": tokenizer.token_text(token_id), "logprob": value}
        for token_id, value in [(first, None), *known]
    ]


def simple_tokens(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], own: tuple[Sequence[int], Sequence[int]] = ((), ())
) -> Iterator[Json]:
    """Tokens with character offsets in the text. `own`: the special ones that the tokenizer adds around any text."""
    before, after = own
    detokenizer, at = Detokenizer(tokenizer, skip_special_tokens=False), 0
    yield from ({"id": token_id, "text": "", "start": 0, "stop": 0} for token_id in before)
    for token_id in token_ids:
        text = detokenizer.add(token_id)
        yield {"id": token_id, "text": text, "start": at, "stop": at + len(text)}
        at += len(text)
    yield from ({"id": token_id, "text": "", "start": 0, "stop": 0} for token_id in after)
