"""The installer of torch for `make setup`: the CPU build if there is no GPU; it announces the download first.

Run as `python -m cli.torch_build torch==VERSION`, by the standard library and pip alone, before anything is installed. Which
files pip would take is asked of pip, so that a person's own settings count. PyPI has builds for GPUs only. The CPU's are at the
site that torch itself names, which is looked at only where pip has no settings of its own.

Variables: TORCH=cpu or cuda decides for one; TORCH_INDEX is an index with the wanted build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Build = Literal["cpu", "cuda"]
ASK_S, SIZE_S = 300.0, 10.0
MAX_SITE_S = "15"  # timeout for a site that a closed network can't reach
INDEXES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")
CONFIGURED = re.compile(r"(?:^|\.)(?:index-url|extra-index-url|find-links|no-index)=", re.MULTILINE)
ON_GPUS = re.compile(r"(?:nvidia|cuda|triton)\b", re.IGNORECASE)
GET_STARTED = "`make up TORCH_INDEX=ADDRESS` takes the CPU build (ADDRESS: pytorch.org, Get started, pip, CPU)"


@dataclass(frozen=True, slots=True)
class Offer:
    """The build of torch that pip would install."""

    version: str
    build: Build
    site: str = ""  # the home page in the package's metadata


def main() -> int:
    """Entry point; returns pip's exit code."""
    wanted, asked, index = sys.argv[1], os.environ.get("TORCH", ""), os.environ.get("TORCH_INDEX", "")
    if asked not in ("", "cpu", "cuda"):
        print(f"baton: TORCH={asked}: cpu or cuda is needed", file=sys.stderr)
        return 2
    if is_there(wanted) and not asked and not index:
        return 0
    print("asking pip which torch there is …", flush=True)
    build: Build = "cuda" if asked == "cuda" or (not asked and has_gpu()) else "cpu"
    offer, settings = best(wanted, build, index)
    print(*told(offer, build, size_of(urls_of(wanted, settings)) if offer else 0), sep="\n", flush=True)
    return pip("install", wanted, *([] if sys.stderr.isatty() else ["-q"]), settings=settings).returncode


def best(wanted: str, build: Build, index: str) -> tuple[Offer | None, Mapping[str, str]]:
    """A requirement, and variables for pip: with `index`, if given, unless pip has an index configured."""
    settings = with_index(os.environ, index) if index else {}
    offer = ask(wanted, settings)
    if index or offer is None or (offer.build, build) != ("cuda", "cpu") or not offer.site or is_configured():
        return offer, settings
    there = with_index(os.environ, cpu_index(offer.site))
    found = ask(wanted, there | {"PIP_DEFAULT_TIMEOUT": MAX_SITE_S, "PIP_RETRIES": "0"})
    return (found, there) if found and found.build == "cpu" else (offer, settings)


def told(offer: Offer | None, build: Build, size: int) -> list[str]:
    """The lines shown before the download. `size`: bytes; 0 if unknown."""
    if offer is None:
        return ["installing torch (once) …"]
    much = f", {size / 1e9:.1f} GB" if size > 1e8 else ""
    lines = [f"installing torch {offer.version} for {'GPUs' if offer.build == 'cuda' else 'CPUs'} (once{much}) …"]
    if (offer.build, build) == ("cuda", "cpu"):
        lines.append(f"  there is no GPU here, and this build brings CUDA: Ctrl-C, then {GET_STARTED}")
    elif (offer.build, build) == ("cpu", "cuda"):
        lines.append("  pip's settings lead to this build, which uses no GPU: TORCH_INDEX=ADDRESS names another index")
    return lines


def is_there(wanted: str) -> bool:
    """True if this version is installed, in any build."""
    name, _, version = wanted.partition("==")
    try:
        return metadata.version(name).partition("+")[0] == version
    except metadata.PackageNotFoundError:
        return False


def ask(wanted: str, settings: Mapping[str, str]) -> Offer | None:
    """The torch that pip would install; None if pip can't tell, as old releases, or finds none."""
    for package in report_of("--no-deps", wanted, settings=settings):
        return offer_of(package["metadata"])
    return None


def urls_of(wanted: str, settings: Mapping[str, str]) -> list[str]:
    """The files that pip would download with all dependencies; none if pip can't tell."""
    return [package["download_info"]["url"] for package in report_of(wanted, settings=settings)]


def report_of(*words: str, settings: Mapping[str, str]) -> list[dict[str, Any]]:
    """The packages that pip would install, as in its report; none if it fails."""
    done = pip(
        "install", "-q", "--dry-run", "--ignore-installed", "--report", "-", *words, settings=settings, quiet=True
    )
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["install"] if done.returncode == 0 else []
    except (ValueError, KeyError):
        return []
    return packages


def offer_of(torch: Mapping[str, Any]) -> Offer:
    """Parse the package's metadata."""
    needed = [line for line in torch.get("requires_dist", []) if ON_GPUS.match(line) and is_needed(line)]
    links = [link.partition(",")[::2] for link in torch.get("project_url", [])]
    homes = [torch.get("home_page") or "", *(url.strip() for name, url in links if name.lower() == "homepage")]
    return Offer(
        version=torch["version"],
        build="cuda" if needed else "cpu",
        site=next((home for home in homes if home.startswith("https://")), ""),
    )


def is_needed(requirement: str) -> bool:
    """True if a requirement of a package's metadata applies to this system, without extras."""
    try:
        from pip._vendor.packaging.requirements import Requirement

        marker = Requirement(requirement).marker
        return marker is None or bool(marker.evaluate({"extra": ""}))
    except (ImportError, ValueError):
        return True


def cpu_index(site: str) -> str:
    """URL of the CPU builds at torch's site."""
    return f"https://download.{urllib.parse.urlsplit(site).netloc}/whl/cpu"


def with_index(environment: Mapping[str, str], index: str) -> dict[str, str]:
    """An additional index beside those in pip's variables."""
    return {"PIP_EXTRA_INDEX_URL": " ".join(filter(None, (environment.get("PIP_EXTRA_INDEX_URL"), index)))}


def is_configured() -> bool:
    """True if pip has an index configured: then no other is tried."""
    listed = pip("config", "list", settings={}, quiet=True).stdout
    return any(os.environ.get(name) for name in INDEXES) or bool(CONFIGURED.search(listed))


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """True if this machine has an NVIDIA GPU with a driver."""
    return shutil.which("nvidia-smi") is not None or any(devices.glob("nvidia[0-9]*"))


def size_of(urls: Iterable[str]) -> int:
    """Total size of the files in bytes; 0 if any is unknown."""
    sizes = [_size(url) for url in urls]
    return sum(sizes) if all(sizes) else 0


def _size(url: str) -> int:
    parts = urllib.parse.urlsplit(url)
    try:
        if parts.scheme == "file":
            return Path(urllib.parse.unquote(parts.path)).stat().st_size
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SIZE_S) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0


def pip(*words: str, settings: Mapping[str, str], quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pip with extra variables; with `quiet` its output is returned and its errors are hidden."""
    command: Sequence[str] = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    environment = {**os.environ, **settings}
    if not quiet:
        return subprocess.run(command, env=environment, text=True, check=False)
    try:
        return subprocess.run(command, env=environment, text=True, check=False, capture_output=True, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "")


if __name__ == "__main__":
    sys.exit(main())
