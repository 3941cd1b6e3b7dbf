"""The dialect of text-generation-inference: `inputs` and `parameters` in, `generated_text` out."""

from __future__ import annotations

from gateway.dialects.tgi.dialect import DIALECT

__all__ = ["DIALECT"]
