"""Ollama's dialect: chat, generate, and what its clients ask about models."""

from __future__ import annotations

from gateway.dialects.ollama.dialect import DIALECT

__all__ = ["DIALECT"]
