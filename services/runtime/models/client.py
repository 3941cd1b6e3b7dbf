"""A hub's client: what a repository holds, and a file's bytes from some place on. Errors are one line with a remedy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from common import VERSION
from common.settings import ConfigError
from services.runtime import hub
from services.runtime.hub import Named
from services.runtime.models.choice import MAX_FILES, Listed
from services.runtime.models.hashed import Growing
from services.runtime.models.store import AgainError, MissingError

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 30.0
LISTING_S = 10.0  # a wrong path is told so soon where no network answers
BUSY = (408, 429)
TOKEN = "give HF_TOKEN a token that may read it (or `hf auth login`)"
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_DIGEST = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")
_RANGE = re.compile(r"bytes (\d+)-")


class HubClient:
    """Reads one revision of one repository."""

    setting = "HF_ENDPOINT"

    def __init__(self, named: Named) -> None:
        self._named = named
        self._endpoint = constants.ENDPOINT
        self._headers = build_hf_headers(library_name="baton", library_version=VERSION)
        self.commit = ""

    def listed(self) -> dict[str, Listed]:
        """The repository's files by name, with sizes and hashes. Sets `commit`. Raises ConfigError, AgainError."""
        with self._explained():
            info = huggingface_hub.HfApi(endpoint=self._endpoint).model_info(
                self._named.repo, revision=self._named.revision, files_metadata=True, timeout=LISTING_S
            )
        self.commit, siblings = str(info.sha or ""), info.siblings or []
        if not _COMMIT.match(self.commit) or len(siblings) > MAX_FILES:
            raise ConfigError(f"{self._named}: {self.where} lists {len(siblings)} files of commit {self.commit!r:.50}")
        files: dict[str, Listed] = {}
        for sibling in siblings:
            digest = str(sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id or "")
            if sibling.size is not None and sibling.size >= 0 and _DIGEST.match(digest):
                files[sibling.rfilename] = Listed(sibling.rfilename, sibling.size, digest)
        if not files:
            raise ConfigError(f"{self._named}: {self.where} lists no files with sizes and hashes, which are needed")
        return files

    def go_on(self, file: Listed, growing: Growing, came: Callable[[int], None]) -> None:
        """Ask where the file is, and read from where `growing` ends. Raises ConfigError, AgainError."""
        url = huggingface_hub.hf_hub_url(self._named.repo, file.name, revision=self.commit, endpoint=self._endpoint)
        with self._explained():
            at = huggingface_hub.get_hf_file_metadata(url, headers=dict(self._headers), timeout=TIMEOUT_S)
            if at.commit_hash not in (None, self.commit) or at.size not in (None, file.num_bytes):
                raise ConfigError(f"{self._named}: {file.name} changed while it was fetched: try again")
            headers = {"accept-encoding": "identity"}
            if urlsplit(at.location).netloc == urlsplit(self._endpoint).netloc:  # a token is the hub's business alone
                headers = {**self._headers, **headers}
            if growing.length:
                headers["range"] = f"bytes={growing.length}-"
            with get_session().stream("GET", at.location, headers=headers, timeout=TIMEOUT_S) as response:
                self._is_at(response, growing, came)
                for piece in response.iter_bytes():
                    growing.write(piece)
                    came(len(piece))

    def _is_at(self, response: httpx.Response, growing: Growing, came: Callable[[int], None]) -> None:
        """Check that the answer begins where the file ends; drop the file if it begins anew."""
        if response.status_code != 416:
            hf_raise_for_status(response)
        begin = _RANGE.match(response.headers.get("content-range", ""))
        if growing.length and not (response.status_code == 206 and begin and int(begin[1]) == growing.length):
            came(-growing.length)
            growing.begin_again()
            if response.status_code != 200:
                raise AgainError("it would not go on from there")

    @property
    def where(self) -> str:
        """The hub's address, without a user's name and password."""
        parts = urlsplit(self._endpoint)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the client's errors into one line with a remedy."""
        name, repo = self._named, self._named.repo
        try:
            yield
        except errors.OfflineModeIsEnabled:
            there, remedy = f"not in {hub.cache()}", "unset it, or bring the files there"
            if hub.whole(name) is not None:
                there, remedy = "here already", "unset it to ask for what is newer"
            raise ConfigError(f"{name}: {there}, and HF_HUB_OFFLINE is set: {remedy}") from None
        except errors.GatedRepoError:
            address = f"{self.where}/{repo}"
            raise ConfigError(f"{name}: its makers ask for consent: give it at {address}, then {TOKEN}") from None
        except errors.RevisionNotFoundError:
            raise MissingError(f"{name}: {self.where} has {repo}, but no revision {name.revision}") from None
        except errors.RepositoryNotFoundError:
            there = f"no such folder here, and no such model at {self.where}, or a private one"
            raise MissingError(f"{name}: {there}: check the name, or {TOKEN}") from None
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status >= 500 or status in BUSY:
                raise AgainError(f"{error.response.url.host} answers {status}") from None
            said = "refuses the token" if status in (401, 403) else f"answers {status}"
            raise ConfigError(f"{name}: {error.response.url.host} {said}: {TOKEN}") from None
        except httpx.TransportError as error:
            raise AgainError(f"{type(error).__name__}: {error}"[:200]) from None
