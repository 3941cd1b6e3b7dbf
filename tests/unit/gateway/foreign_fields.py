"""Writes the table in docs/http-api.md of other servers' fields.

PYTHONPATH=. .venv/bin/python -m tests.unit.gateway.foreign_fields
"""

from __future__ import annotations

from gateway.dialects.openai.foreign import CHAT, COMPLETIONS

HEAD = "| fields | of | what becomes of them |\n|---|---|---|\n"


def table() -> str:
    """Fields of the same fate in one row, in the order of the module."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys((*CHAT, *COMPLETIONS)):
        fates = {"chat": CHAT.get(name), "completions": COMPLETIONS.get(name)}
        same = fates["chat"] == fates["completions"]
        for where, one in fates.items():
            if one is not None and not (same and where == "completions"):
                rows.setdefault(("both" if same else where, one.fate), []).append(f"`{name}`")
    return HEAD + "".join(f"| {', '.join(names)} | {where} | {fate} |\n" for (where, fate), names in rows.items())


if __name__ == "__main__":
    print(table(), end="")
