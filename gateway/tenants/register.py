"""Keys, tenants and aliases made at run time: a single record, and the operations on it. No I/O."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from common.errors import InvalidRequestError
from common.messages import NO_GOAL, Goal
from gateway.tenants.budgets import Limits
from gateway.tenants.shares import NO_PRESET, Preset, Share

MAX_KEYS = 2_000  # neither revoked nor expired
MAX_ENDED_KEYS = 200  # the newest are remembered
MAX_TENANTS = 1_000
MAX_ALIASES = 100
MAX_PRESET_BYTES = 32 << 10
MAX_PRESETS_BYTES = 256 << 10
_KEY_ID = re.compile(r"key_[0-9a-f]{16}\Z")


class UnknownKeyError(InvalidRequestError):
    """No key, or no tenant, of this name was made here."""

    code = "not_found"


class KeyConflictError(InvalidRequestError):
    """The request contradicts the present keys and tenants."""

    code = "conflict"


class MadeKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key by its SHA-256. Times are unix seconds, 0: never."""

    id: str
    digest: bytes
    tenant: str = ""  # "" for an admin key
    name: str = ""  # a note by its creator
    is_admin: bool = False
    created_at: int = 0
    created_by: str = ""  # id of an admin key
    expires_at: int = 0
    revoked_at: int = 0
    revoked_by: str = ""

    def is_over(self, now: float) -> bool:
        return bool(self.revoked_at) or 0 < self.expires_at <= now

    def as_json(self, now: float) -> dict[str, Any]:
        state = "revoked" if self.revoked_at else "expired" if self.is_over(now) else "active"
        times = ("created_at", "expires_at", "revoked_at")
        return {
            "id": self.id,
            "name": self.name,
            "tenant": None if self.is_admin else self.tenant,
            "admin": self.is_admin,
            "state": state,
            "source": "made",
            **{name: getattr(self, name) or None for name in times},
            "created_by": self.created_by or None,
            "revoked_by": self.revoked_by or None,
        }


class MadeTenant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tenant's options, as in the file of `--tenants`."""

    weight: float = 1.0
    queue_share: float = 0.5
    max_priority: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0
    cache_salt: str | None = None
    goal: Goal = NO_GOAL
    kv_share: float = 1.0
    loads: list[str] | None = None  # None: any

    @property
    def limits(self) -> Limits:
        return Limits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_concurrent=self.max_concurrent,
        )


