"""Who may use the gateway: API keys, their tenants, and what each may have.

Only SHA-256 hashes of keys are kept; keys are random and long, so a hash need not be slow.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.settings import ConfigError
from gateway.tenants.budgets import UNLIMITED, Limits

DEFAULT = "default"
# Routes without a key ("/" shows no data), with the admin key, and with it if there is one.
CONSOLE_PAGES = ("chat", "overview", "requests", "fleet", "planner", "batches", "tenants")  # addresses of one page
OPEN_PATHS = ("/health", "/ready", "/console/static", *(f"/console/{page}" for page in CONSOLE_PAGES))
ADMIN_PATHS = ("/admin",)
OPERATOR_PATHS = ("/metrics", "/debug", "/console")
TENANT_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
_HASH = r"^[0-9a-fA-F]{64}$"
_FEWEST_KEY_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A customer."""

    name: str = DEFAULT
    weight: float = 1.0  # its share of work while others wait
    queue_share: float = 1.0  # share of the waiting queue that it may fill
    max_priority: int = 100
    limits: Limits = UNLIMITED
    cache_salt: str = ""  # tenants with different ones never share KV

    def salt(self, asked: str) -> str:
        """The salt of block hashes, from the tenant's and the client's own. No client can ask for another tenant's."""
        client = f"client:{asked}" if asked else ""
        if not self.cache_salt:
            return client
        return f"tenant:{hashlib.sha256(self.cache_salt.encode()).hexdigest()}:{client}"


ANYBODY = Tenant()


class Keys:
    """Hashes of keys, and whose they are."""

    def __init__(self, known: Iterable[tuple[bytes, Tenant]], *, admin: Iterable[bytes] = ()) -> None:
        self._known = list(known)
        self._admin = list(admin)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def has_admin(self) -> bool:
        return bool(self._admin)

    def tenant_of(self, key: str) -> Tenant | None:
        digest = hash_key(key)
        matches = [hmac.compare_digest(digest, known) for known, _ in self._known]  # compare with all: constant time
        return self._known[matches.index(True)][1] if any(matches) else None

    def is_admin(self, key: str) -> bool:
        digest = hash_key(key)
        matches = [hmac.compare_digest(digest, known) for known in self._admin]
        return any(matches)


class Tenants:
    """The tenants now; `reload` reads their file again."""

    def __init__(
        self, *, api_keys: Sequence[str] = (), admin_key: str = "", path: Path | None = None, needs_keys: bool = False
    ) -> None:
        self._needs_keys = needs_keys  # the network could ask
        self._api_keys = api_keys
        self._admin_key = admin_key
        self._path = path
        self.reload()

    def reload(self) -> None:
        """Read the file again; it holds for open connections, too. Raises ConfigError, and changes nothing then."""
        file = _read(self._path) if self._path else _File()
        named = {name: entry.tenant(name) for name, entry in file.tenants.items()}
        anybody = named.get(DEFAULT, Tenant(queue_share=0.5 if named else 1.0))
        known = [(hash_key(key), anybody) for key in self._api_keys]
        known += [(digest, named[name]) for name, entry in file.tenants.items() for digest in entry.hashes()]
        admin = [bytes.fromhex(digest) for digest in file.admin_keys_sha256]
        admin += [hash_key(self._admin_key)] if self._admin_key else []
        _check_keys([digest for digest, _ in known] + admin, self._path)
        if self._needs_keys and not known:
            raise ConfigError(f"--tenants {self._path}: has no key, and --host is not loopback: `baton keys new`")
        self.keys = Keys(known, admin=admin)
        self.default = anybody
        self.names = sorted({DEFAULT, *named})
        self.limits = {name: tenant.limits for name, tenant in named.items() if tenant.limits != UNLIMITED}
        self._named = named | {DEFAULT: anybody}

    def named(self, name: str) -> Tenant | None:
        """The tenant of this name now: its work may outlive its keys."""
        return self._named.get(name)

    @property
    def open_to_all(self) -> bool:
        return not len(self.keys)


def is_under(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def is_open(path: str) -> bool:
    return path == "/" or is_under(path, OPEN_PATHS)


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def new_key() -> str:
    """A new key of 256 random bits."""
    return f"baton-{secrets.token_urlsafe(32)}"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: list[Annotated[str, Field(min_length=_FEWEST_KEY_CHARS)]] = []
    keys_sha256: list[Annotated[str, Field(pattern=_HASH)]] = []
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    queue_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    max_priority: Annotated[int, Field(ge=-100, le=100)] = 0
    requests_per_minute: Annotated[int, Field(ge=0)] = 0
    tokens_per_minute: Annotated[int, Field(ge=0)] = 0
    max_concurrent: Annotated[int, Field(ge=0, le=10_000)] = 0
    cache_salt: Annotated[str, Field(max_length=256)] | None = None  # None: the tenant's name; "": shared

    def hashes(self) -> list[bytes]:
        return [hash_key(key) for key in self.keys] + [bytes.fromhex(digest) for digest in self.keys_sha256]

    def tenant(self, name: str) -> Tenant:
        own = "" if name == DEFAULT else name
        return Tenant(
            name=name,
            weight=self.weight,
            queue_share=self.queue_share,
            max_priority=self.max_priority,
            limits=Limits(
                requests_per_minute=self.requests_per_minute,
                tokens_per_minute=self.tokens_per_minute,
                max_concurrent=self.max_concurrent,
            ),
            cache_salt=own if self.cache_salt is None else self.cache_salt,
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    admin_keys_sha256: list[Annotated[str, Field(pattern=_HASH)]] = []
    tenants: dict[Annotated[str, Field(pattern=TENANT_NAME)], _Entry] = {}


def _read(path: Path) -> _File:
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return _File.model_validate(content)
    except OSError as error:
        raise ConfigError(f"--tenants {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tenants {path}: not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]  # an input may be a key
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"--tenants {path}: {where}: unknown; remove it or check its spelling") from None
        told = first["msg"][0].lower() + first["msg"][1:]
        if "keys_sha256" in where:
            told = "must be 64 hexadecimal digits: `baton keys new` prints them"
        raise ConfigError(f"--tenants {path}: {where}: {told}") from None


def _check_keys(digests: list[bytes], path: Path | None) -> None:
    if len(set(digests)) < len(digests):
        where = f"--tenants {path}" if path else "--api-keys"
        raise ConfigError(f"{where}: a key is there twice: give every tenant, and the admin, keys of their own")
