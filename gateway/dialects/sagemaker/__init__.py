"""SageMaker's contract with a model's container: /ping and /invocations."""

from __future__ import annotations

from gateway.dialects.sagemaker.dialect import DIALECT

__all__ = ["DIALECT"]
