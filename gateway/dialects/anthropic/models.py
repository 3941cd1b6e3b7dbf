"""GET /v1/models in Anthropic's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from common.errors import InvalidRequestError
from gateway.answers.catalogue import ModelCard
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked
from gateway.http.problem import Json

MAX_LIMIT = 1_000
_USUAL_LIMIT = 20


def listed(answers: Answers, asked: Asked) -> Json:
    """A page of the served names. Raises InvalidRequestError."""
    limit = _limit(asked.query)
    cards = answers.models()
    after, before = asked.query.get("after_id"), asked.query.get("before_id")
    if before is not None:
        rest = cards[: _place(cards, before, "before_id")]
        page, has_more = rest[-limit:], len(rest) > limit
    else:
        rest = cards[_place(cards, after, "after_id") + 1 :] if after is not None else cards
        page, has_more = rest[:limit], len(rest) > limit
    return {
        "data": [_card(card) for card in page],
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
        "has_more": has_more,
    }


def one(answers: Answers, asked: Asked) -> Json:
    return _card(answers.model(asked.parameters["model"]))


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", str(_USUAL_LIMIT))
    if not (text.isascii() and text.isdecimal() and len(text) < 5 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequestError(f"limit: must be 1 to {MAX_LIMIT}", param="limit")
    return int(text)


def _place(cards: Sequence[ModelCard], name: str, field: str) -> int:
    places = [place for place, card in enumerate(cards) if card.name == name]
    if not places:
        raise InvalidRequestError(f"{field}: no model has this id", param=field)
    return places[0]


def _card(card: ModelCard) -> Json:
    created = datetime.fromtimestamp(card.created, UTC)
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
    }
