"""Access to the gateway: API keys, their tenants, and the tenants' limits.

Only SHA-256 hashes of keys are kept; keys are random and long, so a hash need not be slow.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.messages import NO_GOAL, Goal, Keep
from common.settings import ConfigError
from gateway.tenants.budgets import UNLIMITED, Limits
from gateway.tenants.register import NOTHING, MadeKey, MadeTenant, Register

DEFAULT = "default"
# Addresses of one page.
CONSOLE_PAGES = ("chat", "compare", "overview", "requests", "fleet", "models", "planner", "batches", "tenants")
CONSOLE_DATA = ("/console/state", "/console/events", "/console/history", "/console/search")
# Routes that need no key, the admin key, and the admin key if one is configured. Other console addresses are pages without data.
OPEN_PATHS = ("/health", "/ready", "/metrics/pod")
ADMIN_PATHS = ("/admin",)
METRICS_PATHS = ("/metrics",)
MODEL_PATHS = ("/api/pull", "/api/create", "/api/copy", "/api/delete")  # Ollama's: some of what they do is an admin's
OPERATOR_PATHS = (*METRICS_PATHS, "/debug", *CONSOLE_DATA)
TENANT_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
_HASH = r"^[0-9a-fA-F]{64}$"
_FEWEST_KEY_CHARS = 16
MIN_GOAL_MS, MAX_GOAL_MS = 0.001, 3_600_000  # an hour
_Milliseconds = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=MIN_GOAL_MS, le=MAX_GOAL_MS)]
_MillisecondsPerToken = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=MAX_GOAL_MS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A customer."""

    name: str = DEFAULT
    weight: float = 1.0  # its share of work while others wait
    queue_share: float = 1.0  # maximum share of the waiting queue
    max_priority: int = 100
    limits: Limits = UNLIMITED
    cache_salt: str = ""  # tenants with different ones never share KV
    goal: Goal = NO_GOAL
    kv_share: float = 1.0  # part of a pool that its cached KV may fill
    loads: tuple[str, ...] | None = None  # models that hosts load and unload for it; None: any
    key: str = field(default="", compare=False)  # id of the request's key
    is_admin: bool = field(default=False, compare=False)  # that key is an admin's

    def may_load(self, model: str) -> bool:
        """True if hosts load a model for its requests, and unload it."""
        return self.is_admin or self.loads is None or model in self.loads

    def salt(self, asked: str) -> str:
        """The salt of block hashes, from the tenant's and the client's own. No client can ask for another tenant's."""
        client = f"client:{asked}" if asked else ""
        if not self.cache_salt:
            return client
        return f"tenant:{hashlib.sha256(self.cache_salt.encode()).hexdigest()}:{client}"

    def keeps(self, asked: Keep, *, session: str) -> Keep:
        """The wish of one of its requests. A session is the tenant's own, and a header's name goes before a field's."""
        named = session or asked.session
        hashed = hashlib.sha256(f"{self.name}:{named}".encode()).hexdigest()[:32] if named else ""
        own = self.kv_share < 1
        return Keep(
            ttl_s=asked.ttl_s,
            call_ttl_s=asked.call_ttl_s,
            session=hashed,
            tenant=self.name if own else "",
            share=self.kv_share if own else 1.0,
        )


ANYBODY = Tenant()
NOBODY = Tenant(name="")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyForm:
    """The place of a key, and the answer to a client without one."""

    read: Callable[[Mapping[str, str]], str]  # reads it from a request's fields; "" if absent
    hint: str  # how to send one, for error messages
    challenge: str = ""  # `WWW-Authenticate` of a 401, if any
    scheme: Mapping[str, Any]  # OpenAPI's security scheme


