"""The models that the hub's cache holds: their names, files and sizes, what they share, who serves them; and removing them."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common.settings import ConfigError
from modelfiles.files import CONFIG
from services.runtime import hub
from services.runtime.hub import MAIN, Named
from services.runtime.models.choice import Listed, gguf_models

SHORT_DIGITS = 12
REMOVAL_S = 60.0
LOOK_EACH_S = 0.01
_QUANT = re.compile(
    r"[._-]((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4\w*))(?:-\d{5}-of-\d{5})?\.gguf\Z", re.I
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A model that `--model` finds by `name`."""

    name: str
    snapshot: Path
    files: tuple[Path, ...]
    num_bytes: int
    shared_bytes: int
    is_whole: bool
    is_served: bool

    @property
    def model(self) -> Path:
        """The folder, or the first GGUF file."""
        return self.files[0] if self.files[0].suffix == ".gguf" else self.snapshot

    @property
    def commit(self) -> str:
        return self.snapshot.name


def kept_models(repo: str = "") -> list[Kept]:
    """All models in the cache, or one repository's, by name."""
    folders = [hub.folder_of(repo)] if repo else sorted(hub.cache().glob("models--*--*"))
    return [model for folder in folders for model in _in_repository(folder)]


def _in_repository(folder: Path) -> Iterator[Kept]:
    repo = hub.repo_of(folder)
    refs = hub.refs_of(folder)
    found: list[tuple[Named, Path, tuple[Path, ...]]] = []
    for snapshot in sorted((folder / "snapshots").glob("*")):
        revision = next((ref for ref in (MAIN, *refs) if refs.get(ref) == snapshot.name), snapshot.name[:SHORT_DIGITS])
        found += [(Named(repo, revision, kind), snapshot, files) for kind, files in _models(snapshot)]
    uses = Counter(blob for _, _, files in found for blob in {file.resolve() for file in files})
    for named, snapshot, files in found:
        blobs = {blob: blob.stat().st_size for file in files if (blob := file.resolve()).is_file()}
        model = files[0] if files[0].suffix == ".gguf" else snapshot
        yield Kept(
            name=str(named),
            snapshot=snapshot,
            files=files,
            num_bytes=sum(blobs.values()),
            shared_bytes=sum(size for blob, size in blobs.items() if uses[blob] > 1),
            is_whole=all(file.is_file() for file in files) and _is_whole(model, named),
            is_served=is_served(model),
        )


def _is_whole(model: Path, named: Named) -> bool:
    return model.suffix == ".gguf" or hub.whole(Named(named.repo, model.name)) is not None


def _models(snapshot: Path) -> Iterator[tuple[str, tuple[Path, ...]]]:
    """Each model of a snapshot: the end of its name, "" or a quantisation, and its files."""
    there = {str(file.relative_to(snapshot)): file for file in sorted(snapshot.rglob("*")) if not file.is_dir()}
    ggufs = gguf_models({name: Listed(name, 0, "") for name in there})
    quants = Counter(map(_quant, ggufs))
    for first, parts in ggufs.items():
        quant = _quant(first)
        yield quant if quants[quant] == 1 else first, tuple(there[part.name] for part in parts)
    others = tuple(file for name, file in there.items() if not name.endswith(".gguf"))
    if CONFIG in there and (not ggufs or any(file.suffix == ".safetensors" for file in others)):
        yield "", others


def _quant(name: str) -> str:
    """The quantisation in a GGUF file's name; the name if it has none."""
    found = _QUANT.search(name)
    return found[1] if found else name


def named_one(name: str) -> list[Kept]:
    """The cached models that a name means: one, or all of a repository's snapshot. Raises ConfigError if there is none."""
    named = hub.parsed(name)
    if named is None:
        raise ConfigError(hub.no_name(name))
    commit = hub.commit_of(named)
    of_repo = kept_models(named.repo)
    found = [one for one in of_repo if one.commit == commit and (not named.kind or _is_called(one, named.kind))]
    if not found:
        there = ", ".join(one.name for one in of_repo)
        remedy = f"there are {there}" if of_repo else "`baton list` says what is there, `baton pull` fetches it"
        raise ConfigError(f"{name}: not in {hub.cache()}; {remedy}")
    return found


