"""Contents of blocks for fake engines, besides plain keys and values."""

from __future__ import annotations

from common.pages import PagePart

HYBRIDS = {
    "keys, values and states": [
        PagePart(layers=2, planes=2, heads=2, dim=4, dtype="bfloat16"),
        PagePart(layers=3, planes=1, heads=2, dim=80, dtype="float32", per_token=False),
        PagePart(layers=3, planes=3, heads=1, dim=8, dtype="bfloat16", per_token=False),
    ],
    "8-bit keys with their scales": [
        PagePart(layers=2, planes=2, heads=2, dim=4, dtype="float8_e4m3fn"),
        PagePart(layers=2, planes=2, heads=2, dim=1, dtype="float32"),
    ],
    "latents": [PagePart(layers=2, planes=1, heads=1, dim=24, dtype="bfloat16")],
}
STATES = "keys, values and states"