def bearer_key(headers: Mapping[str, str]) -> str:
    """The key in an `Authorization: Bearer` header, or in Anthropic's or Azure's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or headers.get("api-key", "")


BEARER = KeyForm(
    read=bearer_key,
    hint="`Authorization: Bearer KEY`",
    challenge="Bearer",
    scheme={"type": "http", "scheme": "bearer", "description": "an API key; x-api-key and api-key headers do as well"},
)


def needed(kind: str, form: KeyForm) -> str:
    """Return the message for a client without a valid key of this kind."""
    return f"a valid {kind} is needed: send {form.hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """A key, valid until `ends_at` (unix seconds). `tenant` None: an admin's; if it `closes`, operators' paths need one."""

    id: str
    digest: bytes
    tenant: Tenant | None
    ends_at: float = math.inf
    closes: bool = True

    @classmethod
    def of_file(cls, digest: bytes, tenant: Tenant | None) -> KnownKey:
        """A key of the file, or of an option, named by the beginning of its hash."""
        name = f"file_{digest.hex()[:8]}"
        return cls(id=name, digest=digest, tenant=None if tenant is None else replace(tenant, key=name))


class Keys:
    """Hashes of keys, and their owners. A timing attack on the hash lookup reveals no key: nobody can choose its bytes."""

    def __init__(self, known: Iterable[KnownKey]) -> None:
        self._known = {key.digest: key for key in known}
        self._num_tenants = sum(key.tenant is not None for key in self._known.values())
        self.has_admin = self._num_tenants < len(self._known)
        self.closes = any(key.tenant is None and key.closes for key in self._known.values())

    def __len__(self) -> int:
        return self._num_tenants

    def tenant_of(self, key: str) -> Tenant | None:
        known = self._valid(key)
        return None if known is None else known.tenant

    def admin_of(self, key: str) -> str:
        """The id of an admin's key; "" for others."""
        known = self._valid(key)
        return known.id if known is not None and known.tenant is None else ""

    def is_admin(self, key: str) -> bool:
        return bool(self.admin_of(key))

    def _valid(self, key: str) -> KnownKey | None:
        digest = hash_key(key)
        known = self._known.get(digest)
        if known is None or not hmac.compare_digest(digest, known.digest) or known.ends_at <= time.time():
            return None
        return known


class Tenants:
    """The present tenants: those of the file, which `reload` reads again, and those made at run time, from `apply`."""

    def __init__(
        self,
        *,
        api_keys: Sequence[str] = (),
        admin_key: str = "",
        orders_key: str = "",
        metrics_key: str = "",
        path: Path | None = None,
        needs_keys: bool = False,
    ) -> None:
        """`orders_key`: an admin's that closes nothing. `metrics_key` opens METRICS_PATHS only, and closes nothing either.

        `needs_keys`: the network could ask. Raises ConfigError.
        """
        self._needs_keys = needs_keys
        self._orders_key = orders_key
        self._metrics_digest = hash_key(metrics_key) if metrics_key else b""
        self._api_keys = api_keys
        self._admin_key = admin_key
        self._path = path
        self._file = _File()
        self._register: Register | None = NOTHING
        self.reload()

    def reload(self) -> None:
        """Read the file again, also for open connections. Raises ConfigError, and then changes nothing."""
        file = _read(self._path) if self._path else _File()
        digests = [digest for digest, _ in self._digests(file)]
        _check_keys(digests, self._path)
        if self._needs_keys and not digests:
            raise ConfigError(f"--tenants {self._path}: has no key, and --host is not loopback: `baton keys new`")
        self._file = file
        self._build()

    def apply(self, register: Register | None) -> None:
        """Take the keys and tenants made at run time; None: not read yet."""
        self._register = register
        self._build()

    def _build(self) -> None:
        """Merge both sources; the file takes precedence."""
        file, register = self._file, self._register or NOTHING
        named = {name: _made(name, entry) for name, entry in register.tenants.items()}
        named |= {name: entry.tenant(name) for name, entry in file.tenants.items()}
        self.default = named.get(DEFAULT, Tenant(queue_share=0.5 if named else 1.0))
        self._named = named | {DEFAULT: self.default}
        self.from_file = [
            KnownKey.of_file(digest, self._named[name] if name else None) for digest, name in self._digests(file)
        ]
        made = [self._known(key) for key in register.keys.values() if key.is_admin or key.tenant in self._named]
        self.keys = Keys([*self._orders(), *made, *self.from_file])
        self.names = sorted({DEFAULT, *named})
        self.names_of_file = frozenset(file.tenants)
        self.limits = {name: tenant.limits for name, tenant in named.items() if tenant.limits != UNLIMITED}

    def _digests(self, file: _File) -> list[tuple[bytes, str]]:
        """Keys of the file and of options, with their tenants; "" is the admin."""
        users = [(hash_key(key), DEFAULT) for key in self._api_keys]
        users += [(digest, name) for name, entry in file.tenants.items() for digest in entry.hashes()]
        admin = [bytes.fromhex(digest) for digest in file.admin_keys_sha256]
        admin += [hash_key(self._admin_key)] if self._admin_key else []
        return users + [(digest, "") for digest in admin]

    def _orders(self) -> list[KnownKey]:
        if not self._orders_key:
            return []
        return [replace(KnownKey.of_file(hash_key(self._orders_key), None), closes=False)]

    def _known(self, key: MadeKey) -> KnownKey:
        tenant = None if key.is_admin else replace(self._named[key.tenant], key=key.id)
        ends_at = 0.0 if key.revoked_at else key.expires_at or math.inf  # independent of the revoker's clock
        return KnownKey(id=key.id, digest=key.digest, tenant=tenant, ends_at=ends_at)

    def named(self, name: str) -> Tenant | None:
        """The tenant of this name now: its work may outlive its keys."""
        return self._named.get(name)

    def opens_metrics(self, key: str) -> bool:
        """True if it is the key for metrics only."""
        return hmac.compare_digest(hash_key(key), self._metrics_digest)

    def asking(self, key: str, path: str) -> Tenant | None:
        """The tenant of a key, or of a request without one if none is needed; None: the key gives no access to the path.

        Metrics and timelines tell of all tenants, so they need the admin key if there is one, or metrics their own.
        """
        if is_under(path, METRICS_PATHS) and self.opens_metrics(key):
            return self.default
        if is_under(path, ADMIN_PATHS) or (self.needs_admin and is_under(path, OPERATOR_PATHS)):
            return self._admin(key)
        if path in MODEL_PATHS and (admin := self._admin(key)) is not None:
            return admin
        return self.default if self.open_to_all else self.keys.tenant_of(key)

    def _admin(self, key: str) -> Tenant | None:
        admin = self.keys.admin_of(key)
        return replace(self.default, key=admin, is_admin=True) if admin else None

    @property
    def open_to_all(self) -> bool:
        """True if no key is needed: there never was one. An admin may have made some that are not read yet."""
        register = self._register
        is_closed = self.keys.has_admin if register is None else register.closed
        return not len(self.keys) and not is_closed and not self._needs_keys

    @property
    def needs_admin(self) -> bool:
        """True if operators' paths need an admin's key. A key for orders only leaves open what is open to all."""
        return self.keys.closes or (self.keys.has_admin and not self.open_to_all)


