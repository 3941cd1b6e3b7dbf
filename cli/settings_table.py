"""Print docs/configuration.md from the settings classes: `python -m cli.settings_table > docs/configuration.md`."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from common import PREFIX
from services.gateway.settings import GatewaySettings
from services.planner.settings import PlannerSettings
from services.runtime.commands import COMMANDS, settings_of
from services.runtime.flags import ARGUMENTS, default_of, flag_of
from services.runtime.removed import REMOVED
from services.up.settings import UpSettings
from services.worker.settings import WorkerServiceSettings

_HEAD = """# Configuration

Made by `python -m cli.settings_table`; a test keeps it up to date.

Precedence: flag, then variable, then file (`--config FILE` or `BATON_CONFIG`; TOML, the variables' names in lower case without
the prefix), then default. An unknown flag or key
stops the start, an unknown variable is warned of. An API key `@FILE` means what the file says. `auto` and `off` stand for
the numbers of older releases (0, -1), which are still taken. `baton up` hands its settings on to the services.
"""
_GONE = """## Settings that are gone

Whoever gives one, by flag, variable or file, is told this and nothing starts.
"""


def render() -> str:
    commands: dict[type[BaseModel], list[str]] = {}
    for command in sorted(COMMANDS, key=lambda name: (COMMANDS[name].package.startswith("cli."), name == "up")):
        if (kind := settings_of(command)) is not None:
            commands.setdefault(kind, []).append(f"baton {command}")
    shared = {
        name
        for kind in (GatewaySettings, WorkerServiceSettings, PlannerSettings)
        for name, field in kind.model_fields.items()
        if name in UpSettings.model_fields and field.description == UpSettings.model_fields[name].description
    }
    parts = [_HEAD]
    for kind, names in commands.items():
        title, skip = ", ".join(names), set[str]()
        if kind is UpSettings:
            title, skip = f"{title}: all of the above but --worker-id, and", shared
        parts.append(f"## {title}\n\n{_table(kind, skip)}\n")
    return "\n".join([*parts, _GONE, *_removed(), ""])


def _removed() -> Iterator[str]:
    for commands, names in REMOVED.items():
        for name, said in names.items():
            yield f"- `{flag_of(name)}` of {', '.join(f'`baton {command}`' for command in commands)}: {said}."


def _table(kind: type[BaseModel], skip: set[str]) -> str:
    rows = ["| flag | variable | default | what |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        if name not in skip and name not in ARGUMENTS:
            flag, variable = flag_of(name), f"{PREFIX}{name.upper()}"
            default = (
                f"`{shown}`"
                if (shown := default_of(field) or (str(field.default) if field.annotation is bool else ""))
                else ""
            )
            rows.append(f"| `{flag}` | `{variable}` | {default} | {field.description} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(render(), end="")
