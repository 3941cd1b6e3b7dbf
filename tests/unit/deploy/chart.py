"""The chart without helm: the part of its template language that our templates keep to, in terms of Jinja's.

`$.Values.a.b`, variables of `range $key, $value := …`, `if`, `if not`, `if and`, `if eq`, `add`, `mul`, `else`, `end`,
`quote`, `toJson`, `default`, `required`, `include`, `concat`, `deepCopy`, `set`, `$.Files.Get … | indent`. What else a
template says is an error here, so that the tests see all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

IMAGE = "registry.example.org/team/baton"
CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "baton"
_ACTION = re.compile(r"\{\{(-?) (.*?) (-?)\}\}")
_NAME = r"\$(?:\.?[A-Z])?[\w.]*"
_DEFINED = re.compile(r'\{\{- define "([\w.]+)" -\}\}(.*?)\{\{- end \}\}\n(?=\{\{- define|\Z)', re.DOTALL)


def values(**changed: Any) -> dict[str, Any]:
    """Return the chart's values with an image's name, and those of `changed` over them, mappings key by key."""
    found = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    found["image"]["repository"] = IMAGE
    for name, value in changed.items():
        assert name in found
        found[name] = found[name] | value if isinstance(value, Mapping) else value
    return dict(found)


def manifests(given: Mapping[str, Any], template: str = "*", *, release: str = "baton") -> list[dict[str, Any]]:
    """Return the manifests of all templates, or of one, with these values."""
    found: list[dict[str, Any]] = []
    for file in sorted((CHART / "templates").glob(f"{template}.yaml")):
        found += [one for one in yaml.safe_load_all(_rendered(file, given, release)) if one is not None]
    return found


def notes(given: Mapping[str, Any]) -> str:
    """Return what a person reads after an install."""
    return _rendered(CHART / "templates" / "NOTES.txt", given, "baton")


def _rendered(file: Path, given: Mapping[str, Any], release: str) -> str:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["quote"] = lambda value: json.dumps(
        str(value).lower() if isinstance(value, bool) else str(value)
    )
    environment.filters["toJson"] = json.dumps
    helpers = (CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8")
    macros = "".join(
        f"{{% macro {_macro(name)}() %}}{_translated(body.strip())}{{% endmacro %}}"
        for name, body in _DEFINED.findall(helpers)
    )
    about = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    chart = {name[0].upper() + name[1:]: value for name, value in about.items()}
    about_release = {"Name": release, "Namespace": "default", "Service": "Helm"}
    return environment.from_string(macros + _translated(file.read_text(encoding="utf-8"))).render(
        Values=given, Chart=chart, file=_indented, required=_required, Release=about_release
    )


def _required(remedy: str, value: str) -> str:
    if not value:
        raise ValueError(remedy)
    return value


def _indented(name: str, width: int) -> str:
    lines = (CHART / name).read_text(encoding="utf-8").splitlines()
    return "\n".join(" " * width + line for line in lines)


def _macro(name: str) -> str:
    return name.replace(".", "_")


def _translated(text: str) -> str:
    """Return a template of Go's as one of Jinja's."""
    open_blocks: list[str] = []

    def action(match: re.Match[str]) -> str:
        dash, words, after = match.groups()
        kind, what = _action(words, open_blocks)
        return f"{{{kind}{dash} {what} {after}{'}' if kind == '{' else '%}'}{'}' if kind == '{' else ''}"

    translated = _ACTION.sub(action, text)
    assert not open_blocks
    return translated


def _action(words: str, open_blocks: list[str]) -> tuple[str, str]:
    """Whether it is a value ("{") or a statement ("%"), and its words for Jinja."""
    if words == "end":
        return "%", f"end{open_blocks.pop()}"
    if words == "else":
        return "%", "else"
    if found := re.fullmatch(rf"range \$(\w+), \$(\w+) := ({_NAME})", words):
        open_blocks.append("for")
        items = f"{_path(found[3])} | dictsort"
        return "%", f"for {found[2]} in {_path(found[3])}" if found[
            1
        ] == "_" else f"for {found[1]}, {found[2]} in {items}"
    if found := re.fullmatch(rf"if (not )?({_NAME})", words):
        open_blocks.append("if")
        return "%", f"if {found[1] or ''}{_path(found[2])}"
    if found := re.fullmatch(rf"if and ({_NAME}) ({_NAME})", words):
        open_blocks.append("if")
        return "%", f"if {_path(found[1])} and {_path(found[2])}"
    if found := re.fullmatch(rf'if eq ({_NAME}) ("\w+")', words):
        open_blocks.append("if")
        return "%", f"if {_path(found[1])} == {found[2]}"
    if found := re.fullmatch(rf"\$(\w+) := deepCopy ({_NAME})", words):
        return "%", f"set {found[1]} = dict({_path(found[2])})"
    if found := re.fullmatch(r"\$_ := set \$(\w+) \$(\w+) \$(\w+)", words):
        return "%", f"set _ = {found[1]}.update({{{found[2]}: {found[3]}}})"
    return "{", _value(words)


def _value(words: str) -> str:
    if found := re.fullmatch(r'include "([\w.]+)" \$', words):
        return f"{_macro(found[1])}()"
    if found := re.fullmatch(r'\$\.Files\.Get "([\w./]+)" \| indent (\d+)', words):
        return f'file("{found[1]}", {found[2]})'
    if found := re.fullmatch(rf'required ("[^"]+") ({_NAME})', words):
        return f"required({found[1]}, {_path(found[2])})"
    if found := re.fullmatch(rf"add ({_NAME}) (\d+)", words):
        return f"{_path(found[1])} + {found[2]}"
    if found := re.fullmatch(rf"mul ({_NAME}) ({_NAME}) \| quote", words):
        return f"({_path(found[1])} * {_path(found[2])}) | quote"
    if found := re.fullmatch(rf"div \(mul ({_NAME}) ({_NAME})\) ({_NAME}) \| quote", words):
        return f"({_path(found[1])} * {_path(found[2])} // {_path(found[3])}) | quote"
    if found := re.fullmatch(rf'concat \(list ({_NAME}|"\w+")((?: "[^"]+")*)\) ({_NAME}) \| toJson', words):
        more = found[2].replace(' "', ', "')
        return f"([{_path(found[1])}{more}] + {_path(found[3])}) | toJson"
    if found := re.fullmatch(rf"({_NAME}) \| default ({_NAME})", words):
        return f"{_path(found[1])} or {_path(found[2])}"
    found = re.fullmatch(rf"({_NAME})( \| (?:quote|toJson))?", words)
    assert found, f"the tests do not know {words!r}"
    return f"{_path(found[1])}{found[2] or ''}"


def _path(name: str) -> str:
    return name.removeprefix("$.").removeprefix("$")