def _is_called(one: Kept, kind: str) -> bool:
    wanted = hub.parsed(one.name)
    names = [str(file.relative_to(one.snapshot)) for file in one.files]
    return (wanted is not None and wanted.kind.lower() == kind.lower()) or kind in (*names, one.files[0].name)


def removed(models: Sequence[Kept], *, also_served: bool = False) -> int:
    """Remove models; returns the bytes that this freed. Files that others share stay.

    Raises ConfigError, having removed nothing, if one is served or fetched. Who has its files open may go on with them.
    """
    models = list(dict.fromkeys(models))  # two names may mean one
    with contextlib.ExitStack() as held:
        for repo in {hub.repo_of(one.snapshot.parent.parent) for one in models}:
            if not _locked(held, hub.locks_of(repo) / hub.FETCH_LOCK):
                raise ConfigError(f"{repo}: another process fetches or removes it: try again when that is done")
        with _looking():
            for one in models:
                lock = _lock_file(one.model)
                if lock is not None and not _locked(held, lock) and not also_served:
                    raise ConfigError(f"{one.name}: it is served: stop what serves it first")
        return sum(_remove(one) for one in models)


def _remove(one: Kept) -> int:
    folder = one.snapshot.parent.parent
    others = [other for other in kept_models(hub.repo_of(folder)) if other.name != one.name]
    beside = [other for other in others if other.snapshot == one.snapshot]
    freed = _unlink(folder, {*one.files} - {file for other in beside for file in other.files})
    if not beside:
        shutil.rmtree(one.snapshot, ignore_errors=True)
        for ref in [ref for ref, commit in hub.refs_of(folder).items() if commit == one.commit]:
            (folder / "refs" / ref).unlink(missing_ok=True)
    if not others:
        shutil.rmtree(folder, ignore_errors=True)
    return freed


def _unlink(folder: Path, files: set[Path]) -> int:
    """Remove pointers, and the blobs that no other pointer leads to; returns the bytes."""
    blobs = {file.resolve() for file in files}  # a file that is no link is its own
    for file in files:
        if file.is_symlink():
            file.unlink()
    left = {file.resolve() for file in (folder / "snapshots").rglob("*") if file.is_symlink()}
    gone = {blob: blob.stat().st_size for blob in blobs - left if blob.is_file()}
    for blob in gone:
        blob.unlink()
    return sum(gone.values())


# -- who serves ----------------------------------------------------------------------------------------------------

_serving: list[IO[str]] = []


def serve(model: Path) -> None:
    """Tell others that this process serves a model of the cache, as long as it lives: `baton rm` leaves it alone.

    Raises ConfigError if somebody removes it now.
    """
    lock = _lock_file(model)
    if lock is None:
        return
    with contextlib.suppress(OSError):  # a cache that can't be written to, where nobody removes anything either
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
        if not _lent(file, fcntl.LOCK_SH):
            raise ConfigError(f"{model}: another process removes it: start again when that is done")
        _serving.append(file)
    if not model.exists():
        raise ConfigError(f"{model}: it was removed a moment ago: `baton pull` fetches it again")


def _lent(file: IO[str], kind: int) -> bool:
    """Wait for a lock. Who looks has it for a moment, who removes for as long as that takes."""
    give_up_at = time.monotonic() + REMOVAL_S
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                return False
            time.sleep(LOOK_EACH_S)
        else:
            return True


def is_served(model: Path) -> bool:
    """True if a process of this machine serves it."""
    lock = _lock_file(model)
    if lock is None or not lock.is_file():
        return False
    with _looking(), contextlib.ExitStack() as held:
        return not _locked(held, lock)


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    """Look for who serves one process at a time: two that look at once would take each other for one that does."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing is locked
            folder = hub.cache() / ".locks"
            folder.mkdir(parents=True, exist_ok=True)
            _lent(held.enter_context((folder / "baton-looking.lock").open("a")), fcntl.LOCK_EX)
        yield


def _locked(held: contextlib.ExitStack, lock: Path) -> bool:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(lock.open("a"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _lock_file(model: Path) -> Path | None:
    """The file that those who serve a model hold; None if it isn't in the cache."""
    try:
        folder, _, commit, *inside = model.relative_to(hub.cache()).parts
    except ValueError:
        return None
    return hub.cache() / ".locks" / folder / f"baton-served-{'-'.join((commit, *inside))}"
