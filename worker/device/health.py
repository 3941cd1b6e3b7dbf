"""The criteria of a broken device: its context is lost, passes keep failing, or a pass hangs."""

from __future__ import annotations

MAX_FAILED_PASSES = 3  # consecutive: no single request can be at fault


class DeviceHealth:
    """Tracks failures, and decides if the device is broken."""

    def __init__(self, *, step_timeout_s: float = 120.0) -> None:
        """`step_timeout_s`: longer passes count as hung."""
        self._step_timeout_s = step_timeout_s
        self._failures_in_a_row = 0
        self._lost = ""

    def passed(self) -> None:
        self._failures_in_a_row = 0

    def failed(self, error: Exception) -> None:
        self._failures_in_a_row += 1
        if _is_lost(error):
            self._lost = f"{type(error).__name__}: {error}".splitlines()[0]

    def problem(self, *, waited_s: float = 0.0) -> str:
        """Return why the device is broken; "" while it works. `waited_s`: duration of the current pass so far."""
        if self._lost:
            return self._lost
        if self._failures_in_a_row >= MAX_FAILED_PASSES:
            return f"{self._failures_in_a_row} passes in a row failed"
        return f"a pass takes {waited_s:.0f} s" if waited_s > self._step_timeout_s else ""


def _is_lost(error: Exception) -> bool:
    """True if every later pass will fail, too: most CUDA errors destroy the process's context."""
    return "CUDA error" in str(error)
