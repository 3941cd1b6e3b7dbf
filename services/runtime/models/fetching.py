"""Fetching a model from a hub into the cache that Hugging Face's own tools share.

A file gets its name in the cache once its hash is the listed one, and a snapshot appears once all its files are there: what is
found by name is whole. An unfinished file stays, and the next attempt goes on where it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.settings import ConfigError
from modelfiles.files import CONFIG
from modelfiles.gguf import GgufError
from services.runtime import hub
from services.runtime.checks.model import gigabytes
from services.runtime.checks.weights import INDEX
from services.runtime.hub import Named
from services.runtime.models.choice import ChoiceError, Listed, chosen, text_of
from services.runtime.models.hashed import Growing, TooLongError, keep
from services.runtime.models.progress import Progress, Say
from services.runtime.models.store import AgainError, StoreClient

ATTEMPTS = 5
LISTINGS = 2
FIRST_PAUSE_S = 0.25
STREAMS = 4
MAX_INDEX = 64 << 20
MAX_OVER_HTTP = 50_000_000_000  # the hub gives larger files by a protocol of its own alone
SPARE_BYTES = 64 << 20


def fetched(named: Named, say: Say, *, text_alone: bool = False, newest: bool = False) -> Path:
    """The model's folder or GGUF file, downloaded if it isn't whole. Raises ConfigError with one line.

    `text_alone`: configuration and tokenizer are enough; `newest`: ask the hub even if a revision of that name is cached.
    """
    try:
        if not newest and (there := _there(named, text_alone=text_alone)) is not None:
            return there
        with _alone(named, say):
            if not newest and (there := _there(named, text_alone=text_alone)) is not None:
                return there
            return _Fetch(named, say).run(text_alone=text_alone)
    except (ChoiceError, GgufError) as error:
        raise ConfigError(f"{named}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{named}: {hub.cache()}: {error.strerror or error}") from None


def _there(named: Named, *, text_alone: bool) -> Path | None:
    return hub.cached(str(named)) if text_alone and not named.kind else hub.whole(named)


@contextlib.contextmanager
def _alone(named: Named, say: Say) -> Iterator[None]:
    """Fetch a repository once at a time on this machine, and remove nothing of it. Raises ConfigError without a lock."""
    folder = hub.locks_of(named.repo)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / hub.FETCH_LOCK).open("w")
    except OSError as error:
        remedy = "HF_HOME names a folder that can be written to"
        raise ConfigError(f"{named}: {folder}: {error.strerror}; {remedy}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"waiting: another process fetches or removes {named.repo} …")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _client_of(named: Named) -> StoreClient:
    """The client of a name's store. Imported here: what is there needs none, and the hub's reads variables at its import."""
    match named.store:
        case "s3" | "gs":
            from services.runtime.models.buckets import BucketClient

            return BucketClient(named)
        case "oci":
            from services.runtime.models.registry import RegistryClient

            return RegistryClient(named)
        case "modelscope":
            from services.runtime.models.modelscope import ModelScopeClient

            return ModelScopeClient(named)
        case _:
            from services.runtime.models.client import HubClient

            return HubClient(named)


class _Fetch:
    """One download of one model."""

    def __init__(self, named: Named, say: Say) -> None:
        self._client = _client_of(named)
        self._named, self._say = named, say
        self._folder = hub.folder_of(named.repo)
        self._stopped = threading.Event()

    def run(self, *, text_alone: bool) -> Path:
        files = self._listed()
        (self._folder / "blobs").mkdir(parents=True, exist_ok=True)
        if self._named.store:
            (self._folder / hub.URL_FILE).write_text(self._named.repo, encoding="utf-8")
        wanted = text_of(files) if text_alone else chosen(self._named, files, self._weight_map)
        if missing := {file.digest: file for file in wanted if not self._has(file)}:
            self._download([*missing.values()])
        self._appear(wanted)
        model = _there(Named(self._named.repo, self._client.commit, self._named.kind), text_alone=text_alone)
        if model is None:
            raise ConfigError(f"{self._named}: it holds nothing that can be served")
        return model

    def _listed(self) -> dict[str, Listed]:
        """The repository's files."""
        for attempt in range(LISTINGS):
            try:
                return self._client.listed()
            except AgainError as error:
                why = str(error)
                self._stopped.wait(FIRST_PAUSE_S * 2**attempt)
        remedy = f"check the network and {self._client.setting}, or give --model a folder"
        there = "not here" if hub.whole(self._named) is None else "here already, perhaps not the newest"
        raise ConfigError(f"{self._named}: {there}, and {self._client.where} can't be reached ({why}); {remedy}")

    def _weight_map(self, index: Listed) -> Sequence[str]:
        """The files that an index names."""
        if index.num_bytes > MAX_INDEX:
            raise ChoiceError(f"its {INDEX} has {gigabytes(index.num_bytes)}")
        if not self._has(index):
            self._download([index], is_quiet=True)
        try:
            return [str(name) for name in json.loads(self._blob(index).read_bytes())["weight_map"].values()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ChoiceError(f"its {INDEX} can't be read") from None

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _download(self, files: Sequence[Listed], *, is_quiet: bool = False) -> None:
        """Download files into the cache's blobs, some at a time. Raises ConfigError."""
        begun, total = sum(map(self._begun, files)), sum(file.num_bytes for file in files)
        self._has_room(total - begun)
        what = f"{self._named.repo}@{self._client.commit[:7]}"
        if not is_quiet:
            again = f", {gigabytes(begun)} of them are here" if begun else ""
            count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
            self._say(f"fetching {what}: {count}, {gigabytes(total)}{again}, into {hub.cache()} …")
        say = _silent if is_quiet else self._say
        with Progress(what, total, say) as progress, ThreadPoolExecutor(STREAMS) as streams:
            doing = [streams.submit(self._fetch, file, progress) for file in files]
            try:
                for one in doing:
                    one.result()
            except BaseException:
                self._stopped.set()
                streams.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, file: Listed, progress: Progress) -> None:
        """Download a file, and keep it if its hash is right. Raises ConfigError."""
        if not self._named.store and file.num_bytes > MAX_OVER_HTTP:
            command = f"`hf download {self._named.repo} {file.name}`"
            raise ConfigError(f"{self._named}: {file.name} has {gigabytes(file.num_bytes)}: {command} fetches it")
        with Growing(self._unfinished(file), num_bytes=file.num_bytes, digest=file.digest) as growing:
            progress.add(growing.length)
            self._fill(file, growing, progress)
            if not growing.becomes(self._blob(file)):
                listed = f"the file that {self._client.where} lists (its hash differs)"
                raise ConfigError(
                    f"{self._named}: {file.name} is not {listed}, and was not kept: "
                    "try again; if it says so twice, something between here and there changes files"
                )

    def _fill(self, file: Listed, growing: Growing, progress: Progress) -> None:
        def came(count: int) -> None:
            if self._stopped.is_set():
                raise ConfigError(f"{self._named}: stopped")
            progress.add(count)

        attempts, why = 0, "the answer ended early"
        while not growing.is_whole:
            before = growing.length
            try:
                self._client.go_on(file, growing, came)
            except AgainError as error:
                why = str(error)
            except TooLongError:
                growing.begin_again()
                raise ConfigError(f"{self._named}: {file.name} changed while it was fetched: try again") from None
            attempts = 0 if growing.length > before else attempts + 1
            if attempts == ATTEMPTS:
                count = f"{growing.length} of {file.num_bytes} bytes"
                raise ConfigError(
                    f"{self._named}: {file.name}: {count} came ({why}); the same command goes on from there"
                )
            if not growing.is_whole:
                self._stopped.wait(FIRST_PAUSE_S * 2**attempts)

    # -- cache -----------------------------------------------------------------------------------------------------

    def _blob(self, file: Listed) -> Path:
        return self._folder / "blobs" / file.digest

    def _unfinished(self, file: Listed) -> Path:
        return self._folder / "blobs" / f"{file.digest}.baton.incomplete"

    def _has(self, file: Listed) -> bool:
        blob = self._blob(file)
        return blob.is_file() and blob.stat().st_size == file.num_bytes

    def _begun(self, file: Listed) -> int:
        unfinished = self._unfinished(file)
        return min(unfinished.stat().st_size, file.num_bytes) if unfinished.is_file() else 0

    def _has_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if needed + SPARE_BYTES > free:
            text = f"{gigabytes(needed)} are to be fetched, and {hub.cache()} has room for {gigabytes(free)}"
            raise ConfigError(f"{self._named}: {text}: `baton list` says what lies there; HF_HOME names another place")

    def _appear(self, files: Sequence[Listed]) -> None:
        """Make the snapshot: the configuration last, as it is what is looked for."""
        commit, revision = self._client.commit, self._named.revision
        snapshot = self._folder / "snapshots" / commit
        for file in sorted(files, key=lambda file: file.name == CONFIG):
            pointer = snapshot / file.name
            if pointer.exists():
                continue
            pointer.parent.mkdir(parents=True, exist_ok=True)
            pointer.unlink(missing_ok=True)  # it led nowhere
            try:
                pointer.symlink_to(os.path.relpath(self._blob(file), pointer.parent))
            except OSError:  # a file system without links
                self._copy(file, pointer)
        if not commit.startswith(revision):
            ref = self._folder / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit, encoding="utf-8")

    def _copy(self, file: Listed, pointer: Path) -> None:
        """Copy a blob, which appears once it is whole: what has a name is never fetched again."""
        unfinished = self._unfinished(file)
        with self._blob(file).open("rb") as whole, unfinished.open("wb") as copy:
            shutil.copyfileobj(whole, copy)
            keep(copy, unfinished, pointer)


def _silent(line: str) -> None:
    """Say nothing."""
