"""Types of settings (`services.runtime.loading` reads them), and the error of an invalid one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

ROOT = Path(__file__).resolve().parents[1]
Port = Annotated[int, Field(ge=0, le=65_535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class Form:
    """The description of a pattern for people."""

    words: str


Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,64}$"), Form("up to 64 letters, digits, _ and -")]


@dataclass(frozen=True, slots=True)
class Word:
    """A word in place of a number: `auto`, `off`."""

    word: str
    number: int

    def __call__(self, value: object) -> object:
        return self.number if value == self.word else value


AUTO, OFF = BeforeValidator(Word("auto", 0)), BeforeValidator(Word("off", 0))
AUTO_BELOW_0 = BeforeValidator(Word("auto", -1))


class ConfigError(Exception):
    """A setting is wrong. The message names the flag and says what to do."""


class Options(BaseModel):
    """Base of option groups: frozen, unknown fields are errors. Pydantic builds only the final classes, on first use."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)
