"""One file of constants: what Lua reads is there, and all that is there is read."""

from __future__ import annotations

import re
from pathlib import Path

from common.policy import FILE, kv_read_bytes_per_s, placement_policy
from gateway.placement.ledger import policy_as_lua

ROOT = Path(__file__).resolve().parents[3]
READ_IN_PYTHON = {"decode.kv_read_bytes_per_s", "candidates.decode_listed"}
LUA = list((ROOT / "gateway").rglob("*.lua"))


def names() -> set[str]:
    return {f"{section}.{name}" for section, values in placement_policy().items() for name in values}


def test_lua_reads_every_constant_and_none_that_is_not_there() -> None:
    read = {".".join(found) for text in LUA for found in re.findall(r"POLICY\.(\w+)\.(\w+)", text.read_text())}
    assert read <= names()
    assert names() - read <= READ_IN_PYTHON
    assert {path.stem for path in LUA} >= {"place", "candidates"}


def test_every_constant_says_what_it_is_for() -> None:
    lines = [line for line in FILE.read_text().splitlines() if "=" in line and not line.startswith("#")]
    assert len(lines) == len(names())
    assert [line for line in lines if " # " not in line] == []


def test_the_lua_table_has_the_file_s_values() -> None:
    text = policy_as_lua()
    assert text.startswith("local POLICY = { index = { block_ttl_s = 21600, max_blocks = 4096, ")
    assert "hidden_share = 0.1 " in text
    assert kv_read_bytes_per_s() == 2e12
