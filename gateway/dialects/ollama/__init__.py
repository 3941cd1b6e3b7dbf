"""Ollama's dialect: chat, generate, and views of models."""

from __future__ import annotations

from gateway.dialects.ollama.dialect import DIALECT

__all__ = ["DIALECT"]
