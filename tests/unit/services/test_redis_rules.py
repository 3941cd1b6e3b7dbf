"""Redis rules against the text of the functions: each user may call its own, and what they call."""

from __future__ import annotations

import re

import pytest

from services.runtime.functions import function_libraries
from services.runtime.permissions import Member, redis_rules

COMMAND = r"\b(?:redis\.call|read|write)\('([A-Z]+)'"


@pytest.mark.parametrize(("role", "least"), [("gateway", 3), ("decode", 3), ("planner", 1)])
def test_every_command_that_a_user_s_functions_may_come_to_is_allowed(role: str, least: int) -> None:
    """A command that is missing would be seen by nobody: placement would fall back to heartbeats."""
    granted = {rule.removeprefix("+").upper() for rule in redis_rules(Member(role)).split()}
    allowed, commands = 0, commands_by_function()
    for function, used in commands.items():
        if f"FCALL|{function.upper()}" in granted:
            allowed += 1
            assert used <= granted, f"{function} uses {sorted(used - granted)}"
    assert allowed >= least


def test_every_function_is_somebody_s() -> None:
    granted = {rule for role in ("gateway", "decode") for rule in redis_rules(Member(role)).split()}
    assert {f"+fcall|{function}" for function in commands_by_function()} <= granted


def commands_by_function() -> dict[str, set[str]]:
    """Registered function -> the commands that it and what it calls may use."""
    return {name: used for library in function_libraries() for name, used in _commands_in(library).items()}


def _commands_in(library: str) -> dict[str, set[str]]:
    library = re.sub(r"--.*", "", library)
    parts = re.split(r"^(?:local )?function (\w+)\(", library, flags=re.MULTILINE)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    bodies = {
        name: re.split(r"redis\.register_function\(|^serve\(", body, flags=re.MULTILINE)[0]
        for name, body in bodies.items()
    }
    found = {}
    for public, name in re.findall(r"(?:serve|register_function)\('(baton\d?_\w+)', (\w+)\)", library):
        reached, new = {name}, {name}
        while new:
            new = {other for one in new for other in bodies if re.search(rf"\b{other}\(", bodies[one])} - reached
            reached |= new
        found[public] = {command for one in reached for command in re.findall(COMMAND, bodies[one])}
        assert found[public], public
    return found