class MadeAlias(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An alias's shares, those before, for a rollback, and what it brings to its requests."""

    shares: list[Share]
    before: list[Share] = []
    preset: Preset = NO_PRESET


class Register(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All keys, tenants and aliases made. `closed`: there was an API key once, so requests without one are never served again."""

    v: int = 1
    closed: bool = False
    keys: dict[str, MadeKey] = {}
    tenants: dict[str, MadeTenant] = {}
    aliases: dict[str, MadeAlias] = {}

    def with_key(self, key: MadeKey, now: float) -> Register:
        """Add a key. Raises KeyConflictError if there are too many."""
        if sum(not one.is_over(now) for one in self.keys.values()) >= MAX_KEYS:
            raise KeyConflictError(f"{MAX_KEYS} keys are in use, the limit: revoke some first")
        kept = self._pruned(now) | {key.id: key}
        return msgspec.structs.replace(self, keys=kept, closed=self.closed or not key.is_admin)

    def revoked(self, key_id: str, *, by: str, now: float) -> Register:
        """Revoke a key; idempotent. Raises UnknownKeyError."""
        key = self.keys.get(key_id)
        if key is None:
            raise UnknownKeyError(f"no key {key_id[:100]!r} was made here: GET /admin/keys lists them", param="key_id")
        if key.revoked_at:
            return self
        ended = msgspec.structs.replace(key, revoked_at=int(now), revoked_by=by)
        return msgspec.structs.replace(self, keys=self.keys | {key_id: ended})

    def with_tenant(self, name: str, tenant: MadeTenant) -> Register:
        """Create or change a tenant. Raises KeyConflictError if there are too many."""
        if name not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            raise KeyConflictError(f"{MAX_TENANTS} tenants were made, the limit: delete some first")
        return msgspec.structs.replace(self, tenants=self.tenants | {name: tenant})

    def without_tenant(self, name: str, now: float) -> Register:
        """Delete a tenant. Raises UnknownKeyError, or KeyConflictError while it has keys."""
        if name not in self.tenants:
            raise UnknownKeyError(
                f"no tenant {name[:100]!r} was made here: GET /admin/tenants lists them", param="name"
            )
        held = sum(key.tenant == name and not key.is_over(now) for key in self.keys.values())
        if held:
            raise KeyConflictError(f"tenant {name} has {held} keys: revoke them first", param="name")
        return msgspec.structs.replace(self, tenants={one: kept for one, kept in self.tenants.items() if one != name})

    def with_alias(self, name: str, shares: list[Share], before: list[Share], preset: Preset | None = None) -> Register:
        """Set an alias; `before`: its shares until now, if none were made. `preset` None: it keeps its own.

        Raises KeyConflictError if there are too many, or too much.
        """
        if name not in self.aliases and len(self.aliases) >= MAX_ALIASES:
            raise KeyConflictError(f"{MAX_ALIASES} aliases were set, the limit: delete some first")
        known = self.aliases.get(name)
        own = NO_PRESET if known is None else known.preset
        alias = MadeAlias(shares=shares, before=before if known is None else known.shares, preset=preset or own)
        if known is not None and (known.shares, known.preset) == (shares, alias.preset):
            return self
        self._check_size(name, alias.preset)
        return self._with_alias(name, alias)

    def _check_size(self, name: str, preset: Preset) -> None:
        """Raises KeyConflictError."""
        others = sum(_size(alias.preset) for other, alias in self.aliases.items() if other != name)
        if (size := _size(preset)) > min(MAX_PRESET_BYTES, MAX_PRESETS_BYTES - others):
            most = f"{MAX_PRESET_BYTES} are allowed, and {MAX_PRESETS_BYTES} for all names"
            raise KeyConflictError(f"system and messages of {name[:100]!r} have {size} bytes: {most}", param="system")

    def rolled_back(self, name: str) -> Register:
        """Exchange an alias's shares and those before. Raises UnknownKeyError."""
        alias = self.aliases.get(name)
        if alias is None or not alias.before:
            raise UnknownKeyError(
                f"{name[:100]!r} has no earlier shares: `baton alias list` or GET /admin/aliases has them", param="name"
            )
        return self._with_alias(name, MadeAlias(shares=alias.before, before=alias.shares, preset=alias.preset))

    def without_alias(self, name: str) -> Register:
        """Drop an alias. Raises UnknownKeyError."""
        if name not in self.aliases:
            raise UnknownKeyError(
                f"no alias {name[:100]!r} was set: `baton alias list` or GET /admin/aliases has them", param="name"
            )
        return msgspec.structs.replace(self, aliases={one: kept for one, kept in self.aliases.items() if one != name})

    def _with_alias(self, name: str, alias: MadeAlias) -> Register:
        return msgspec.structs.replace(self, aliases=self.aliases | {name: alias})

    def _pruned(self, now: float) -> dict[str, MadeKey]:
        """Drop the oldest ended keys."""
        over = [key for key in self.keys.values() if key.is_over(now)]
        over.sort(key=lambda key: key.revoked_at or key.expires_at)
        dropped = {key.id for key in over[: max(0, len(over) - MAX_ENDED_KEYS)]}
        return {name: key for name, key in self.keys.items() if name not in dropped}


Change = Callable[[Register], Register]

NOTHING = Register()
register_decoder = msgspec.msgpack.Decoder(Register)


def _size(preset: Preset) -> int:
    return len(msgspec.msgpack.encode(preset))


def new_key_id() -> str:
    return f"key_{secrets.token_hex(8)}"


def is_key_id(text: str) -> bool:
    return _KEY_ID.match(text) is not None
