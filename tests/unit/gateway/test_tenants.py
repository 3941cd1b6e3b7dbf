"""The file of tenants: what it says, what is wrong in it, and that it can be read again."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from common.settings import ROOT, ConfigError
from gateway.tenants.budgets import Limits
from gateway.tenants.tenants import Tenant, Tenants, hash_key, new_key

KEY, OTHER, ADMIN = "first-key-of-acme", "second-key-of-acme", "the-admin-s-own-key"
FILE = f"""
admin_keys_sha256 = ["{hash_key(ADMIN).hex()}"]

[tenants.acme]
keys = ["{KEY}"]
keys_sha256 = ["{hash_key(OTHER).hex().upper()}"]
weight = 2.5
requests_per_minute = 60
tokens_per_minute = 1000
max_concurrent = 3
max_priority = 10

[tenants.shared]
keys = ["the-key-of-shared"]
cache_salt = ""
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    return path


def test_who_is_who(path: Path) -> None:
    tenants = Tenants(api_keys=("a-plain-key",), path=path)
    acme = tenants.keys.tenant_of(KEY)
    limits = Limits(requests_per_minute=60, tokens_per_minute=1000, max_concurrent=3)
    assert acme == Tenant(name="acme", weight=2.5, queue_share=0.5, max_priority=10, limits=limits, cache_salt="acme")
    assert tenants.keys.tenant_of(OTHER) == acme
    assert tenants.keys.tenant_of("a-plain-key") == Tenant(name="default", queue_share=0.5)
    assert [tenants.keys.tenant_of(key) for key in ("", KEY + "x", ADMIN)] == [None, None, None]
    assert [tenants.keys.is_admin(key) for key in (ADMIN, KEY, "")] == [True, False, False]
    assert not tenants.open_to_all
    assert tenants.names == ["acme", "default", "shared"]


def test_a_file_without_keys_does_not_open_a_gateway_that_the_network_reaches(path: Path) -> None:
    tenants = Tenants(path=path, needs_keys=True)
    path.write_text("[tenants.default]\nrequests_per_minute = 5\n")
    with pytest.raises(ConfigError, match="has no key"):
        tenants.reload()
    assert tenants.keys.tenant_of(KEY) is not None
    with pytest.raises(ConfigError, match="has no key"):
        Tenants(path=path, needs_keys=True)


def test_without_keys_everybody_is_the_default_tenant(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.default]\nrequests_per_minute = 5\n")
    for tenants, limit in ((Tenants(), 0), (Tenants(path=path), 5)):
        assert tenants.open_to_all
        assert (tenants.default.name, tenants.default.cache_salt) == ("default", "")
        assert tenants.default.limits.requests_per_minute == limit


def test_salts_are_apart(path: Path) -> None:
    """Whatever a client asks for, it reaches no block of a tenant with a salt of its own."""
    tenants = Tenants(path=path)
    acme, shared = tenants.keys.tenant_of(KEY), tenants.keys.tenant_of("the-key-of-shared")
    assert acme is not None
    assert shared is not None
    assert shared.salt("") == Tenant().salt("") == ""
    assert shared.salt("x") == Tenant().salt("x") != ""
    asked = ["", "x", acme.salt(""), acme.salt("x"), "client:", "client:x"]
    salts = [tenant.salt(text) for tenant in (acme, shared) for text in asked]
    assert len(set(salts)) == len(salts)


def test_read_again(path: Path) -> None:
    tenants = Tenants(path=path)
    path.write_text(FILE.replace(KEY, "a-new-key-of-acme").replace("weight = 2.5", "weight = 4"))
    tenants.reload()
    assert tenants.keys.tenant_of(KEY) is None
    acme = tenants.keys.tenant_of("a-new-key-of-acme")
    assert acme is not None
    assert acme.weight == 4
    path.write_text("[tenants.acme]\nwieght = 1")
    with pytest.raises(ConfigError):
        tenants.reload()
    assert tenants.keys.tenant_of("a-new-key-of-acme") is acme  # as it was


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[tenants.acme", "not TOML"),
        ("[tenant.acme]", "tenant: unknown"),
        ("[tenants.acme]\nwieght = 1", "tenants.acme.wieght: unknown"),
        ("[tenants.acme]\nweight = 0", "tenants.acme.weight: input should be greater than 0"),
        ("[tenants.acme]\nrequests_per_minute = -1", "tenants.acme.requests_per_minute: input should be greater"),
        ('[tenants.acme]\nkeys = ["short"]', "tenants.acme.keys.0: string should have at least 16 characters"),
        ('[tenants.acme]\nkeys_sha256 = ["xyz"]', "tenants.acme.keys_sha256.0: must be 64 hexadecimal digits"),
        ('admin_keys_sha256 = ["xyz"]', "must be 64 hexadecimal digits"),
        ('[tenants."a b"]', "tenants.a b.[key]: string should match pattern"),
        (f'[tenants.a]\nkeys=["{KEY}"]\n[tenants.b]\nkeys=["{KEY}"]', "a key is there twice"),
        (f'admin_keys_sha256 = ["{hash_key(KEY).hex()}"]\n[tenants.b]\nkeys=["{KEY}"]', "a key is there twice"),
    ],
)
def test_what_is_wrong_is_named_and_no_key_is_shown(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as raised:
        Tenants(path=path)
    assert f"--tenants {path}" in str(raised.value)
    assert told in str(raised.value)
    assert "short" not in str(raised.value).replace("should", "")
    assert KEY not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Tenants(path=tmp_path / "no.toml")


def test_a_new_key_is_another_each_time_and_its_lines_are_a_file(tmp_path: Path) -> None:
    assert new_key() != new_key()
    command = [sys.executable, "-m", "cli.keys", "new"]
    printed = [
        subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for more in (["acme"], ["--admin"])
    ]
    keys = [text.partition("only here: ")[2].split()[0] for text in printed]
    path = tmp_path / "tenants.toml"
    path.write_text("\n".join(text.partition(":\n\n")[2] for text in reversed(printed)))
    assert not any(key in path.read_text() for key in keys)
    tenants = Tenants(path=path)
    assert tenants.keys.tenant_of(keys[0]) == Tenant(name="acme", queue_share=0.5, max_priority=0, cache_salt="acme")
    assert tenants.keys.is_admin(keys[1])
    assert hashlib.sha256(keys[0].encode()).digest() == hash_key(keys[0])
