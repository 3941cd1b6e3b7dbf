# mypy: allow-untyped-calls
"""Whether launches with one key get one program: what each asks of Triton, by Triton's own look at its arguments."""

from __future__ import annotations

from typing import Any


class Keys:
    """Remembers what the first launch with each key asked for. A driver must be active, which may be faked."""

    def __init__(self) -> None:
        self._asked: dict[object, tuple[Any, str]] = {}  # by kernel and key

    def wrong(self, kernel: Any, variant: object, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
        """How this launch differs from the first one with its key; "" if it doesn't, or Triton looks for itself."""
        if variant is None:
            return ""
        function = kernel.function
        *_, binder = function.device_caches[0]
        named = {**kernel._options, **options, "debug": False, "instrumentation_mode": ""}
        _, asked, packed = binder(*arguments, **named)
        first = self._asked.setdefault((id(kernel), variant), (asked, str(packed)))
        if first == (asked, str(packed)):
            return ""
        pairs = zip(function.arg_names, first[0], asked, strict=True)
        apart = [f"{name}: {one}, then {other}" for name, one, other in pairs if one != other]
        return f"{function.__name__}: {', '.join(apart) or 'options'}"
