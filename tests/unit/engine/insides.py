"""The modules of a layer, behind the calls that its halves are."""

from __future__ import annotations

from typing import Any

from engine.model.decoder import Layer


def parts_of(layer: Layer) -> list[Any]:
    """The mixer, the MLP and whatever else the halves call, in their order."""
    return [cell.cell_contents for half in layer.halves for cell in getattr(half, "__closure__", None) or ()]


def products_of(layer: Layer) -> dict[str, Any]:
    """The attributes of all of them, by name."""
    return {name: value for part in parts_of(layer) for name, value in getattr(part, "__dict__", {}).items()}
