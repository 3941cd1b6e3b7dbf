"""The formats of a checkpoint's modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.formats.dense import DENSE
from engine.formats.patterns import begins
from engine.formats.product import Format
from engine.formats.tables import PLAIN_TABLES, TableFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """Modules by whole names or whole parts of them between dots, or by regular expressions for beginnings of names."""

    named: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        return bool(self.named and self._is_named(name)) or any(begins(each, name) for each in self.patterns)

    def _is_named(self, name: str) -> bool:
        parts = name.split(".")
        ends = range(1, len(parts) + 1)
        return any(".".join(parts[begin:end]) in self.named for end in ends for begin in range(end))


EVERY = Modules(patterns=("",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The first group that has a module gives its format. One that is ignored, or in no group, is plain."""

    name: str = ""  # what people read, empty for plain weights
    groups: tuple[tuple[Modules, Format], ...] = ()
    ignored: Modules = Modules()
    table: TableFormat = PLAIN_TABLES  # keeps embeddings
    kv_cache: str = ""  # "fp8": the checkpoint has scales for keys and values

    def format_of(self, names: Iterable[str]) -> Format:
        """The format of one module, by all of its names."""
        names = list(names)
        if any(self.ignored.has(name) for name in names):
            return DENSE
        for modules, format in self.groups:
            if any(modules.has(name) for name in names):
                return format
        return DENSE


UNQUANTISED = Quantization()
