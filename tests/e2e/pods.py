"""The chart's containers as plain processes: commands, environment, mounted secrets, probes and hooks are those of the manifests.

What a cluster would do is done here: values of secrets and fields, mounts (folders), probes over HTTP, the hook before SIGTERM.
Changed is what one machine needs: ports, addresses, paths, and a fake device.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from services.runtime.linux import die_with_parent
from services.runtime.servers import stop
from tests.e2e.cluster import ROOT
from tests.ports import own_port

VARIABLE = re.compile(r"\$\((\w+)\)")
Manifest = Mapping[str, Any]
Secrets = Mapping[str, Mapping[str, str]]  # by name: contents by key


class Pod:
    """The one container of a Deployment's pod, as a process in a folder of its own."""

    def __init__(self, name: str, deployment: Manifest, folder: Path) -> None:
        self.name = name
        self.spec = deployment["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.ports = {port["name"]: own_port() for port in self.container.get("ports", [])}
        self.process: asyncio.subprocess.Process
        self._folder = folder / name
        self._paths: dict[str, Path] = {}

    async def start(self, shared: Mapping[str, str], secrets: Secrets, claims: Mapping[str, Path], **here: str) -> None:
        """Run the image's entrypoint with the container's arguments; `here` replaces variables."""
        self._paths = {
            mount["mountPath"]: self._volume(mount["name"], secrets, claims) for mount in self.container["volumeMounts"]
        }
        given = dict(shared) if "envFrom" in self.container else {}
        for entry in self.container["env"]:
            value = _value(entry, secrets)
            if value is not None:
                given[entry["name"]] = VARIABLE.sub(lambda match: given[match[1]], value)
        given = {key: _at(value, self._paths) for key, value in given.items()} | here
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(str(ROOT / "baton"), *self.container["args"]),
                env={key: value for key, value in os.environ.items() if not key.startswith("BATON_")} | given,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    async def passes(self, probe: str) -> None:
        """Return once a probe succeeds. Raises TimeoutError after as long as the manifest allows, at least 60 s."""
        wanted = self.container[probe]
        async with asyncio.timeout(max(60.0, wanted["periodSeconds"] * wanted.get("failureThreshold", 3))):
            while not await self.probed(probe):
                assert self.process.returncode is None, self.log
                await asyncio.sleep(0.05)

    async def probed(self, probe: str) -> bool:
        """Whether a probe succeeds now."""
        wanted = self.container[probe]
        if "exec" in wanted:
            words = [_at(word, self._paths) for word in wanted["exec"]["command"]]
            return await (await asyncio.create_subprocess_exec(*words)).wait() == 0
        url = f"http://127.0.0.1:{self.ports[wanted['httpGet']['port']]}{wanted['httpGet']['path']}"
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(timeout=5, verify=False) as client:
                return (await client.get(url)).is_success
        return False

    async def deleted(self) -> float:
        """Do what a kubelet does: the hook, SIGTERM, and SIGKILL after the grace period. Returns how many seconds it took."""
        began = time.monotonic()
        async with asyncio.timeout(self.spec.get("terminationGracePeriodSeconds", 30)):
            if hook := self.container.get("lifecycle", {}).get("preStop"):
                done = await asyncio.create_subprocess_exec(*hook["exec"]["command"], cwd=self._folder)
                assert await done.wait() == 0
            self.process.send_signal(signal.SIGTERM)
            assert await self.process.wait() == 0, self.log
        return time.monotonic() - began

    async def close(self) -> None:
        await stop(self.process)

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def _volume(self, name: str, secrets: Secrets, claims: Mapping[str, Path]) -> Path:
        """Make a volume's folder, or find a claim's."""
        (volume,) = (one for one in self.spec["volumes"] if one["name"] == name)
        if claim := volume.get("persistentVolumeClaim"):
            return claims[claim["claimName"]]
        folder = self._folder / "volumes" / name
        folder.mkdir(parents=True)
        if secret := volume.get("secret"):
            content = secrets[secret["secretName"]]
            items = secret.get("items", [{"key": key, "path": key} for key in content])
            for item in items:
                file = folder / item["path"]
                file.write_text(content[item["key"]])
                file.chmod(secret["defaultMode"])
        return folder


def from_files(folder: Path) -> dict[str, str]:
    """A secret's content, as `kubectl create secret generic --from-file FOLDER` makes it."""
    return {file.name: file.read_text() for file in folder.iterdir()}


def _value(entry: Mapping[str, Any], secrets: Secrets) -> str | None:
    """A variable's value; None: it is optional, and there is none."""
    source = entry.get("valueFrom")
    if source is None:
        return str(entry["value"])
    if reference := source.get("secretKeyRef"):
        found = secrets[reference["name"]].get(reference["key"])
        assert found is not None or reference.get("optional"), reference
        return found
    assert source["fieldRef"]["fieldPath"] == "status.podIP"
    return "127.0.0.1"


def _at(value: str, paths: Mapping[str, Path]) -> str:
    """A path in the container, where it is here."""
    for mounted, path in paths.items():
        if value.startswith(f"{mounted}/"):
            return f"{path}{value.removeprefix(mounted)}"
    return value
