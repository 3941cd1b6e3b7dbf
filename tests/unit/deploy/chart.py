"""The chart without helm: the part of its template language that our templates keep to, in terms of Jinja's.

`$.Values.a.b`, variables of `range $key, $value := …`, `if`, `if not`, `if eq`, `add`, `else`, `end`, `quote`, `toJson`,
`$.Files.Get … | indent`. What else a template says is an error here, so that the tests see all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "baton"
_ACTION = re.compile(r"\{\{(-?) (.*?) \}\}")
_NAME = r"\$(?:\.Values)?[\w.]*"


def values(**changed: Any) -> dict[str, Any]:
    """Return the chart's values, with those of `changed` over them, mappings key by key."""
    found = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for name, value in changed.items():
        assert name in found
        found[name] = found[name] | value if isinstance(value, Mapping) else value
    return dict(found)


def manifests(given: Mapping[str, Any], template: str = "*") -> list[dict[str, Any]]:
    """Return the manifests of all templates, or of one, with these values."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["quote"] = lambda value: json.dumps(
        str(value).lower() if isinstance(value, bool) else str(value)
    )
    environment.filters["toJson"] = json.dumps
    found: list[dict[str, Any]] = []
    for file in sorted((CHART / "templates").glob(f"{template}.yaml")):
        source = _translated(file.read_text(encoding="utf-8"))
        text = environment.from_string(source).render(Values=given, file=_indented)
        found += [one for one in yaml.safe_load_all(text) if one is not None]
    return found


def _indented(name: str, width: int) -> str:
    lines = (CHART / name).read_text(encoding="utf-8").splitlines()
    return "\n".join(" " * width + line for line in lines)


def _translated(text: str) -> str:
    """Return a template of Go's as one of Jinja's."""
    open_blocks: list[str] = []

    def action(match: re.Match[str]) -> str:
        dash, words = match.groups()
        if words == "end":
            return f"{{%{dash} end{open_blocks.pop()} %}}"
        if words == "else":
            return f"{{%{dash} else %}}"
        if found := re.fullmatch(rf"range \$(\w+), \$(\w+) := ({_NAME})", words):
            open_blocks.append("for")
            return f"{{%{dash} for {found[1]}, {found[2]} in {_path(found[3])} | dictsort %}}"
        if found := re.fullmatch(rf"if (not )?({_NAME})", words):
            open_blocks.append("if")
            return f"{{%{dash} if {found[1] or ''}{_path(found[2])} %}}"
        if found := re.fullmatch(rf'if eq ({_NAME}) ("\w+")', words):
            open_blocks.append("if")
            return f"{{%{dash} if {_path(found[1])} == {found[2]} %}}"
        if found := re.fullmatch(r'\$\.Files\.Get "([\w./]+)" \| indent (\d+)', words):
            return f'{{{{{dash} file("{found[1]}", {found[2]}) }}}}'
        if found := re.fullmatch(rf"add ({_NAME}) (\d+)", words):
            return f"{{{{{dash} {_path(found[1])} + {found[2]} }}}}"
        found = re.fullmatch(rf"({_NAME})( \| (?:quote|toJson))?", words)
        assert found, f"the tests do not know {words!r}"
        return f"{{{{{dash} {_path(found[1])}{found[2] or ''} }}}}"

    translated = _ACTION.sub(action, text)
    assert not open_blocks
    return translated


def _path(name: str) -> str:
    return name.removeprefix("$.").removeprefix("$")
