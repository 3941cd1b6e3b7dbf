"""An error response as text for people."""

from __future__ import annotations

import json

from common.log import printable

MAX_SAID = 300  # characters


def message_of(body: bytes) -> str:
    """The message in an error body: OpenAI's form, FastAPI's, or plain text, on one line."""
    try:
        found = json.loads(body)
        error = found.get("error", found)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail") or ""
    except (ValueError, AttributeError):
        text = body.decode(errors="replace")
    return printable(" ".join(str(text).split()))[:MAX_SAID]
