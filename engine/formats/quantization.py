"""The formats of a checkpoint's modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.formats.dense import DENSE, NO_MODULES, PLAIN_TABLES, PlainModules
from engine.formats.patterns import begins
from engine.formats.product import Format, TableFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """Modules by whole names, by whole parts of them between dots, or by regular expressions for prefixes."""

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
    """The format of a module is that of the first group with it. Ignored modules, and those in no group, are plain."""

    name: str = ""  # shown to people; empty for plain weights
    groups: tuple[tuple[Modules, Format], ...] = ()
    ignored: Modules = Modules()
    table: TableFormat = PLAIN_TABLES  # format of the embeddings
    in_tiles: bool = False  # groups become tiles
    in_halves: PlainModules = NO_MODULES  # modules that stay 16-bit floats, of those that are plain
    kv_cache: str = ""  # "auto" of `kv_cache_dtype`, if not the compute dtype

    def format_of(self, names: Iterable[str]) -> Format:
        """The format of a module, looked up by all of its names."""
        names = list(names)
        found = self._stored_format_of(names)
        return (self.in_halves.format_of(names) or DENSE) if found is DENSE else found

    def _stored_format_of(self, names: list[str]) -> Format:
        if any(self.ignored.has(name) for name in names):
            return DENSE
        for modules, format in self.groups:
            if any(modules.has(name) for name in names):
                return format
        return DENSE


UNQUANTISED = Quantization()
