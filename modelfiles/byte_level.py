"""GPT-2's table of the characters that stand for bytes in byte-level tokenizers."""

from __future__ import annotations


def _byte_chars() -> dict[int, str]:
    """GPT-2's byte table: printable bytes map to themselves, others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


BYTE_CHARS = _byte_chars()
