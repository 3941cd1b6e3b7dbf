"""Paths of a dialect that are not supported here, with the reasons."""

from __future__ import annotations

from pydantic import ConfigDict

from common.errors import InvalidRequestError
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked
from gateway.http.fields import StrictFields
from gateway.http.problem import Json


class RefusedRequest(StrictFields):
    """Any body sent to an unsupported path."""

    model_config = ConfigDict(extra="allow")


class Refused:
    """A refused call, or view."""

    body = RefusedRequest

    def __init__(self, why: str, error: type[InvalidRequestError] = InvalidRequestError) -> None:
        self.why = why
        self._error = error

    async def answer(self, body: RefusedRequest, answers: Answers, asked: Asked) -> Json:
        """Raises `error`."""
        raise self._error(self.why)

    def view(self, answers: Answers, asked: Asked) -> Json:
        """Raises `error`."""
        raise self._error(self.why)
