"""An alias's shares: which of several models answers a request that asks for it, by tenant, by header, or by weight.

The choice is a function of the request's key alone, without a counter, so all gateways make the same one. Where weights
change, only requests move that have to (weighted rendezvous hashing).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

MAX_SHARES = 16
WHOLE = 100.0  # percent
_NEARLY = 0.01  # percent, for sums of thirds
_HASHES = 2.0**64


class Share(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that answers some of an alias's requests: a tenant's, those with a header, or a part of all others."""

    model: str
    percent: float = 0.0
    tenant: str = ""
    header: str = ""  # its name in lower case
    value: str = ""  # the header's; "": any

    @property
    def is_rule(self) -> bool:
        return bool(self.tenant or self.header)

    def takes(self, asker: Asker) -> bool:
        """True if its rule is for this request."""
        if self.tenant:
            return asker.tenant == self.tenant
        found = asker.headers.get(self.header) if self.header else None
        return found is not None and self.value in ("", found)

    def written(self) -> str:
        """The share as options write it, behind `NAME=`."""
        if self.tenant:
            return f"{self.model}@tenant:{self.tenant}"
        if self.header:
            return f"{self.model}@header:{self.header}" + (f":{self.value}" if self.value else "")
        return f"{self.model}@{self.percent:g}%"


class Preset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults that a name brings to its requests: a system message, further ones, parameters of sampling."""

    system: str = ""
    messages: list[dict[str, str]] = []  # role and content, after the system message
    sampling: dict[str, int | float] = {}  # by the fields' names of SamplingParams
    stops: list[str] = []
    seed: int | None = None
    max_tokens: int = 0  # 0: as far as the context goes

    def over(self, base: Preset) -> Preset:
        """This one, completed by another."""
        return Preset(
            system=self.system or base.system,
            messages=self.messages or base.messages,
            sampling=base.sampling | self.sampling,
            stops=self.stops or base.stops,
            seed=base.seed if self.seed is None else self.seed,
            max_tokens=self.max_tokens or base.max_tokens,
        )


NO_PRESET = Preset()


class Asker(NamedTuple):
    """The facts of a request that choose its share."""

    key: str  # its session, else its own id: a session stays with one model
    tenant: str = ""
    headers: Mapping[str, str] = MappingProxyType({})  # by their names in lower case


Shares = tuple[Share, ...]
Alias = str | Shares  # one model, or several with their shares


def chosen(alias: str, shares: Sequence[Share], asker: Asker) -> str:
    """The model that answers a request: that of the first rule which takes it, else one by weight."""
    for share in shares:
        if share.is_rule and share.takes(asker):
            return share.model
    weighted = [share for share in shares if not share.is_rule and share.percent > 0]
    return max(weighted, key=lambda share: _score(alias, share, asker.key)).model


def main_model(alias: Alias) -> str:
    """The model with the largest share."""
    return alias if isinstance(alias, str) else max(alias, key=lambda share: share.percent).model


def served(shares: Sequence[Share], models: Collection[str]) -> Shares:
    """The shares of models that this gateway serves; none if nothing is left for requests that no rule takes."""
    found = tuple(share for share in shares if share.model in models)
    return found if any(share.percent > 0 for share in found) else ()


def check_shares(shares: Sequence[Share], models: Collection[str]) -> None:
    """Raise ValueError, with a remedy, for shares that would not send each request to a served model."""
    if len(shares) > MAX_SHARES:
        raise ValueError(f"at most {MAX_SHARES} shares are allowed, not {len(shares)}")
    for share in shares:
        if share.model not in models:
            raise ValueError(f"{share.model!r} is not served: name one of {', '.join(map(repr, models))}")
        if bool(share.tenant) + bool(share.header) + bool(share.percent) != 1:
            raise ValueError(f"{share.model!r}: give one of percent, tenant and header")
        if share.header != share.header.lower():
            raise ValueError(f"header {share.header!r}: write it in lower case")
    weighted = [share for share in shares if not share.is_rule]
    if len({share.model for share in weighted}) < len(weighted):
        raise ValueError("a model has two parts: write their sum")
    whole = sum(share.percent for share in weighted)
    if abs(whole - WHOLE) > _NEARLY or any(share.percent < 0 for share in weighted):
        raise ValueError(f"the parts are {whole:g} % in all: they must be 100, each above 0")


def read_share(text: str) -> Share:
    """Read `MODEL@5%`, `MODEL@tenant:NAME` or `MODEL@header:NAME[:VALUE]`. Raises ValueError."""
    model, _, part = text.rpartition("@")
    kind, _, named = part.partition(":")
    if model and kind == "tenant" and named:
        return Share(model=model, tenant=named)
    if model and kind == "header" and named:
        header, _, value = named.partition(":")
        return Share(model=model, header=header.lower(), value=value)
    try:
        percent = float(part.removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not model or not part.endswith("%") or not 0 < percent <= WHOLE:
        raise ValueError(f"{text!r} is not like MODEL@5%, MODEL@tenant:NAME or MODEL@header:NAME:VALUE")
    return Share(model=model, percent=percent)


def _score(alias: str, share: Share, key: str) -> float:
    """The larger one takes the request; each is the largest as often as its weight says."""
    text = "\0".join((alias, share.model, key)).encode(errors="surrogatepass")
    uniform = (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") + 0.5) / _HASHES
    return -share.percent / math.log(uniform) if uniform < 1 else math.inf
