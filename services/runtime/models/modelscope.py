"""ModelScope's client: what a repository holds, and a file's bytes from some place on."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from common.settings import ConfigError
from services.runtime.hub import MAIN, Named
from services.runtime.models.choice import MAX_FILES, Listed
from services.runtime.models.hashed import Growing
from services.runtime.models.store import LOOPBACK, Web

DOMAIN = "www.modelscope.cn"
DEFAULT_REVISION = "master"
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class ModelScopeClient:
    """Reads one revision of one public model."""

    setting = "MODELSCOPE_DOMAIN"

    def __init__(self, named: Named) -> None:
        self._named = named
        domain = (os.environ.get("MODELSCOPE_DOMAIN") or DOMAIN).rstrip("/")
        scheme = "http" if domain.partition(":")[0] in LOOPBACK else "https"
        self._endpoint = domain if "://" in domain else f"{scheme}://{domain}"
        self._repo = f"{self._endpoint}/api/v1/models/{quote(named.repo.partition('://')[2])}/repo"
        self._revision = DEFAULT_REVISION if named.revision == MAIN else named.revision
        self._web = Web(named, remedy="only public models are fetched from there")
        self.commit = ""

    @property
    def where(self) -> str:
        parts = urlsplit(self._endpoint)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def listed(self) -> dict[str, Listed]:
        query = urlencode({"Revision": self._revision, "Recursive": "true"})
        answer = self._web.get(f"{self._repo}/files?{query}", {})
        self._web.check(answer)
        try:
            entries: list[dict[str, Any]] = answer.json()["Data"]["Files"]
            files = {
                str(one["Path"]): Listed(str(one["Path"]), int(one["Size"]), str(one.get("Sha256") or ""))
                for one in entries[: MAX_FILES + 1]
                if one.get("Type") != "tree"
            }
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{self._named}: {self.where} lists its files in a form that is not known") from None
        files = {name: file for name, file in files.items() if file.num_bytes >= 0 and _SHA256.match(file.digest)}
        if not files or len(files) > MAX_FILES:
            raise ConfigError(f"{self._named}: {self.where} lists no files with hashes, or more than {MAX_FILES}")
        told = "\n".join(f"{file.name} {file.digest}" for file in sorted(files.values()))
        self.commit = hashlib.sha256(told.encode()).hexdigest()[:40]
        return files

    def go_on(self, file: Listed, growing: Growing, came: Callable[[int], None]) -> None:
        query = urlencode({"Revision": self._revision, "FilePath": file.name})
        self._web.go_on(f"{self._repo}?{query}", {}, growing, came)
