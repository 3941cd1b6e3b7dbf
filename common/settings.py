"""Settings: one documented set, by flag, `BATON_…` variable or file, checked at start.

Precedence: flag > variable > file (`--config baton.toml`) > default. An unknown name stops the start and names the nearest
known one; so does an invalid value. Nothing else in Baton reads the environment.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PREFIX = "BATON_"
FLAGS = {"json_file": "--json", "print_json": "--json"}  # where a field can't have the flag's name
ROOT = Path(__file__).resolve().parents[1]
Port = Annotated[int, Field(ge=0, le=65_535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Share = Annotated[float, Field(gt=0, le=1)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Devices = Annotated[str, Field(pattern=r"^(cpu|cuda|cuda:\d+(,cuda:\d+)*)$")]
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,64}$")]


# Module and class of each command's settings. Commands may share a file or environment, so others' names are no mistake.
COMMANDS = {
    "gateway": "services.gateway.settings:GatewaySettings",
    "prefill": "services.worker.settings:WorkerServiceSettings",
    "decode": "services.worker.settings:WorkerServiceSettings",
    "worker": "services.worker.settings:WorkerServiceSettings",
    "planner": "services.planner.settings:PlannerSettings",
    "up": "services.up.settings:UpSettings",
    "chat": "cli.chat.settings:ChatSettings",
    "bench": "cli.bench.settings:BenchSettings",
    "doctor": "cli.doctor.settings:DoctorSettings",
    "top": "cli.top.settings:TopSettings",
    "users": "cli.users.settings:UsersSettings",
    "trace": "cli.trace.settings:TraceSettings",
}


class ConfigError(Exception):
    """A setting is wrong. The message names the flag and says what to do."""


class Options(BaseModel):
    """Frozen; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


S = TypeVar("S", bound=BaseModel)


def settings_of(command: str) -> type[BaseModel]:
    module, _, name = COMMANDS[command].partition(":")
    kind: type[BaseModel] = getattr(import_module(module), name)
    return kind


@cache
def known_names() -> frozenset[str]:
    """Return the names of all commands' settings."""
    return frozenset(name for command in COMMANDS for name in settings_of(command).model_fields)


def load_settings(
    kind: type[S], *, command: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> S:
    """Resolve settings from `arguments`, the environment and a file. Raises ConfigError; `--help` prints and exits."""
    environment = os.environ if environment is None else environment
    flags = vars(_parser(kind, command).parse_args(list(arguments)))
    config_file = flags.pop("config") or environment.get(f"{PREFIX}CONFIG")
    values = _from_file(kind, Path(config_file)) if config_file else {}
    values |= _from_environment(kind, environment)
    values |= {name: value for name, value in flags.items() if value is not None}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def as_environment(settings: BaseModel, kind: type[BaseModel]) -> dict[str, str]:
    """Environment variables that give `kind` the values of `settings`, for the services of `baton up`."""
    names = [name for name in kind.model_fields if hasattr(settings, name)]
    return {f"{PREFIX}{name.upper()}": str(getattr(settings, name)) for name in names}


def flag_of(name: str) -> str:
    """The setting's name on the command line."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def fail(error: object) -> int:
    """Print one line for a person and return the exit code."""
    print(f"baton: {error}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            raise ConfigError(f"unknown option {unknown[0]}{_nearest(unknown[0], known)}; see {self.prog} --help")
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser(kind: type[BaseModel], command: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"baton {command}",
        allow_abbrev=False,
        description=(kind.__doc__ or "").strip(),
        epilog=f"Each option is also a variable ({PREFIX}NAME) and a key of the file given by --config (TOML).",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for name, field in kind.model_fields.items():
        text = f"{field.description} (default: {field.default})".replace("%", "%%")
        flag = flag_of(name)
        if field.annotation is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
            metavar = "{" + ",".join(map(str, choices)) + "}" if choices else name.rpartition("_")[2].upper()
            parser.add_argument(
                flag, dest=name, metavar=metavar, help=text, type=_number if _is_int_choice(choices) else str
            )
    return parser


def _is_int_choice(choices: tuple[Any, ...] | None) -> bool:
    return bool(choices) and all(isinstance(choice, int) for choice in choices or ())


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _from_environment(kind: type[BaseModel], environment: Mapping[str, str]) -> dict[str, Any]:
    for name in environment:
        if name.startswith(PREFIX) and name != f"{PREFIX}CONFIG" and not _is_known(kind, name[len(PREFIX) :].lower()):
            known = [f"{PREFIX}{each.upper()}" for each in sorted(known_names())]
            raise ConfigError(f"unknown variable {name}{_nearest(name, known)}")
    values: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        raw = environment.get(f"{PREFIX}{name.upper()}")
        if raw is not None:
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
            values[name] = _number(raw) if _is_int_choice(choices) else raw
    return values


def _from_file(kind: type[BaseModel], path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    for name in content:
        if not _is_known(kind, name):
            raise ConfigError(f"--config {path}: unknown setting {name!r}{_nearest(name, sorted(known_names()))}")
    return {name: value for name, value in content.items() if name in kind.model_fields}


def _is_known(kind: type[BaseModel], name: str) -> bool:
    """Whether any command has the setting. Loads other commands' settings only for a name that `kind` lacks."""
    return name in kind.model_fields or name in known_names()


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "?"
    text = f"{first['msg'][0].lower()}{first['msg'][1:]}, not {first['input']!r}"
    return f"{flag_of(name)} ({PREFIX}{name.upper()}): {text}"


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
