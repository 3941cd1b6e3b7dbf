"""Redis rules against the text of the functions: each user may call its own, and what they call."""

from __future__ import annotations

import re

from gateway.placement.ledger import function_libraries
from services.runtime.permissions import ROLES, Member, redis_rules

READS = {
    "EXISTS", "GETRANGE", "HMGET", "PTTL", "SCARD", "SMEMBERS", "SMISMEMBER", "SRANDMEMBER", "ZCARD", "ZCOUNT", "ZRANGE",
    "ZRANGEBYSCORE", "ZSCORE",
}  # fmt: skip
COMMAND = r"\b(?:redis\.call|read|write)\('([A-Z]+)'"


def test_every_command_that_a_user_s_functions_may_come_to_is_allowed() -> None:
    """A command that is missing would be seen by nobody: placement would fall back to heartbeats."""
    granted = {rule.removeprefix("+").upper() for rule in redis_rules(Member("gateway")).split()}
    for function, used in commands_by_function().items():
        assert used <= granted, f"{function} uses {sorted(used - granted)}"


def test_every_function_is_the_gateways_and_nobody_else_s() -> None:
    granted = set(redis_rules(Member("gateway")).split())
    others = [redis_rules(Member(role)) for role in ROLES if role not in ("gateway", "admin")]
    assert not any("fcall" in rules for rules in others)
    assert {f"+fcall|{function}" for function in commands_by_function()} <= granted


LOOP = re.compile(r"^\s*(?:for|while|repeat)\b.*", re.MULTILINE)
# What bounds a loop, beside a constant in its own line: what was read under a bound.
BOUNDED = (
    r"in ipairs\(pending\)",  # what a bounded call wrote
    r"in ipairs\(leases\)",
    r"in i?pairs\(changed\)",  # tenants, or stages of attempts, of one call's arguments
    r"for at = [234], #args, [36] do",  # at most MOST_ARGUMENTS
    r"in ipairs\((?:names|found\.ended|ids|members|STAGES|FIGURES|record\.roles|\{.*\})",  # read with a limit, or constant
    r"in ipairs\(read\('(?:HMGET|SMISMEMBER)'",  # an answer a bounded argument
    r"in ipairs\(holders\(",
    r"in ipairs\((?:workers|ranked|all|holding|prefill|decode)\)",  # candidates
    r"in ipairs\(found\) do",  # an answer a bounded argument
    r"for at = 1, (?:news\.count|depth|renew and depth or 0) do",  # MOST_DIGESTS, max_blocks
    r"while low < high do",  # halving
    r"for _ = 1, 3 do",
)


def test_every_loop_is_bounded_by_what_no_caller_chooses() -> None:
    """A loop that is not in the list needs its bound in its line: a constant, or a field of the policy."""
    loops = [line for library in function_libraries() for line in LOOP.findall(re.sub(r"--.*", "", library))]
    assert len(loops) > 40
    odd = [line for line in loops if "POLICY." not in line and not any(re.search(bound, line) for bound in BOUNDED)]
    assert odd == []


def test_redis_is_touched_only_by_reads_that_never_fail_and_by_writes_that_come_last() -> None:
    for library in function_libraries():
        safely, _, rest = library.partition("-- Register a function of its arguments.")
        assert "local function write(" in safely
        assert re.findall(r"redis\.(?:p?call|register_function)", rest) == ["redis.register_function"]
        reads = set(re.findall(r"\bread\('([A-Z]+)'", library))
        assert reads <= READS, reads - READS


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
