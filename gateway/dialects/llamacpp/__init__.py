"""llama.cpp's own dialect: completion, infill, and what its clients ask about the server."""

from __future__ import annotations

from gateway.dialects.llamacpp.dialect import DIALECT

__all__ = ["DIALECT"]
