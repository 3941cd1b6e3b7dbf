"""Loading a command's settings from flags, `BATON_…` variables or a file, validated at start.

Precedence: flag > variable > file (`--config baton.toml`) > default. A wrong flag or value stops the start, and the nearest
known name is told; an unknown variable is only warned of, as it may be another release's.
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from common import PREFIX
from common.settings import ConfigError, Form
from services.runtime.commands import known_names
from services.runtime.flags import ARGUMENTS, choices_of, flag_of, number, parser_of, words_of
from services.runtime.removed import is_removed, removed_from

MAX_KEY_FILE = 64 << 10
SECRETS = ("api_key", "api_keys", "admin_key", "metrics_key")  # `@FILE` stands for the file's contents
SHOWN_FOR_LONG = ("api_keys", "admin_key", "metrics_key")  # those of long-running services
WORDS = {  # pydantic's error types in our words
    "int_parsing": "a whole number is needed",
    "int_type": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_parsing": "a number is needed",
    "float_type": "a number is needed",
    "bool_parsing": "true or false is needed",
    "greater_than": "more than {gt} is needed",
    "greater_than_equal": "{ge} or more is needed",
    "less_than": "less than {lt} is needed",
    "less_than_equal": "{le} or less is needed",
    "literal_error": "one of {expected} is needed",
    "string_pattern_mismatch": "{form} is needed",
}

S = TypeVar("S", bound=BaseModel)


def load_settings(
    kind: type[S], *, command: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> S:
    """Resolve settings from `arguments`, the environment and a file. Raises ConfigError; `--help` prints and exits."""
    environment = os.environ if environment is None else environment
    flags = vars(parser_of(kind, command, everything="--help-all" in arguments).parse_args(list(arguments)))
    config_file = flags.pop("config") or environment.get(f"{PREFIX}CONFIG")
    gone = removed_from(command)
    values = _from_file(kind, Path(config_file), gone) if config_file else {}
    values |= _from_environment(kind, environment, gone)
    given = {name: value for name, value in flags.items() if value is not None}
    for name, value in given.items():
        if str(value) == "0" and words_of(kind.model_fields[name]).get(0) == "auto":  # internally it is passed on as 0
            raise ConfigError(f"{flag_of(name)} 0: more than 0 is needed, or auto")
    values |= given
    for name in SECRETS:
        if str(values.get(name, "")).startswith("@"):
            values[name] = _read(flag_of(name), Path(values[name][1:]))
        elif flags.get(name) and name in SHOWN_FOR_LONG:
            remedy = f"use {PREFIX}{name.upper()}, or {flag_of(name)} @FILE"
            print(f"baton: warning: `ps` shows {flag_of(name)} to all users of this machine: {remedy}", file=sys.stderr)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(kind, error)) from None


def as_environment(settings: BaseModel, kind: type[BaseModel]) -> dict[str, str]:
    """Variables that pass `settings` on to `kind`, for the services of `baton up`."""
    names = [name for name in kind.model_fields if hasattr(settings, name)]
    return {f"{PREFIX}{name.upper()}": str(getattr(settings, name)) for name in names}


def fail(error: object) -> int:
    """Print one line for a person and return the exit code."""
    print(f"baton: {error}", file=sys.stderr)
    return 2


def _from_environment(kind: type[BaseModel], environment: Mapping[str, str], gone: Mapping[str, str]) -> dict[str, Any]:
    for name in environment:
        if name.startswith(PREFIX) and (said := gone.get(name[len(PREFIX) :].lower())):
            raise ConfigError(f"{name}: {said}")
        if name.startswith(PREFIX) and name != f"{PREFIX}CONFIG" and not _is_known(kind, name[len(PREFIX) :].lower()):
            known = [f"{PREFIX}{each.upper()}" for each in sorted(known_names())]
            print(f"baton: warning: unknown variable {name}{nearest(name, known)}", file=sys.stderr)
    values: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        raw = environment.get(f"{PREFIX}{name.upper()}")
        if raw is not None:
            values[name] = number(raw) if choices_of(field).are_numbers else raw
    return values


def _from_file(kind: type[BaseModel], path: Path, gone: Mapping[str, str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    for name in content:
        if said := gone.get(name):
            raise ConfigError(f"--config {path}: {name}: {said}")
        if not _is_known(kind, name):
            raise ConfigError(f"--config {path}: unknown setting {name!r}{nearest(name, sorted(known_names()))}")
    return {name: value for name, value in content.items() if name in kind.model_fields}


def _read(flag: str, file: Path) -> str:
    """The keys in a file: one a line, or comma-separated."""
    try:
        text = file.read_bytes()[:MAX_KEY_FILE].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} @{file}: {getattr(error, 'strerror', '') or 'not text'}") from None
    return ",".join(line.strip() for line in text.splitlines() if line.strip())


def _is_known(kind: type[BaseModel], name: str) -> bool:
    """True if any command has or had the setting. Loads other commands' settings only for a name that `kind` lacks."""
    return name in kind.model_fields or is_removed(name) or name in known_names()


def _explain(kind: type[BaseModel], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "?"
    text = first["msg"].removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    if first["type"] in WORDS:
        written = ", ".join(choices_of(kind.model_fields[name]).written)
        form = next((each.words for each in kind.model_fields[name].metadata if isinstance(each, Form)), "another form")
        text = WORDS[first["type"]].format(**first.get("ctx", {}) | {"expected": written, "form": form})
    given = "" if name in SECRETS or ", not " in text else f", not {first['input']!r}"
    label = name.upper() if name in ARGUMENTS else f"{flag_of(name)} ({PREFIX}{name.upper()})"
    return f"{label}: {text}{given}"


def nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
