"""What README and docs tell people to type, and where they send them, exists."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cli.bench.aliases import translated
from cli.completion.scripts import VALUES
from common.settings import ConfigError
from services.runtime.commands import COMMANDS, settings_of
from services.runtime.flags import parser_of
from tests.unit.house.measures import ROOT

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "dialects").glob("*.md")),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING", "benchmarks/README")),
]
RESULTS = "benchmarks/results/"  # figures are made on other machines, and come after the page that names them
ENDS = {"|", ";", "&&", ">", "&"}
NOTES = [page for page in sorted((ROOT / "docs" / "design").glob("*.md")) if page.stem != "index"]
INDEX = (ROOT / "docs" / "design" / "index.md").read_text(encoding="utf-8")
NO_NOUNS = re.compile(
    r"\b(is|are|was|were|has|have|had|can|could|may|must|will|does|do|goes|stays|becomes|keeps|makes|gets|takes|gives"
    r"|says|tells|who|what|which|how|when|where|why|whether|that)\b"
)


def commands_of(text: str) -> Iterator[list[str]]:
    """What is written as a command: a line of a block, or between backticks, from `baton` to the line's or the command's end."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in lines:
        words = _split(line)
        for place, word in enumerate(words):
            if word in ("baton", "./baton") and (place == 0 or words[place - 1] in ENDS or line.startswith("source")):
                end = next((at for at, one in enumerate(words) if at > place and one in ENDS), len(words))
                yield words[place + 1 : end]


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line.replace("<(", "").rstrip(")"), posix=True, punctuation_chars="|;&>")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # prose with an apostrophe
        return []


def fault_of(words: Sequence[str]) -> str:
    """Why `baton WORDS` would be refused; "" when it would not. Values are not looked at."""
    name, *rest = words or ["--help"]
    if name.startswith("-"):
        return ""
    if name not in COMMANDS:
        return f"unknown command {name!r}"
    kind = settings_of(name)
    if kind is None:
        return (
            "" if not rest or rest[0] in VALUES.get(name, rest) else f"unknown word {rest[0]!r}"
        )  # names are anybody's
    rest = [word for word in rest if word not in ("--help", "--help-all")]
    try:
        parser_of(kind, name).parse_args(translated(rest)[0] if name == "bench" else rest)
    except (ConfigError, argparse.ArgumentError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_the_docs_is_taken(page: Path) -> None:
    found = {shlex.join(words): fault_of(words) for words in commands_of(page.read_text(encoding="utf-8"))}
    assert {command: fault for command, fault in found.items() if fault} == {}


def test_the_docs_commands_are_found_and_judged() -> None:
    lines = ["See `baton top`.", "```", "echo hi | ./baton chat --wrong 1  # 'tis", "source <(baton completion bash)"]
    text = "\n".join([*lines, "./baton up \\", "  --port 1", "```", ""])
    found = list(commands_of(text))
    assert found == [["chat", "--wrong", "1"], ["completion", "bash"], ["up", "--port", "1"], ["top"]]
    assert [bool(fault_of(words)) for words in found] == [True, False, False, False]
    assert [fault_of(words)[:7] for words in (["tpo"], ["keys", "make"], ["top", "--keep"])] == ["unknown"] * 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_module_that_the_docs_run_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"python (?:-O )?-m ((?:benchmarks|cli|services|tests)\.[\w.]*\w)", text)
    files = {name: ROOT / name.replace(".", "/") for name in names}
    there = {
        name
        for name, file in files.items()
        if any(path.exists() for path in (file.with_suffix(".py"), file / "__main__.py"))
    }
    assert set(names) == there


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_between_the_docs_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if not leads(page, target)] == []


def leads(page: Path, target: str) -> bool:
    """Whether the file is there, and its heading."""
    name, _, heading = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    if file.is_relative_to(ROOT / RESULTS):
        return True
    return file.exists() and (not heading or heading in headings(file))


def headings(file: Path) -> set[str]:
    """Anchors, as GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower().strip() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.stem)
def test_every_design_note_is_dated_and_in_the_index(note: Path) -> None:
    """A note's second paragraph begins with "Decided"; its row in the index has the first and the last date there."""
    title, decided, *_ = note.read_text(encoding="utf-8").split("\n\n")
    assert verbs_of(title) == [], "a title is a noun of the field"
    assert decided.startswith("Decided ")
    dates = sorted(re.findall(r"\b20\d\d-\d\d-\d\d\b", decided))
    rows = re.findall(rf"^\| \[{note.stem}\]\({note.name}\) \| [^|]+ \| ([^|]+) \|", INDEX, re.MULTILINE)
    assert rows == [" to ".join(dict.fromkeys((dates[0], dates[-1])))]


def verbs_of(title: str) -> list[str]:
    return NO_NOUNS.findall(title.lower())


def test_titles_with_verbs_are_found() -> None:
    assert verbs_of("# What Redis is") == ["what", "is"]
    assert verbs_of("# Quantised GEMM") == []
