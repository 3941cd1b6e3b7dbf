"""`--speculative-config`: a drafter's name, or its settings in vLLM's form."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.words import MOST_DRAFTED
from decode.drafts.settings import LookupSettings, MatchLengths

MOST_CHARS = 4096
DRAFTED = 8  # tokens of a sequence in a pass, unless told otherwise
DRAFTED_BY_HEADS = 3
DRAFTED_BY_MODELS = 4
DRAFTED_BY_BLOCKS = 7
OTHERS = ("eagle", "medusa", "mlp_speculator", "dflash2")

Count = Annotated[int, Field(ge=1, le=MOST_DRAFTED, strict=True)]
Match = Annotated[int, Field(ge=1, le=64, strict=True)]
Folder = Annotated[str, Field(min_length=1)]


class _Form(BaseModel):
    """The fields of every method."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_speculative_tokens: Count = DRAFTED
    enable_adaptive_verification: bool = True

    def lookup(self) -> LookupSettings:
        """The settings of a lookup; the defaults where weights draft."""
        return LookupSettings()


class _Suffix(_Form):
    """Suffix decoding (arXiv 2411.04975), by vLLM's names."""

    method: Literal["suffix"]
    suffix_decoding_max_tree_depth: Match = 24
    suffix_decoding_max_spec_factor: Annotated[float, Field(gt=0, le=16)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] = 0.1
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0, strict=True)] | None = None

    def lookup(self) -> LookupSettings:
        lengths = MatchLengths(min(3, self.suffix_decoding_max_tree_depth), self.suffix_decoding_max_tree_depth)
        settings = LookupSettings(
            lengths=lengths,
            factor=self.suffix_decoding_max_spec_factor,
            min_probability=self.suffix_decoding_min_token_prob,
        )
        # Earlier answers are bounded by their tokens here, so a number of requests says only whether there are any.
        return settings.without_answers() if self.suffix_decoding_max_cached_requests == 0 else settings


class _NGram(_Form):
    """Prompt lookup, by vLLM's names."""

    method: Literal["ngram"]
    prompt_lookup_min: Match = 3
    prompt_lookup_max: Match = 5

    def lookup(self) -> LookupSettings:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max")
        return LookupSettings.ngram(prompt_lookup_min=self.prompt_lookup_min, prompt_lookup_max=self.prompt_lookup_max)


class _Mtp(_Form):
    """The layer for multi-token prediction that the model's own checkpoint brings."""

    method: Literal["mtp"]
    num_speculative_tokens: Count = DRAFTED_BY_HEADS


class _Eagle3(_Form):
    """A draft head, EAGLE-3 or 3.1; or P-EAGLE, which vLLM calls `eagle3` with `parallel_drafting`."""

    method: Literal["eagle3"]
    model: Folder
    num_speculative_tokens: Count = DRAFTED_BY_HEADS
    parallel_drafting: bool | None = None  # the checkpoint tells


class _Block(_Form):
    """A head that drafts several tokens at once."""

    method: Literal["peagle", "dflash", "dspark"]
    model: Folder
    num_speculative_tokens: Count = DRAFTED_BY_BLOCKS


class _DraftModel(_Form):
    """Any smaller model of the same tokenizer."""

    method: Literal["draft_model"]
    model: Folder
    num_speculative_tokens: Count = DRAFTED_BY_MODELS


FORMS: dict[str, type[_Suffix | _NGram | _Eagle3 | _Mtp | _Block | _DraftModel]] = {
    "suffix": _Suffix,
    "ngram": _NGram,
    "eagle3": _Eagle3,
    "mtp": _Mtp,
    "peagle": _Block,
    "dflash": _Block,
    "dspark": _Block,
    "draft_model": _DraftModel,
}
# vLLM's names for families, which the checkpoint tells here.
SAME_AS_MTP = frozenset(
    f"{family}_mtp" for family in ("deepseek", "glm4_moe", "glm4_moe_lite", "mimo", "qwen3_next", "qwen3_5")
)


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """A drafter by name, the most tokens it drafts of a sequence in a pass, and its settings.

    Unless it `adapts`, as many are verified even where a larger step takes longer than they save.
    """

    method: str
    most: int
    adapts: bool
    lookup: LookupSettings
    folder: Path | None = None  # a head's or a draft model's

    def draft_of(self, model: Path) -> Path | None:
        """The folder of a drafter's weights: the model's own for its layer for multi-token prediction."""
        return model if self.method == "mtp" else self.folder

    @property
    def has_weights(self) -> bool:
        """True if a head or a model drafts, and no lookup."""
        return self.method == "mtp" or self.folder is not None

    @property
    def is_model(self) -> bool:
        return self.method == "draft_model"

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig | None:
        """Read `suffix`, `suffix:K` or a JSON object; None for nothing. Raises ValueError, naming the field and the remedy."""
        if not text:
            return None
        if len(text) > MOST_CHARS:
            raise ValueError(f"at most {MOST_CHARS} characters are read")
        form = _fields(text)
        method = form.get("method")
        if isinstance(method, str) and method in SAME_AS_MTP:
            method = form["method"] = "mtp"
        if method in OTHERS:
            raise ValueError(f"method {method} isn't served yet: use {', '.join(FORMS)}")
        if not isinstance(method, str) or method not in FORMS:
            raise ValueError(f"method must be one of {', '.join(FORMS)}, not {method!r}")
        try:
            read = FORMS[method].model_validate(form)
        except ValidationError as error:
            raise ValueError(_explained(error, FORMS[method])) from None
        folder = Path(read.model) if isinstance(read, _Eagle3 | _Block | _DraftModel) else None
        return cls(method, read.num_speculative_tokens, read.enable_adaptive_verification, read.lookup(), folder)


def _fields(text: str) -> dict[str, object]:
    if not text.lstrip().startswith("{"):
        method, colon, count = text.partition(":")
        if colon and not count.isdecimal():
            raise ValueError(f"{text!r} is not METHOD:K with a number K")
        return {"method": method} | ({"num_speculative_tokens": int(count)} if colon else {})
    try:
        found: dict[str, object] = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON object, and no METHOD or METHOD:K: {error}") from None
    return found


def _explained(error: ValidationError, form: type[BaseModel]) -> str:
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, form.model_fields, n=1)
        known = f"did you mean {near[0]}?" if near else f"there are {', '.join(form.model_fields)}"
        return f"unknown field {name}: {known}"
    given = "" if first["type"] == "missing" else f", not {first['input']!r}"
    return f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}{given}"
