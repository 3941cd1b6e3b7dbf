"""Fill-in-the-middle: the tokens that models mark its parts by, and prompts built from them.

Models are told apart by the marks in their vocabulary. What clients write never becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.answers.ask import Infill

REPOSITORY = "project"  # a placeholder name
AFTER_SHARE = 4  # fraction of a truncated prompt that is `after`: one in so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """A family's marks as in its vocabulary."""

    before: str
    after: str
    middle: str = ""  # "": the text to be written follows `before` directly
    after_first: bool = False
    repository: str = ""  # "": the family has no marks for files
    file: str = ""
    others: tuple[str, ...] = ()  # which also end the middle


FAMILIES = (
    Marks(
        before="<|fim_prefix|>", after="<|fim_suffix|>", middle="<|fim_middle|>",
        repository="<|repo_name|>", file="<|file_sep|>", others=("<|fim_pad|>", "<|file_separator|>"),
    ),  # Qwen, CodeGemma
    Marks(
        before="<fim_prefix>", after="<fim_suffix>", middle="<fim_middle>",
        repository="<repo_name>", file="<file_sep>", others=("<fim_pad>",),
    ),  # StarCoder, Granite
    Marks(before="<fim-prefix>", after="<fim-suffix>", middle="<fim-middle>", others=("<fim-pad>",)),  # SantaCoder
    Marks(before="<｜fim▁begin｜>", after="<｜fim▁hole｜>", middle="<｜fim▁end｜>"),  # DeepSeek
    Marks(before="<|code_prefix|>", after="<|code_suffix|>", middle="<|code_middle|>"),  # GLM
    Marks(before="<[fim-prefix]>", after="<[fim-suffix]>", middle="<[fim-middle]>", after_first=True),  # Seed
    Marks(before="▁<PRE>", after="▁<SUF>", middle="▁<MID>", others=("▁<EOT>",)),  # Code Llama
    Marks(before="[PREFIX]", after="[SUFFIX]", middle="[MIDDLE]", after_first=True),  # Mistral
    Marks(before="[PREFIX]", after="[SUFFIX]", after_first=True),
)  # fmt: skip


class InfillForm:
    """A model's form of fill-in-the-middle prompts."""

    def __init__(self, marks: Marks, id_of: Callable[[str], int | None]) -> None:
        self._ids = {name: found for name in _names(marks) if (found := id_of(name)) is not None}
        self._marks = marks
        self._has_files = marks.repository in self._ids and marks.file in self._ids

    @property
    def ends(self) -> list[int]:
        """Tokens that end the middle, in addition to the model's own EOS."""
        return sorted(set(self._ids.values()))

    def tokens(
        self, prompt: Infill, encode: Callable[[str], list[int]], start: Sequence[int], keep: int | None
    ) -> list[int]:
        """The prompt's tokens after those that `start` every text. If it exceeds `keep`, files are dropped first, then the text
        farthest from the middle.
        """
        marks, ids = self._marks, self._ids
        before, after = encode(prompt.before), encode(prompt.after)
        begun = encode(prompt.begun)
        files = self._files(prompt, encode)
        if keep is not None:
            room = max(0, keep - len(start) - len(begun) - 3)
            after = after[: max(room // AFTER_SHARE, room - len(before))]
            before = before[max(0, len(before) - room + len(after)) :]
            files = files if len(files) + len(before) + len(after) <= room else []
        parts = [[ids[marks.before], *before], [ids[marks.after], *after]]
        first, second = reversed(parts) if marks.after_first else parts
        middle = [ids[marks.middle]] if marks.middle else []
        return [*start, *files, *first, *second, *middle, *begun]

    def _files(self, prompt: Infill, encode: Callable[[str], list[int]]) -> list[int]:
        """Further files of the project; families without marks for them don't get any."""
        if not (prompt.files and self._has_files):
            return []
        sign = self._ids[self._marks.file]
        found = [self._ids[self._marks.repository], *encode(f"{REPOSITORY}\n")]
        for name, text in prompt.files:
            found += [sign, *encode(f"{name}\n{text}\n")]
        return [*found, sign, *encode("current\n")]


def infill_form(id_of: Callable[[str], int | None]) -> InfillForm | None:
    """A model's form, found by its vocabulary; None: it has none."""
    for marks in FAMILIES:
        needed = filter(None, (marks.before, marks.after, marks.middle))
        if all(id_of(name) is not None for name in needed):
            return InfillForm(marks, id_of)
    return None


def _names(marks: Marks) -> list[str]:
    return [
        name for name in (marks.before, marks.after, marks.middle, marks.repository, marks.file, *marks.others) if name
    ]
