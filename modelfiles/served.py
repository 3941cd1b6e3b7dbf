"""Names of the supported architectures, as in config.json and GGUF files, without importing the engine."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HEADED = "ForSequenceClassification"
REWARD, STEPS = "ForRewardModel", "ForProcessRewardModel"  # scores of a text, and of each of its steps
GROUP = "baton.families"
_TASK = re.compile(r"For(CausalLM|ConditionalGeneration)\Z")


@lru_cache(maxsize=1)
def names() -> Mapping[str, frozenset[str]]:
    """`architectures` of config.json under "classes", `general.architecture` of GGUF files under "gguf"; "encoders", "others"."""
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {kind: frozenset(found) for kind, found in data.items()} | {
        "classes": frozenset((*data["classes"], *of_packages()))
    }


@lru_cache(maxsize=1)
def of_packages() -> Mapping[str, EntryPoint]:
    """Families of installed packages by the class in config.json: entry points of `baton.families`, not imported here."""
    return {point.name: point for point in entry_points(group=GROUP)}


def pooled_names(*, beside_modules: bool = False) -> frozenset[str]:
    """Classes of models that make vectors or scores of texts, and generate nothing; some do only with a modules.json."""
    found = {name + kind for name in names()["encoders"] for kind in ("Model", "ForMaskedLM", HEADED)}
    found |= {name + kind for name in names()["decoders"] for kind in (HEADED, REWARD, STEPS)} | names()["others"]
    if beside_modules:
        found |= {name + kind for name in names()["decoders"] for kind in ("Model", "ForCausalLM")}
    return frozenset(found)


def decoders() -> frozenset[str]:
    """Families of decoders that make vectors or scores, too."""
    return names()["decoders"]


def named_in(fields: Mapping[str, Any]) -> list[str]:
    """The classes named in a config.json; none if it names none. Raises ValueError."""
    named = fields.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError(f"config.json: architectures must be a list of names, not {named!r:.40}")
    return named


def refusal(named: Sequence[str], kind: str = "classes") -> str:
    """Return why a model with these names is not supported, with the nearest ones that are; "" if it is supported."""
    served = names()[kind]
    if served & {*named}:
        return ""
    stems = {name: _TASK.sub("", name) for name in sorted(served)}  # a common suffix would make all names look alike
    near = [stem for name in named for stem in difflib.get_close_matches(_TASK.sub("", name), stems.values())]
    nearest = f"; nearest: {', '.join(name for name in stems if stems[name] in near)}" if near else ""
    return f"{', '.join(named)[:200] or 'a model without architectures'} is not served (docs/models.md){nearest}"


@lru_cache(maxsize=1)
def of_transformers() -> frozenset[str]:
    """Causal models of the installed `transformers`, read from its table without importing it; none if it is missing."""
    folders = getattr(find_spec("transformers"), "submodule_search_locations", None) or [""]
    table = Path(folders[0]) / "models/auto/modeling_auto.py"
    return frozenset(re.findall(r'"(\w+)"', table.read_text(encoding="utf-8"))) if table.is_file() else frozenset()
