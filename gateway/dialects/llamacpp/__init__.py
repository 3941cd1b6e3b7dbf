"""llama.cpp's dialect: completion, infill, and views of the server."""

from __future__ import annotations

from gateway.dialects.llamacpp.dialect import DIALECT

__all__ = ["DIALECT"]
