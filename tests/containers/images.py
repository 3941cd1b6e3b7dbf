"""Images for a machine that reaches no registry: Debian's packages under the names that Dockerfile and compose file say.

They stand in for the official images: the same programs (Python, NATS, Redis, Prometheus) in other releases, on another base.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from services.runtime.servers import find_nats_server
from tests.containers.podman import BUILD_S, ROOT, podman, succeeds

BASE = re.findall(r"^FROM (\S+)$", (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)[-1]
PYTHON = "python3,python3-venv,python-is-python3,ca-certificates"
REDIS = "redis-server,busybox"  # for `wget`, which alpine images have
PROMETHEUS = "prometheus,busybox"
OURS = "baton:cpu"


def build_all(nats: str, redis: str, prometheus: str) -> None:
    """Make the base and the servers' images unless they are there, and ours as deploy/Dockerfile says. Raises PodmanError."""
    with tempfile.TemporaryDirectory(prefix="baton-images-") as temporary:
        folder = Path(temporary)
        if not succeeds("image", "exists", _full(BASE)):
            _import(folder, PYTHON, BASE)
        if not succeeds("image", "exists", _full(redis)):
            # The official image has no folder of that name, so compose's mount makes one that each user may read.
            _import(folder, REDIS, redis, 'chmod 755 "$1/etc/redis"')
        if not succeeds("image", "exists", _full(nats)):
            shutil.copy(find_nats_server(), folder / "nats-server")
            (folder / "Dockerfile").write_text(
                f"FROM {_full(redis)}\nCOPY nats-server /usr/local/bin/\nRUN busybox --install -s /usr/local/bin || true\n"
                'ENTRYPOINT ["nats-server"]\n'
            )
            podman("build", "-t", _full(nats), str(folder), limit_s=BUILD_S)
        if not succeeds("image", "exists", _full(prometheus)):
            _import(folder, PROMETHEUS, "prometheus-base")
            # The official image's user, and its folder for data, which a new volume takes over.
            (folder / "Dockerfile").write_text(
                f"FROM {_full('prometheus-base')}\nRUN busybox --install -s /usr/local/bin; install -d -o 65534 /prometheus\n"
                'USER 65534\nENTRYPOINT ["prometheus"]\n'
            )
            podman("build", "-t", _full(prometheus), str(folder), limit_s=BUILD_S)
    podman("build", "-f", "deploy/Dockerfile", "-t", OURS, *_as_here(), ".", limit_s=BUILD_S)


def size_mb(image: str) -> int:
    """How large an image is, in MB of 10^6."""
    return int(podman("image", "inspect", "--format", "{{.Size}}", image)) // 1_000_000


def _full(name: str) -> str:
    return f"docker.io/{name}" if "/" in name else f"docker.io/library/{name}"


def _import(folder: Path, packages: str, name: str, hook: str = "true") -> None:
    file = folder / "base.tar"
    command = [
        "mmdebstrap",
        "--variant=minbase",
        f"--include={packages}",
        f"--customize-hook={hook}",
        "bookworm",
        str(file),
    ]
    subprocess.run(command, check=True, timeout=BUILD_S, capture_output=True)
    podman("import", str(file), _full(name), limit_s=BUILD_S)
    file.unlink()


def _as_here() -> list[str]:
    """Options that let a build's pip ask whom this machine's pip asks: its files, and the folders that they name."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "debug"], capture_output=True, text=True, check=True)
    files = re.findall(r"^\s*(/\S+), exists: True$", told.stdout, re.MULTILINE)
    files = [file for file in files if not file.startswith(sys.prefix)]
    texts = [*(Path(file).read_text(encoding="utf-8") for file in files), *os.environ.get("PIP_FIND_LINKS", "").split()]
    named = re.findall(r"(?:file://|(?<=[\s=]))(/[\w./-]+)", "\n" + "\n".join(texts))
    # The files of an index in a folder lie beside its pages.
    named = [str(Path(place).parent) if Path(place).name == "simple" else place for place in named]
    places = {*files, *(place for place in named if Path(place).exists()), "/etc/ssl/certs"}
    options = [word for place in sorted(places) for word in ("-v", f"{place}:{place}:ro")]
    if index := re.search(r"extra-index-url = (\S+)", "\n".join(texts)):
        options += ["--build-arg", f"TORCH_INDEX={index[1]}"]
    return options
