"""Anthropic's dialect: messages, token counts, and the list of models."""

from __future__ import annotations

from gateway.dialects.anthropic.dialect import DIALECT

__all__ = ["DIALECT"]
