"""Changes of models by administrators while gateways run: aliases with their presets, and files kept on this machine."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import InvalidRequestError
from gateway.answers.catalogue import Catalogue
from gateway.http.problem import ConflictError, NotKeptError
from gateway.tenants.kept import KeptKeys
from gateway.tenants.register import Change, KeyConflictError, Register, UnknownKeyError
from gateway.tenants.shares import NO_PRESET, Preset, Share, check_shares

ALIAS = r"^[A-Za-z0-9_*][A-Za-z0-9_.:/@+-]{0,127}$"


class ModelFiles(Protocol):
    """The models whose files are on this gateway's machine. Names are those of `baton pull`."""

    async def kept(self) -> list[dict[str, Any]]:
        """Each with `name`, `bytes`, `shared_bytes`, `is_whole` and `is_served`. Raises UnavailableError."""
        ...

    def fetch(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Fetch a model: `status` of each step, and `completed` and `total` bytes. Closing it stops, and keeps what came.

        Raises InvalidRequestError, ModelNotFoundError, OverloadedError, UnavailableError.
        """
        ...

    async def remove(self, name: str) -> int:
        """Remove a model that nobody serves; return the bytes that are free now. Raises NotKeptError, ConflictError."""
        ...


async def changed(kept: KeptKeys, to: Change) -> Register:
    """The register after `to`, on disk. Raises NotKeptError, ConflictError, UnavailableError, and what `to` raises besides."""
    try:
        return await kept.change(to)
    except UnknownKeyError as error:
        raise NotKeptError(error.message, param=error.param) from None
    except KeyConflictError as error:
        raise ConflictError(error.message, param=error.param) from None


class MadeAliases:
    """Aliases set through any gateway, and valid at all within a second."""

    def __init__(self, kept: KeptKeys, catalogue: Catalogue) -> None:
        self._kept = kept
        self._catalogue = catalogue
        kept.listen(self._take)

    def _take(self, register: Register) -> None:
        aliases = register.aliases
        self._catalogue.take_aliases(
            {name: tuple(alias.shares) for name, alias in aliases.items()},
            {name: alias.preset for name, alias in aliases.items()},
        )

    def __contains__(self, name: str) -> bool:
        return name in self._kept.register.aliases

    async def set(self, name: str, shares: Sequence[Share], preset: Preset | None = None) -> tuple[Share, ...]:
        """Set an alias: its next requests are shared out so. The shares before are kept for a rollback.

        `preset` None: it keeps its own. Raises InvalidRequestError, ConflictError, UnavailableError.
        """
        if name in self._catalogue.own_names:
            raise ConflictError(f"{name!r} is a served model's name: choose another one", param="name")
        pooled = [share.model for share in shares if share.model in self._catalogue.pooled]
        if pooled and len(shares) > 1:
            text = f"shares: {pooled[0]!r} makes vectors or scores, which aren't comparable with another model's"
            raise InvalidRequestError(f"{text}: give it 100 percent", param="shares")
        try:
            check_shares(shares, (*self._catalogue.names, *self._catalogue.pooled))
        except ValueError as error:
            raise InvalidRequestError(f"shares: {error}", param="shares") from None
        before = list(self.shares(name))
        register = await changed(self._kept, lambda register: register.with_alias(name, list(shares), before, preset))
        return tuple(register.aliases[name].shares)

    async def copy(self, name: str, of: str, preset: Preset = NO_PRESET) -> tuple[Share, ...]:
        """Give a model, or an alias with its shares, a further name; `preset` goes before what `of` brings.

        Raises as `set`, and for a name that can't be one.
        """
        if not re.fullmatch(ALIAS, name):  # `match` would take a line's end at its end
            raise InvalidRequestError(
                f"{name[:128]!r} can't be a model's name: letters, digits, `_.:/@+-`, 128 at most", param="name"
            )
        meant = self._meant(of)
        shares = self.shares(meant) or (Share(model=meant, percent=100.0),)
        return await self.set(name, shares, preset.over(self._catalogue.preset(of)))

    def shares(self, name: str) -> tuple[Share, ...]:
        """An alias's shares; none if there is no such alias."""
        found = self._catalogue.aliases.get(name, ())
        return (Share(model=found, percent=100.0),) if isinstance(found, str) else tuple(found)

    def _meant(self, name: str) -> str:
        return self._catalogue.pooled_name(name) or self._catalogue.shared_alias(name) or self._catalogue.own_name(name)

    async def roll_back(self, name: str) -> tuple[Share, ...]:
        """Put an alias's earlier shares back; again, the later ones. Raises NotKeptError, UnavailableError."""
        register = await changed(self._kept, lambda register: register.rolled_back(name))
        return tuple(register.aliases[name].shares)

    async def drop(self, name: str) -> None:
        """Drop what was set; an alias of the gateways' settings is as it was there. Raises NotKeptError, UnavailableError."""
        await changed(self._kept, lambda register: register.without_alias(name))


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that this gateway can make; None: it can't."""

    aliases: MadeAliases | None = None
    files: ModelFiles | None = None
