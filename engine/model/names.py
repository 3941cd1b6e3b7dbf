"""The names of a checkpoint's tensors, theirs and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """Where a checkpoint keeps the tensors that we call `model.layers.0…`, `lm_head…`."""

    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # beginning of a name -> ours
    ignored: tuple[str, ...] = ()  # beginnings of the names of what is not computed

    def ours(self, name: str) -> str | None:
        """Our name of a tensor; None: it is not computed."""
        if name.startswith(self.ignored):
            return None
        for theirs, ours in self.renamed.items():
            if name.startswith(theirs):
                return ours + name[len(theirs) :]
        return name

    def theirs(self, name: str) -> list[str]:
        """All names that a checkpoint may have for what we call so, ours first."""
        renamed = [theirs + name[len(ours) :] for theirs, ours in self.renamed.items() if name.startswith(ours)]
        return [name, *renamed]


AS_OURS = StoredNames()
