"""OpenAI's Responses API."""

from __future__ import annotations

from gateway.dialects.responses.dialect import DIALECT

__all__ = ["DIALECT"]
