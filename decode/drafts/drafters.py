"""The drafters by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from decode.drafts.drafter import Drafter
from decode.drafts.head import HeadDrafts
from decode.drafts.settings import LookupSettings
from decode.drafts.suffix import Lookup

DRAFTERS: Mapping[str, Callable[[LookupSettings], Drafter]] = {
    "suffix": Lookup,
    "dflash": lambda _: HeadDrafts(),
    "draft_model": lambda _: HeadDrafts(),
    "dspark": lambda _: HeadDrafts(),
    "eagle3": lambda _: HeadDrafts(),
    "peagle": lambda _: HeadDrafts(),
    "mtp": lambda _: HeadDrafts(),
    "ngram": lambda settings: Lookup(settings.without_answers()),
}
