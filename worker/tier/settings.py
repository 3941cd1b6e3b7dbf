"""The tiers of a worker, as the operator asked for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The bytes of host memory for one worker or, shared, for all of a host that serve its model."""

    num_bytes: int
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """A directory for what host memory gives up, and the bytes that one worker may have there."""

    directory: Path
    num_bytes: int

    @classmethod
    def parse(cls, text: str) -> DiskSettings | None:
        """Read `DIRECTORY:MB`; None if it is empty. Raises ValueError."""
        directory, _, size = text.rpartition(":")
        if not text:
            return None
        if not directory or not size.isdecimal() or not int(size):
            raise ValueError(f"a DIRECTORY:MB is needed, such as /nvme/kv:200000, not {text!r}")
        return cls(Path(directory).expanduser().absolute(), int(size) << 20)
