"""Keys and tenants made at run time: the record, what the gateway makes of it, and counts of use."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from common.settings import ConfigError
from gateway.tenants import register as bounds
from gateway.tenants.budgets import Limits
from gateway.tenants.register import (
    NOTHING,
    KeyConflictError,
    MadeKey,
    MadeTenant,
    Register,
    UnknownKeyError,
    is_key_id,
    new_key_id,
)
from gateway.tenants.tenants import Tenants, hash_key
from gateway.tenants.usage import DAY_S, MAX_KEYS_A_DAY, OTHERS, Usage, usage_json

NOW = 1_800_000_000.0
KEY, OTHER, ADMIN = "the-key-of-acme-1", "another-key-0002", "an-admin-key-0003"


def made(plain: str, tenant: str = "acme", **more: object) -> MadeKey:
    digest = hash_key(plain)
    return MadeKey(id=f"key_{digest.hex()[:16]}", digest=digest, tenant=tenant, **more)  # type: ignore[arg-type]


def registered(*keys: MadeKey, **tenants: MadeTenant) -> Register:
    register = Register(tenants=tenants)
    for key in keys:
        register = register.with_key(key, NOW)
    return register


def test_made_keys_are_valid_until_they_are_revoked_or_expire() -> None:
    tenants = Tenants(admin_key=ADMIN)
    acme = MadeTenant(requests_per_minute=7, weight=2.0)
    late = made(OTHER, expires_at=int(time.time()) - 1)
    register = registered(made(KEY), late, acme=acme)
    tenants.apply(register)
    found = tenants.keys.tenant_of(KEY)
    assert found is not None
    assert (found.name, found.weight, found.limits) == ("acme", 2.0, Limits(requests_per_minute=7))
    assert found.key == made(KEY).id
    assert found.cache_salt == "acme"
    assert tenants.keys.tenant_of(OTHER) is None
    assert tenants.limits == {"acme": found.limits}
    tenants.apply(register.revoked(made(KEY).id, by="me", now=time.time() - 1))
    assert tenants.keys.tenant_of(KEY) is None
    assert not tenants.open_to_all  # the last key is gone: nobody comes in, not everybody
    tenants.apply(register.revoked(made(KEY).id, by="me", now=time.time() + 60))  # at a gateway whose clock is ahead
    assert tenants.keys.tenant_of(KEY) is None


def test_the_first_key_closes_a_gateway_and_an_admins_key_does_not() -> None:
    tenants = Tenants(admin_key=ADMIN)
    assert tenants.open_to_all
    second = made(OTHER, tenant="", is_admin=True)
    tenants.apply(registered(second))
    assert (tenants.open_to_all, tenants.keys.admin_of(OTHER)) == (True, second.id)
    assert tenants.keys.tenant_of(OTHER) is None
    tenants.apply(registered(made(KEY, tenant="default")))
    assert not tenants.open_to_all
    assert tenants.keys.tenant_of("") is None


def test_while_made_keys_are_unknown_nobody_comes_in_without_one() -> None:
    """Where there is an admin some may have been made. Without one there can't be any."""
    for tenants, is_open in ((Tenants(admin_key=ADMIN), False), (Tenants(), True)):
        tenants.apply(None)
        assert tenants.open_to_all == is_open
        tenants.apply(NOTHING)
        assert tenants.open_to_all


def test_a_key_for_orders_leaves_open_what_is_open_to_all_and_closes_with_the_first_key() -> None:
    tenants = Tenants(orders_key=ADMIN)
    assert (tenants.keys.is_admin(ADMIN), tenants.keys.has_admin) == (True, True)
    assert (tenants.open_to_all, tenants.needs_admin) == (True, False)
    tenants.apply(None)  # what was made is not read yet
    assert (tenants.open_to_all, tenants.needs_admin) == (False, True)
    tenants.apply(registered(made(KEY, tenant="default")))
    assert (tenants.open_to_all, tenants.needs_admin, tenants.keys.is_admin(ADMIN)) == (False, True, True)
    assert Tenants(admin_key=ADMIN).needs_admin
    assert not Tenants(api_keys=[KEY]).needs_admin


def test_an_admins_key_alone_is_enough_for_an_address_of_the_network() -> None:
    tenants = Tenants(admin_key=ADMIN, needs_keys=True)
    assert not tenants.open_to_all
    with pytest.raises(ConfigError, match="has no key"):
        Tenants(needs_keys=True)


def test_the_file_goes_before_what_was_made(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f'[tenants.acme]\nkeys = ["{KEY}"]\nweight = 3\n')
    tenants = Tenants(path=path, admin_key=ADMIN)
    stolen = made(KEY, tenant="", is_admin=True)  # the same key, made an admin's
    tenants.apply(registered(stolen, made(OTHER), acme=MadeTenant(weight=9.0)))
    assert not tenants.keys.is_admin(KEY)
    for key, source in ((KEY, "file_"), (OTHER, "key_")):
        found = tenants.keys.tenant_of(key)
        assert found is not None
        assert (found.weight, found.key.startswith(source)) == (3.0, True)
    path.write_text("")
    tenants.reload()  # what was made holds on
    found = tenants.keys.tenant_of(OTHER)
    assert found is not None
    assert found.weight == 9.0


