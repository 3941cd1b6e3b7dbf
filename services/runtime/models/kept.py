"""The models that the hub's cache holds: their names, files and sizes, what they share, who serves them; and removing them."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.settings import ConfigError
from modelfiles.files import CONFIG, quantisation_of
from services.runtime import hub
from services.runtime.hub import MAIN, Named
from services.runtime.models.choice import Listed, gguf_models
from services.runtime.models.serving import is_served, left_alone, locked

SHORT_DIGITS = 12


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
    quants = Counter(map(quantisation_of, ggufs))
    for first, parts in ggufs.items():
        quant = quantisation_of(first)
        yield quant if quants[quant] == 1 else first, tuple(there[part.name] for part in parts)
    others = tuple(file for name, file in there.items() if not name.endswith(".gguf"))
    if CONFIG in there and (not ggufs or any(file.suffix == ".safetensors" for file in others)):
        yield "", others


def named_one(name: str) -> list[Kept]:
    """The cached models that a name means: one, or all of a repository's snapshot; or a path in the cache.

    Raises ConfigError if there is none.
    """
    named = hub.parsed(name)
    if named is None and (at := _at(Path(name))):
        return at
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


def _at(path: Path) -> list[Kept]:
    """The cached models of a snapshot's folder, or of a GGUF file there."""
    place = _place(path.absolute())
    return [one for one in kept_models() if place in (_place(one.snapshot), _place(one.model))] if path.exists() else []


def _place(path: Path) -> Path:
    """A path through no link but its last part, which in the cache leads to content that others share."""
    return path.parent.resolve() / path.name


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
            if not locked(held, hub.locks_of(repo) / hub.FETCH_LOCK):
                raise ConfigError(f"{repo}: another process fetches or removes it: try again when that is done")
        for one in models:
            if (who := left_alone(held, one.model)) and not also_served:
                raise ConfigError(served_by(one.name, who))
        return sum(_remove(one) for one in models)


def removed_of_package(name: str, *, also_served: bool = False) -> int:
    """Remove a model that came in a package; returns its bytes. Raises ConfigError if it is served, OSError."""
    file = hub.kept(name)
    if file is None or not file.is_file():
        return 0
    with contextlib.ExitStack() as held:
        if (who := left_alone(held, file)) and not also_served:
            raise ConfigError(served_by(name, who))
        num_bytes = file.stat().st_size
        file.unlink()
    return num_bytes


def served_by(name: str, who: str) -> str:
    """The error for a model that is served."""
    return f"{name}: it is served by {who}: stop that first"


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
