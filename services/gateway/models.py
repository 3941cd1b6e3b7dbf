"""Settings of the models that a gateway serves: names, folders, aliases with their shares, and how long they stay loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, field_validator, model_validator

from common.settings import ConfigError
from services.runtime.settings import ModelSettings, default_name, from_root

# Imported on use: help waits for no gateway.
if TYPE_CHECKING:
    from gateway.tenants.shares import Alias, Share

# In a pattern of names; as a folder, the models of a pattern.
ANY = "*"


def _are_named(models: Sequence[str]) -> bool:
    """True for several models, a pattern, or NAME=FOLDER; an address may have a = of its own."""
    return len(models) > 1 or any(ANY in each or re.match("(?![^=]*://)[^=]*=", each) for each in models)


class ServedModelOptions(ModelSettings):
    """The models of a gateway, by their names in the API."""

    served_models: str = Field(
        "",
        description="models to serve, as name=folder by commas; empty: those of --model, which may be given more than once, as "
        "folder, name=folder, or a pattern as org/*: models of such names, also those that are pulled later",
    )
    worker_models: str = Field(
        "",
        description="what workers call the models, as model=its-name by commas, or its-name alone for a single model; empty: as "
        "this gateway does",
    )
    alias: str = Field(
        "",
        description="further names of the served models, as gpt-4o=demo, by commas or one flag each; *=demo: any other name; "
        "shares of several models: chat=old@95%,chat=new@5%, or new@tenant:NAME, new@header:NAME:VALUE",
    )
    keep_alive: str = Field(
        "off",
        description="load models when they are asked for, and unload them so long after their last request, as 5m or 1h30m; "
        "5m,1h: they sleep for an hour before, with their weights in host memory; -1: they stay; off: all are loaded at the "
        "start. For `baton up`, and for gateways beside a host",
    )

    @model_validator(mode="before")
    @classmethod
    def _several_models(cls, values: Any) -> Any:
        """`--model` given more than once names all models to serve; `served_models` gets them by name. Raises ConfigError."""
        if not isinstance(values, dict):
            return values
        models = entries(str(values.get("model", "")))
        patterns = [model for model in models if ANY in model and "=" not in model]
        if not _are_named(models) or Path(str(values["model"])).exists():
            return values
        if len(models) == len(patterns):
            others = " ".join(f"--model '{pattern}'" for pattern in patterns)
            raise ConfigError(
                f"--model {patterns[0]}: names models that are pulled later, and one that is here is needed beside them, which "
                f"is loaded on demand as they are: write --model demo {others}"
            )
        if values.get("served_models"):
            raise ConfigError("--served-models: several --model name the models already; give one of the two")
        if values.get("served_model_name"):
            raise ConfigError("--served-model-name names a single model; of several write --model NAME=FOLDER")
        named = [entry for entry in models if entry not in patterns]
        whole = [entry if "=" in entry else f"{default_name(entry)}={entry}" for entry in named]
        whole += [f"{pattern}={ANY}" for pattern in patterns]
        return values | {"served_models": ",".join(whole), "model": whole[0].partition("=")[2]}

    @property
    def folders(self) -> dict[str, Path]:
        """The models to serve: name in the API -> folder with the tokenizer."""
        here = {name: from_root(Path(folder)) for name, folder in pairs(self.served_models) if folder != ANY}
        return here or {self.served_name: self.model}

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of names: models that are pulled later and have such a name are served, too, where a host has them."""
        return tuple(name for name, folder in pairs(self.served_models) if folder == ANY)

    @property
    def called_by_workers(self) -> dict[str, str]:
        """The workers' name of each model, if it differs. Raises ConfigError."""
        named = dict(entry.rpartition("=")[::2] for entry in entries(self.worker_models))
        folders = self.folders
        if "" in named and len(folders) == 1:
            named = {next(iter(folders)): named[""]}
        for model in named:
            if model not in folders:
                known = ", ".join(map(repr, folders))
                raise ConfigError(f"--worker-models: {model!r} is not served: write model=its-name, of {known}")
        called = [named.get(model, model) for model in folders]
        for name in called:
            if called.count(name) > 1:
                raise ConfigError(f"--worker-models: two models have the workers of {name!r}")
        return {model: name for model, name in named.items() if name}

    @property
    def aliases(self) -> dict[str, Alias]:
        """Aliases -> the served model's name, or several with their shares. Raises ConfigError."""
        from gateway.tenants.shares import check_shares

        folders, found = self.folders, self._whole_aliases()
        for name, shares in self._shared_aliases().items():
            if name in folders:
                raise ConfigError(f"--alias {name}: {name!r} is a served model already: choose another name")
            if name in found:
                raise ConfigError(f"--alias {name}: {found[name]!r} has no share: write {name}={found[name]}@90%")
            try:
                check_shares(shares, folders)
            except ValueError as error:
                raise ConfigError(f"--alias {name}: {error}") from None
            found[name] = tuple(shares)
        return found

    def _whole_aliases(self) -> dict[str, Alias]:
        """The aliases of one model each. Raises ConfigError."""
        folders = self.folders
        found: dict[str, Alias] = {}
        for entry, name, model in self._aliased():
            if "@" in model and model not in folders:
                continue  # a share
            if not name or model not in folders:
                raise ConfigError(f"--alias {entry}: write NAME=MODEL, with a served model: {', '.join(folders)}")
            if name in folders or found.get(name, model) != model:
                raise ConfigError(
                    f"--alias {entry}: {name!r} is {found.get(name, 'a served model')} already: choose another name"
                )
            found[name] = model
        return found

    def _shared_aliases(self) -> dict[str, list[Share]]:
        """The aliases of several models. Raises ConfigError."""
        from gateway.tenants.shares import read_share

        found: dict[str, list[Share]] = {}
        for entry, name, share in self._aliased():
            if "@" in share and share not in self.folders:
                try:
                    found.setdefault(name, []).append(read_share(share))
                except ValueError as error:
                    raise ConfigError(f"--alias {entry}: {error}") from None
        return found

    def _aliased(self) -> list[tuple[str, str, str]]:
        """Each entry with its name, and the model or share that it names."""
        parts = [(entry, *entry.partition("=")[::2]) for entry in entries(self.alias)]
        return [(entry, name.strip(), model.strip()) for entry, name, model in parts]

    @property
    def loads_on_demand(self) -> bool:
        return self.keep_alive != "off"

    @property
    def model_keep_s(self) -> float:
        """Seconds for which a loaded model stays after its last request."""
        return self._kept_s[0]

    @property
    def model_sleeps_s(self) -> float:
        """Seconds for which an idle model then sleeps before it is unloaded."""
        return self._kept_s[1]

    @property
    def _kept_s(self) -> tuple[float, float]:
        from gateway.answers.ask import FOREVER_S, lasting_s

        if not self.loads_on_demand:
            return FOREVER_S, 0.0
        awake, _, asleep = self.keep_alive.partition(",")
        return lasting_s(awake.strip()), lasting_s(asleep.strip()) if asleep else 0.0

    @field_validator("served_models")
    @classmethod
    def _named(cls, models: str) -> str:
        names = set[str]()
        for entry, (name, folder) in zip(entries(models), pairs(models), strict=True):
            if not name or not folder:
                raise ConfigError(f"--served-models: {entry!r} is not name=folder, like chat=/models/chat")
            if (ANY in name) != (folder == ANY):
                raise ConfigError(
                    f"--served-models: {entry!r}: a pattern of names has {ANY} in it, and {ANY} as its folder"
                )
            if name in names:
                raise ConfigError(
                    f"--model, or --served-models: two models are called {name!r}; give each its own name"
                )
            names.add(name)
        return models

    @model_validator(mode="after")
    def _patterns_need_a_host(self) -> Self:
        if self.patterns and not self.loads_on_demand:
            raise ConfigError(f"--model {self.patterns[0]}: such models are loaded on demand: give --keep-alive, as 5m")
        return self

    @field_validator("keep_alive")
    @classmethod
    def _lasts(cls, text: str) -> str:
        from gateway.answers.ask import lasting_s

        try:
            for part in text.split(",", 1) if text != "off" else ():
                lasting_s(part.strip())
        except ValueError as error:
            raise ConfigError(f"--keep-alive: {error}, or off") from None
        return text


def entries(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def pairs(served_models: str) -> list[tuple[str, str]]:
    """Name and folder of each entry; an entry without `=` has no folder."""
    return [(name, folder) for name, _, folder in (entry.partition("=") for entry in entries(served_models))]
