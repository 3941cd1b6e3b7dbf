"""A client of container registries (OCI distribution): a model whose files are the layers of an artifact.

Files are named by the annotation `org.opencontainers.image.title`, as ORAS writes it, or by the CNCF's model specification; a
layer that is a GGUF file needs no name. Registries on loopback are asked over plain HTTP, all others over HTTPS.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from common.settings import ConfigError
from services.runtime.hub import MAIN, Named
from services.runtime.models.choice import MAX_FILES, Listed
from services.runtime.models.hashed import Growing
from services.runtime.models.store import LOOPBACK, RefusedError, Web

LATEST = "latest"
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_ACCEPTED = {"accept": ", ".join((*_MANIFESTS, *_INDEXES))}
_TITLES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class RegistryClient:
    """Reads one artifact."""

    setting = "the registry's name"

    def __init__(self, named: Named) -> None:
        self._named = named
        self._host, _, self._repo = named.repo.partition("://")[2].partition("/")
        scheme = "http" if self._host.partition(":")[0] in LOOPBACK else "https"
        self.where = f"{scheme}://{self._host}"
        self._web = Web(named, remedy=f"`docker login {self._host}` (or `oras login`) keeps what lets you in")
        self._token: dict[str, str] = {}
        self.commit = ""

    def listed(self) -> dict[str, Listed]:
        reference = LATEST if self._named.revision == MAIN else self._named.revision
        manifest, digest = self._manifest(reference)
        if manifest.get("mediaType") in _INDEXES or "manifests" in manifest:
            manifest, digest = self._manifest(self._only(manifest))
        self.commit = digest[:40]
        files: dict[str, Listed] = {}
        try:
            for layer in manifest["layers"][: MAX_FILES + 1]:
                if name := _name(layer):
                    found = _DIGEST.match(str(layer["digest"]))
                    files[name] = Listed(name, int(layer["size"]), found[1] if found else "", at=str(layer["digest"]))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{self._named}: {self._host} has a manifest that can't be read") from None
        files = {name: file for name, file in files.items() if file.digest and file.num_bytes >= 0}
        if not files or len(files) > MAX_FILES:
            raise ConfigError(f"{self._named}: it holds no files with names: `oras push` gives them, an image has none")
        return files

    def _only(self, index: Mapping[str, Any]) -> str:
        """The digest of the one manifest of an index. Raises ConfigError."""
        try:
            digests = [str(one["digest"]) for one in index["manifests"]]
        except (KeyError, TypeError):
            digests = []
        if len(digests) != 1:
            shown = ", ".join(digests[:8]) or "none"
            raise ConfigError(
                f"{self._named}: it is an index of several: name one as {self._named.repo}@DIGEST: {shown}"
            )
        return digests[0]

    def _manifest(self, reference: str) -> tuple[dict[str, Any], str]:
        """A manifest and the digits of its SHA-256. Raises ConfigError, AgainError."""
        url = f"{self.where}/v2/{self._repo}/manifests/{reference}"
        answer = self._web.get(url, _ACCEPTED | self._token)
        if answer.status_code == 401 and not self._token:
            self._log_in(answer.headers.get("www-authenticate", ""))
            answer = self._web.get(url, _ACCEPTED | self._token)
        self._web.check(answer)
        digest = hashlib.sha256(answer.content).hexdigest()
        wanted = _DIGEST.match(reference)
        if wanted and wanted[1] != digest:
            raise ConfigError(f"{self._named}: the manifest is not the one that is named (its hash differs)")
        try:
            manifest = json.loads(answer.content)
            assert isinstance(manifest, dict)
        except (ValueError, AssertionError, RecursionError):
            raise ConfigError(f"{self._named}: {self._host} has a manifest that can't be read") from None
        return manifest, digest

    def _log_in(self, challenge: str) -> None:
        """Get the token that a registry asks for, by what `docker login` kept, or for anybody. Raises ConfigError, AgainError."""
        basic = _kept_login(self._host)
        if challenge.lower().startswith("basic"):
            self._token = basic
            return
        told = dict(_CHALLENGE.findall(challenge))
        realm = urlsplit(told.get("realm", ""))
        if realm.scheme != "https" and realm.hostname not in LOOPBACK:
            place = repr(told.get("realm", "")[:100])
            raise ConfigError(f"{self._named}: {self._host} sends to {place} for a token, which is no HTTPS")
        query = urlencode({name: told[name] for name in ("service", "scope") if name in told})
        answer = self._web.get(f"{told['realm']}?{query}", basic)
        self._web.check(answer)
        try:
            body = answer.json()
            self._token = {"authorization": f"Bearer {body.get('token') or body['access_token']}"}
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(f"{self._named}: {realm.hostname} gives no token") from None

    def go_on(self, file: Listed, growing: Growing, came: Callable[[int], None]) -> None:
        url = f"{self.where}/v2/{self._repo}/blobs/{file.at}"
        try:
            self._web.go_on(url, self._token, growing, came)
        except RefusedError as error:
            if not error.challenge:
                raise
            self._log_in(error.challenge)  # tokens last for minutes, downloads for hours
            self._web.go_on(url, self._token, growing, came)


def _name(layer: Mapping[str, Any]) -> str:
    annotations = layer.get("annotations") or {}
    for title in _TITLES:
        if title in annotations:
            return str(annotations[title])
    return "model.gguf" if "gguf" in str(layer.get("mediaType", "")) else ""


def _kept_login(host: str) -> dict[str, str]:
    """The header of a login that `docker login` keeps in its file; none without one."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()
    try:
        kept = json.loads((folder / "config.json").read_bytes())["auths"][host]["auth"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {"authorization": f"Basic {kept}"} if kept else {}
