"""Print docs/configuration.md from the settings classes: `python -m services.settings_table > docs/configuration.md`."""

from __future__ import annotations

from pydantic import BaseModel

from common.config import (
    PREFIX,
    BenchSettings,
    ChatSettings,
    DoctorSettings,
    GatewaySettings,
    PlannerSettings,
    TopSettings,
    TraceSettings,
    UpSettings,
    UsersSettings,
    WorkerServiceSettings,
    flag_of,
)

_HEAD = """# Configuration

Made by `python -m services.settings_table`; a test keeps it up to date.

Precedence: flag, then variable, then file (`--config FILE` or `BATON_CONFIG`; TOML, the variables' names in lower case without
the prefix), then default. An unknown name stops the start. `baton up` hands its settings on to the services.
"""


def render() -> str:
    """Return the page."""
    sections = (
        ("baton gateway", GatewaySettings),
        ("baton prefill, baton decode, baton worker", WorkerServiceSettings),
        ("baton planner", PlannerSettings),
        ("baton up: all of the above but --worker-id, and", UpSettings),
        ("baton chat", ChatSettings),
        ("baton bench", BenchSettings),
        ("baton doctor", DoctorSettings),
        ("baton top", TopSettings),
        ("baton users", UsersSettings),
        ("baton trace", TraceSettings),
    )
    shared = {
        name
        for kind in (GatewaySettings, WorkerServiceSettings, PlannerSettings)
        for name, field in kind.model_fields.items()
        if name in UpSettings.model_fields and field.description == UpSettings.model_fields[name].description
    }
    parts = [_HEAD]
    for title, kind in sections:
        skip = shared if kind is UpSettings else set()
        parts.append(f"## {title}\n\n{_table(kind, skip)}\n")
    return "\n".join(parts)


def _table(kind: type[BaseModel], skip: set[str]) -> str:
    rows = ["| flag | variable | default | what |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        if name not in skip:
            flag, variable = flag_of(name), f"{PREFIX}{name.upper()}"
            default = f"`{field.default}`" if str(field.default) else ""
            rows.append(f"| `{flag}` | `{variable}` | {default} | {field.description} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(render(), end="")