def _made(name: str, made: MadeTenant) -> Tenant:
    own = "" if name == DEFAULT else name
    return Tenant(
        name=name,
        weight=made.weight,
        queue_share=made.queue_share,
        max_priority=made.max_priority,
        limits=made.limits,
        cache_salt=own if made.cache_salt is None else made.cache_salt,
        goal=made.goal,
        kv_share=made.kv_share,
        loads=None if made.loads is None else tuple(made.loads),
    )


def is_under(path: str, roots: tuple[str, ...]) -> bool:
    return path.startswith(roots) and any(path == root or path.startswith(f"{root}/") for root in roots)


def is_open(path: str) -> bool:
    is_page = is_under(path, ("/console",)) and not is_under(path, CONSOLE_DATA)
    return path == "/" or is_page or is_under(path, OPEN_PATHS)


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def new_key() -> str:
    """A new key of 256 random bits."""
    return f"baton-{secrets.token_urlsafe(32)}"


class GoalFields(BaseModel):
    """A goal's parts in a client's request, an administrator's or a file of tenants; each is open unless it is given."""

    ttft_slo_ms: _Milliseconds | None = None
    ttft_slo_ms_per_token: _MillisecondsPerToken | None = None
    tpot_slo_ms: _Milliseconds | None = None

    @property
    def goal(self) -> Goal:
        """The goal as far as it is said."""
        return Goal(ttft_ms=self.ttft_slo_ms, ttft_ms_per_token=self.ttft_slo_ms_per_token, tpot_ms=self.tpot_slo_ms)


class _Entry(GoalFields, BaseModel):
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
    kv_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    loads: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=1000)] | None = None  # None: any

    def hashes(self) -> list[bytes]:
        return [hash_key(key) for key in self.keys] + [bytes.fromhex(digest) for digest in self.keys_sha256]

    def tenant(self, name: str) -> Tenant:
        own = self.model_dump(include={*MadeTenant.__struct_fields__} - {"goal"})
        return _made(name, MadeTenant(**own, goal=self.goal))


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    admin_keys_sha256: list[Annotated[str, Field(pattern=_HASH)]] = []
    tenants: dict[Annotated[str, Field(pattern=TENANT_NAME)], _Entry] = {}


def _read(path: Path) -> _File:
    try:
        return _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
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
