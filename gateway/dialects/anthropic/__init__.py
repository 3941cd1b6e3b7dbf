"""Anthropic's dialect: messages, their count of tokens, and the list of models."""

from __future__ import annotations

from gateway.dialects.anthropic.dialect import DIALECT

__all__ = ["DIALECT"]
