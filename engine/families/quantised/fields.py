"""Fields of quantisation that several methods share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from engine.families.reading.fields import Fields
from engine.formats.patterns import PatternError, compiled
from engine.formats.quantization import Modules
from engine.spec.model import UnsupportedModelError

# A limit: the author of a config.json must not decide for how long a worker parses it.
_MAX_LETTERS = 1 << 15
_OF_EXPRESSIONS = re.compile(r"\Are:|[\\*^$+?()\[\]|]")


def names(fields: Fields, *fields_of_names: str) -> list[str]:
    """The strings of optional lists."""
    found: list[str] = []
    for field in fields_of_names:
        value = fields.get(field) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise UnsupportedModelError(f"config.json: {field} must be a list of names, not {value!r:.40}")
        found += value
    return found


def check_letters(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for too many expressions in all lists and groups together, before any is parsed."""
    dynamic, extra = config.get("dynamic"), config.get("extra_config")
    letters, waiting = sum(map(len, dynamic)) if isinstance(dynamic, Mapping) else 0, [config]
    letters += sum(len(name) for name in extra if is_expression(name)) if isinstance(extra, Mapping) else 0
    while waiting:
        value: Any = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and ("re:" in value or "*" in value):
            letters += len(value)
    if letters > _MAX_LETTERS:
        raise UnsupportedModelError(
            f"config.json: quantization_config has patterns of {letters} letters for modules, at most {_MAX_LETTERS} are"
            " read; name the modules instead"
        )


def is_expression(name: str) -> bool:
    """True if an unmarked name contains letters that only expressions have."""
    return _OF_EXPRESSIONS.search(name) is not None


def modules(entries: Iterable[str]) -> Modules:
    """Modules by name, by `re:` with a regular expression for prefixes, or with `*` as a wildcard."""
    named, patterns = set[str](), list[str]()
    for entry in entries:
        if entry.startswith("re:"):
            patterns.append(entry.removeprefix("re:"))
        elif "*" in entry:
            patterns.append("".join(".*" if letter == "*" else re.escape(letter) for letter in entry) + "$")
        else:
            named.add(entry)
    for pattern in patterns:
        try:
            compiled(pattern)
        except PatternError as error:
            raise UnsupportedModelError(
                f"config.json: {pattern!r:.80} in quantization_config: {error}; name the modules instead"
            ) from error
    return Modules(named=frozenset(named), patterns=tuple(patterns))


def kv_cache(fields: Fields) -> str:
    """Read the dtype of the KV cache: "fp8", or ""."""
    if algorithm := fields.get("kv_cache_quant_algo"):
        fields.only("kv_cache_quant_algo", "FP8")
        fields.ignore("kv_cache_scheme")
        return str(algorithm).lower()
    scheme = fields.get("kv_cache_scheme")
    if not scheme:
        return ""
    if not isinstance(scheme, Mapping):
        raise UnsupportedModelError(f"config.json: kv_cache_scheme must be an object, not {scheme!r:.40}")
    own = Fields(scheme)
    for name, value in {
        "type": "float",
        "num_bits": 8,
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }.items():
        own.only(name, value)
    own.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    if unread := own.unread():
        raise UnsupportedModelError(f"config.json: {', '.join(unread)} of kv_cache_scheme is not supported")
    return "fp8"


def block(fields: Fields, field: str) -> tuple[int, int] | None:
    """Rows and inputs of a block, or None."""
    value = fields.get(field)
    if value is None:
        return None
    if not (
        isinstance(value, list) and len(value) == 2 and all(type(size) is int and 1 <= size <= 4096 for size in value)
    ):
        raise UnsupportedModelError(f"config.json: {field} must be two sizes, not {value!r:.40}")
    return (value[0], value[1])