def test_a_key_whose_tenant_is_gone_is_nobodys() -> None:
    tenants = Tenants(admin_key=ADMIN)
    tenants.apply(registered(made(KEY, tenant="gone")))
    assert tenants.keys.tenant_of(KEY) is None
    assert not tenants.keys.is_admin(KEY)


def test_what_may_be_done_to_the_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_KEYS", 2)
    monkeypatch.setattr(bounds, "MAX_ENDED_KEYS", 2)
    monkeypatch.setattr(bounds, "MAX_TENANTS", 1)
    first, second = made("first"), made("second")
    register = registered(first, second, acme=MadeTenant())
    with pytest.raises(KeyConflictError, match="2 keys are in use"):
        register.with_key(made("third"), NOW)
    with pytest.raises(KeyConflictError, match="1 tenants"):
        register.with_tenant("b", MadeTenant())
    assert register.with_tenant("acme", MadeTenant(weight=2.0)).tenants["acme"].weight == 2.0
    with pytest.raises(KeyConflictError, match="has 2 keys"):
        register.without_tenant("acme", NOW)
    with pytest.raises(UnknownKeyError, match="no tenant 'b'"):
        register.without_tenant("b", NOW)
    with pytest.raises(UnknownKeyError, match="no key"):
        register.revoked("key_0", by="me", now=NOW)
    for number in range(5):  # the record stays small
        newest = made(f"more {number}")
        register = register.revoked(first.id, by="me", now=NOW + number).with_key(newest, NOW + number)
        assert register.revoked(first.id, by="you", now=NOW + 9) == register
        first = newest
    assert len(register.keys) == 4
    assert second.id in register.keys
    assert (
        register.revoked(first.id, by="", now=NOW)
        .revoked(second.id, by="", now=NOW)
        .without_tenant("acme", NOW)
        .tenants
        == {}
    )


def test_ids_are_told_from_other_texts() -> None:
    assert is_key_id(new_key_id())
    assert not any(map(is_key_id, ("key_", "file_0123abcd", "key_0123456789abcdeg", "key_0123456789abcdef\n")))


def test_nothing_of_a_key_is_in_its_json() -> None:
    shown = made(KEY, name="ci", created_at=int(NOW)).as_json(NOW)
    assert KEY not in str(shown)
    assert hash_key(KEY).hex()[:20] not in str(shown)
    assert (shown["state"], shown["name"], shown["expires_at"]) == ("active", "ci", None)
    assert made(KEY, expires_at=5).as_json(NOW)["state"] == "expired"


def test_usage_is_counted_by_hour_and_day_and_added_over_gateways() -> None:
    day = int(NOW) // DAY_S
    midnight = day * DAY_S
    here, there = Usage(), Usage()
    here.add("k1", "acme", [1, 0, 10, 4, 5], now=midnight - 1)
    here.add("k1", "acme", [1, 1, 1, 0, 0], now=midnight + 10)
    there.add("k1", "acme", [2, 0, 3, 0, 1], now=midnight + 20)
    there.add("", "default", [1, 0, 2, 0, 1], now=midnight + 3700)
    records = [*here.take_changed(), *there.take_changed()]
    assert here.take_changed() == []
    here.again(records[0])
    assert [record.day for record in here.take_changed()] == [day - 1]
    found = usage_json(records, hours=3, now=midnight + 3800)
    assert (found["from_unix"], found["step_s"]) == (midnight - 3600, 3600)
    nobody, k1 = found["keys"]
    assert (nobody["tenant"], nobody["requests"]) == ("default", [0, 0, 1])
    assert (k1["requests"], k1["prompt_tokens"], k1["cached_tokens"]) == ([1, 3, 0], [10, 4, 0], [4, 0, 0])
    assert (k1["completion_tokens"], k1["errors"]) == ([5, 1, 0], [0, 1, 0])
    by_day = usage_json(records, hours=96, now=midnight + 3800)
    assert (by_day["step_s"], by_day["keys"][1]["requests"]) == (DAY_S, [0, 0, 1, 3])


def test_usage_is_bounded_in_keys_and_days() -> None:
    usage = Usage()
    for number in range(MAX_KEYS_A_DAY + 5):
        usage.add(f"k{number}", "t", [1, 0, 0, 0, 0], now=NOW)
    used = usage.records()[0].used
    assert len(used) == MAX_KEYS_A_DAY + 1
    assert [one.counts[0] for one in used if (one.key, one.tenant) == OTHERS] == [5]
    usage.add("k0", "t", [1, 0, 0, 0, 0], now=NOW + 3600)  # one that is counted by itself stays so
    assert usage.records()[0].used[-1].key == "k0"
    for number in range(10):
        usage.take_changed()
        usage.add("k", "t", [1, 0, 0, 0, 0], now=NOW + number * DAY_S)
    assert len(usage.records()) == 2
