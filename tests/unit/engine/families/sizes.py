"""Published models that are too large for one GPU, which a worker is: for docs/models.md, by their numbers of parameters."""

from __future__ import annotations

# In billions, all experts counted.
PARAMETERS = {
    "Kimi K2 and K2.5": 1000,
    "GLM-5": 744,
    "DeepSeek-V3, R1 and V3.2": 671,
    "LongCat-Flash": 560,
    "Qwen3-Coder-480B": 480,
    "Llama 4 Maverick": 400,
    "GLM-4.5 and 4.6": 355,
    "Qwen3-235B": 235,
    "MiniMax-M2": 230,
    "GLM-4.5-Air": 106,
    "Llama 4 Scout": 109,
}
CARDS = {"H100 (80 GB)": 80, "H200 (141 GB)": 141, "B200 (180 GB)": 180, "B300 (288 GB)": 288}
GB_PER_BILLION = 0.5625  # 4 bits, and a scale of 16 for each 32 of them
USABLE = 0.92  # of a card: the rest is for a pass and a small pool


def smallest_card(billions: float) -> str:
    """The first card that holds the weights in 4 bits; "" where none does."""
    return next((name for name, size in CARDS.items() if billions * GB_PER_BILLION <= USABLE * size), "")


def cards() -> str:
    """A table: the smallest card of each, by the weights in 4 bits."""
    lines = ["| smallest card, by the weights in 4 bits | models |", "|---|---|"]
    for card in (*CARDS, ""):
        names = [name for name, billions in PARAMETERS.items() if smallest_card(billions) == card]
        lines += [f"| {card or 'none: no single card holds them'} | {', '.join(names)} |"] if names else []
    return "\n".join(lines)
