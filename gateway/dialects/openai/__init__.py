"""OpenAI's dialect: chat, completions, and the list of models."""

from __future__ import annotations

from gateway.dialects.openai.dialect import DIALECT

__all__ = ["DIALECT"]
