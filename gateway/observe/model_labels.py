"""The `model_name` label: only names of served models, whatever clients ask for."""

from __future__ import annotations

from collections.abc import Sequence


class ModelLabels:
    """Label values of at least one model."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    @property
    def first(self) -> str:
        """The label of figures without a model."""
        return self.names[0]

    def of(self, model: str) -> str:
        """The label of a model; the first one's for unknown names."""
        return model if model in self.names else self.first
