"""Default sampling parameters of a model, from its generation_config.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("baton.http")

# Names of `SamplingParams`; transformers and vLLM read the same file. Limits are the API's.
_BOUNDS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Return the defaults by name. Values that the API would refuse are dropped and logged."""
    found: dict[str, float] = {}
    for name, (least, most) in _BOUNDS.items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            log.warning(
                "model.default_ignored", extra={"field": f"generation_config.json: {name}", "value": str(value)[:40]}
            )
            continue
        # GGUF files store float32: 0.6, not 0.6000000238.
        found[name] = int(value) if name == "top_k" else round(float(value), 6)
    return found
