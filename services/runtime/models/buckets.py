"""Models in buckets (`s3://`, `gs://`), through fsspec: each object below a prefix is a file.

Credentials and endpoints are those of the stores' own tools. An object is compared with its MD5 where the store tells it: S3 for
objects of one part, Google for all that are not composed. Another one's tag names its content, and its size is checked.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from common.settings import ConfigError
from services.runtime.hub import MAIN, Named
from services.runtime.models.choice import MAX_FILES, Listed
from services.runtime.models.hashed import Growing
from services.runtime.models.store import AgainError

PIECE_BYTES = 8 << 20
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
SETTINGS = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST"}
LOGINS = {
    "s3": "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "`gcloud auth application-default login`",
}
_MD5 = re.compile(r"[0-9a-f]{32}\Z")


class BucketClient:
    """Reads what lies below one prefix."""

    def __init__(self, named: Named) -> None:
        """Raises ConfigError if the store's package is not installed."""
        package = PACKAGES[named.store]
        try:
            import fsspec

            self._files: Any = fsspec.filesystem(named.store, use_listings_cache=False, skip_instance_cache=True)
        except ImportError:
            remedy = f"`pip install {package}` in Baton's environment, or its extra 'stores'"
            raise ConfigError(f"{named}: {named.store}:// needs the package {package}: {remedy}") from None
        self._named = named
        self._root = named.repo.partition("://")[2]
        self.commit = ""

    @property
    def setting(self) -> str:
        return SETTINGS[self._named.store]

    @property
    def where(self) -> str:
        return f"{self._named.store}://{self._root.partition('/')[0]}"

    def listed(self) -> dict[str, Listed]:
        with self._explained():
            found: Mapping[str, Mapping[str, Any]] = self._files.find(self._root, detail=True)
        files: dict[str, Listed] = {}
        for path, facts in found.items():
            name = str(path).removeprefix(self._root).lstrip("/") or str(path).rpartition("/")[2]
            if facts.get("type") == "file" and int(facts.get("size") or 0) > 0:
                files[name] = Listed(name, int(facts["size"]), _digest(name, facts), at=str(path))
        if not files:
            raise ConfigError(f"{self._named}: there is nothing below it: check the bucket and the prefix")
        if len(files) > MAX_FILES:
            raise ConfigError(
                f"{self._named}: {len(files)} files are below it, {MAX_FILES} at most: name the model's folder"
            )
        told = "\n".join(f"{file.name} {file.num_bytes} {file.digest}" for file in sorted(files.values()))
        self.commit = hashlib.sha256(told.encode()).hexdigest()[:40]
        if self._named.revision != MAIN and not self.commit.startswith(self._named.revision):
            raise ConfigError(
                f"{self._named}: its content is another one now, {self.commit[:12]}, and the old one is not here"
            )
        return files

    def go_on(self, file: Listed, growing: Growing, came: Callable[[int], None]) -> None:
        with self._explained():
            now = self._files.info(file.at)
            if int(now.get("size") or 0) != file.num_bytes or _digest(file.name, now) != file.digest:
                raise ConfigError(f"{self._named}: {file.name} changed while it was fetched: try again")
            while not growing.is_whole:
                end = min(growing.length + PIECE_BYTES, file.num_bytes)
                piece = self._files.cat_file(file.at, start=growing.length, end=end)
                if not piece:
                    raise AgainError("the answer ended early")
                growing.write(piece)
                came(len(piece))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the packages' errors into one line with a remedy; those that nobody knows may pass."""
        login = LOGINS[self._named.store]
        try:
            yield
        except (ConfigError, AgainError):
            raise
        except FileNotFoundError:
            raise ConfigError(f"{self._named}: there is no such bucket, or nothing below it: check the name") from None
        except PermissionError:
            raise ConfigError(f"{self._named}: {self.where} refuses it: check {login}") from None
        except Exception as error:  # each package has its own
            if "redential" in f"{type(error).__name__} {error}":
                raise ConfigError(f"{self._named}: no credentials were found: give {login}") from None
            if isinstance(error, ValueError) and not isinstance(error, OSError):
                raise
            raise AgainError(f"{type(error).__name__}: {error}"[:200]) from None


def _digest(name: str, facts: Mapping[str, Any]) -> str:
    """The MD5 of an object in 32 digits, else a text that changes with its content."""
    tag = str(facts.get("ETag") or facts.get("etag") or "").strip('"')
    try:
        told = base64.b64decode(str(facts.get("md5Hash") or ""), validate=True).hex()
    except (binascii.Error, ValueError):
        told = ""
    if _MD5.match(told or tag):
        return told or tag
    content = f"{name} {facts.get('size')} {tag} {facts.get('generation', '')} {facts.get('LastModified', '')}"
    return f"unhashed-{hashlib.sha256(content.encode()).hexdigest()[:32]}"
