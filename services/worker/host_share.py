"""The memory of the host tier, as `--kv-host-mb` gives it, and where it leaves that open."""

from __future__ import annotations

from dataclasses import dataclass

# Share of the memory that is free at the start. The rest is for weights, file caches and others.
HOST_SHARE = 0.5
AUTO, SHARED = "auto", ":shared"


@dataclass(frozen=True, slots=True)
class HostMB:
    """MiB for each worker, or one region of all that serve the model on a host; None: a share of what is free."""

    mb: int | None
    is_shared: bool = False

    @classmethod
    def parse(cls, text: str) -> HostMB:
        """Read `MB`, `auto`, `MB:shared` or `auto:shared`. Raises ValueError."""
        size = text.removesuffix(SHARED)
        if size != AUTO and not size.isdecimal():
            raise ValueError(
                f"a number of MiB or auto is needed, with {SHARED} behind it for one memory of all workers"
            )
        if size.strip("0") == "" and size != text:
            raise ValueError(f"{text} shares no memory: give its MiB, or auto, before {SHARED}, or 0, not {text!r}")
        return cls(None if size == AUTO else int(size), size != text)

    def resolved(self, *, num_workers: int = 1, free_bytes: int | None = None) -> int:
        """The MiB asked for, or part of a share of the free memory: a region takes all of it, so many workers a part each."""
        if self.mb is not None:
            return self.mb
        if free_bytes is None:
            from services.runtime.checks.memory import available_bytes  # it knows models' weights, too

            free_bytes = available_bytes() or 0
        return int(HOST_SHARE * free_bytes / (1 if self.is_shared else max(1, num_workers))) >> 20

    def shared_out(self, num_workers: int) -> str:
        """The setting of each worker of one `up`."""
        each = self.resolved(num_workers=num_workers)
        return f"{each}{SHARED if self.is_shared and each else ''}"
