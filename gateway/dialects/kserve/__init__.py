"""KServe's Open Inference Protocol over HTTP, with Triton's extensions."""

from __future__ import annotations

from gateway.dialects.kserve.dialect import DIALECT

__all__ = ["DIALECT"]
