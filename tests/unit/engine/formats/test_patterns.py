"""Expressions for names of modules match as Python's do, and none takes long."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.families.quantised import read_quantization
from engine.families.quantised.fields import modules
from engine.families.reading.fields import Fields
from engine.formats.patterns import PatternError, begins, compiled
from engine.spec.model import UnsupportedModelError

NAMES = (
    *("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.17.mlp.gate", "model.layers.3.mlp.gate_proj"),
    *("model.layers.12.mlp.experts.201.down_proj", "model.layers.4.mlp.shared_experts.up_proj", ""),
)
USUAL = (
    *(r".*lm_head", r".*mlp\.gate$", r"model\.layers\.\d+\.mlp\.experts\..*", r".*self_attn\.(q|k|v|o)_proj$"),
    *(r"^(?!.*experts).*mlp.*", r".*\.(?:1[0-9]|[2-9])\..*", r"model.layers.[^.]+.self_attn.\w+", r"(model\.)?lm_head"),
    *(
        r".*(?:gate|up)_proj",
        r".*layers\.\d{1,2}\.mlp\.gate\Z",
        r"^model\.layers\.(0|17)\.",
        r".*?down_proj",
        r"[a-z]+_[^_]*",
    ),
)


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_ones_match_as_pythons_do(pattern: str) -> None:
    assert [begins(pattern, name) for name in NAMES] == [bool(re.match(pattern, name)) for name in NAMES]
    assert any(begins(pattern, name) for name in NAMES)


_ITEMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", "_"])
_REPEATED = st.builds(str.__add__, _ITEMS, st.sampled_from(["", "", "*", "+", "?", "{2}", "{0,2}", "*?"]))
_PATTERNS = st.recursive(
    st.lists(_REPEATED, max_size=4).map("".join),
    lambda inner: st.one_of(
        st.builds("({}|{})".format, inner, inner),
        st.builds("(?:{})?{}".format, inner, inner),
        st.builds("{}$".format, inner),
        st.builds("^{}{}".format, inner, inner),
        st.builds("(?={}){}".format, inner, inner),
        st.builds("(?!{}){}".format, inner, inner),
    ),
    max_leaves=4,
)


@given(pattern=_PATTERNS, name=st.text("ab1_", max_size=8))
def test_any_one_matches_as_pythons_does_or_is_refused(pattern: str, name: str) -> None:
    with contextlib.suppress(PatternError):
        assert begins(pattern, name) == bool(re.match(pattern, name))


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a*)*b", "a repeat within a repeat"),
        ("(?:.+)+x", "a repeat within a repeat"),
        (r"(a)\1", "groupref is not supported"),
        ("(?<=a)b", "assert is not supported"),
        ("(?i)A", "flags are not supported"),
        ("(", "no regular expression"),
        ("a{99999999999999}", "no regular expression"),
        ("(" * 64 + ")" * 64, ""),
        ("(|" * 170 + ")" * 170, "170 groups, at most 64"),
        ("a" * 513, "at most 512"),
    ],
)
def test_what_could_take_long_is_refused_by_name(pattern: str, why: str) -> None:
    if not why:
        compiled(pattern)
        return
    with pytest.raises(PatternError, match=why):
        compiled(pattern)
    with pytest.raises(UnsupportedModelError, match=r"in quantization_config: .*; name the modules instead"):
        modules([f"re:{pattern}"])


def test_one_that_goes_back_for_ever_in_python_ends_at_once() -> None:
    """A backtracking matcher takes years for these."""
    name = "model.layers.0." + "a" * 80
    for pattern in (".*" * 60 + "x", ".*a.*a.*a.*a.*a.*a.*a.*a.*x", "a?" * 80 + "(?!.*.*.*.*b)x"):
        assert not begins(pattern, name)


def test_the_deepest_one_is_followed() -> None:
    name = "a" * 100
    for pattern in ("(a|" * 64 + "b" + ")" * 64, "(a" * 64 + ")?" * 64, "(?:a(?:b|" * 32 + "a" + "))" * 32):
        assert begins(pattern, name) == bool(re.match(pattern, name))


LONG = [f".*layers.{number}.{'a' * 400}" for number in range(100)]


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "ignore": [f"re:{each}" for each in LONG]},
        {"quant_method": "fp8", "ignore": [f"re:{each}" for each in LONG[:50]], "ignored_layers": ["a*" * 9_000]},
        {"quant_method": "gptq", "dynamic": {f"-:{each}": {} for each in LONG}},
        {"quant_method": "gptq", "dynamic": {each.replace("*", ""): {"bits": 8} for each in LONG}},
        {"quant_method": "compressed-tensors", "config_groups": {each: {"targets": [f"re:{each}"]} for each in LONG}},
    ],
)
def test_all_of_them_together_are_bounded(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="at most 32768 are read"):
        read_quantization(Fields({"quantization_config": config}))


def test_stars_stand_for_any_letters_and_are_whole_names() -> None:
    chosen = modules(["model.layers.*.self_attn*", "lm_head*", "*mtp"])
    found = [chosen.has(name) for name in (*NAMES, "mtp", "mtp.layers.0")]
    assert found == [True, True, False, False, False, False, False, True, False]
