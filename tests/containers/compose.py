"""docker-compose.yml as calls of podman.

Debian's podman-compose knows neither `ipc: service:NAME` nor conditions of health.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import yaml

from tests.containers.podman import ROOT, podman, succeeds

PROJECT = "baton-test"
SUBNET = "10.91.7"
FIRST_ADDRESS = 10


def _expand() -> ModuleType:
    """deploy/run-as-processes.py, which knows compose's variables."""
    spec = importlib.util.spec_from_file_location("run_as_processes", ROOT / "deploy/run-as-processes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Project:
    """The services of some profiles, each a container of its own name, in one network with addresses that never change.

    `variables`: what compose takes from the environment. The gateway is published as `port` on this machine's loopback.
    """

    variables: Mapping[str, str]
    services: Mapping[str, Mapping[str, Any]]
    port: int

    @staticmethod
    def of(profiles: set[str], also: set[str], variables: Mapping[str, str], port: int) -> Project:
        """Read the file. `also`: services of other profiles."""
        every = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
        wanted = {
            name: one
            for name, one in every.items()
            if name in also or not one.get("profiles") or profiles & {*one["profiles"]}
        }
        return Project(variables, wanted, port)

    def text(self, value: object) -> str:
        """With compose's variables filled in."""
        expanded: str = EXPAND(str(value), self.variables)
        return expanded

    def address(self, name: str) -> str:
        return f"{SUBNET}.{FIRST_ADDRESS + list(self.services).index(name)}"

    def in_order(self) -> list[str]:
        """Names such that each comes after what it waits for."""
        ordered: list[str] = []

        def place(name: str) -> None:
            one = self.services[name]
            joined = [one[kind].partition("service:")[2] for kind in ("ipc", "pid") if "service:" in one.get(kind, "")]
            for other in (*one.get("depends_on", {}), *joined):
                place(other)
            if name not in ordered:
                ordered.append(name)

        for name in self.services:
            place(name)
        return ordered

    def start(self, name: str) -> None:
        """Start a service; a one-shot one (`users`) is over when this returns. Raises PodmanError."""
        one = self.services[name]
        is_over = "restart" not in one
        podman("run", *([] if is_over else ["-d"]), "--name", container(name), *self._options(name, one))

    def _options(self, name: str, one: Mapping[str, Any]) -> Iterator[str]:
        yield from ("--restart", str(one.get("restart", "no")).replace("unless-stopped", "always"))
        yield from (f"--cap-drop={one['cap_drop'][0].lower()}", "--security-opt=no-new-privileges")
        yield from self._spaces(name, one)
        for flag, key in (
            ("--memory", "mem_limit"),
            ("--pids-limit", "pids_limit"),
            ("--user", "user"),
            ("--shm-size", "shm_size"),
        ):
            if key in one:
                yield from (flag, self.text(one[key]))
        yield from (["--read-only"] if one.get("read_only") else [])
        yield from (["--init"] if one.get("init") else [])
        for place in one.get("tmpfs", []):
            yield from ("--tmpfs", f"{place}:rw,size=1g,mode=1777")
        for volume in one.get("volumes", []):
            source, _, rest = self.text(volume).partition(":")
            real = str((ROOT / source).resolve()) if source[0] in "./" else f"{PROJECT}-{source}"
            yield from ("-v", f"{real}:{rest}")
        for key, value in one.get("environment", {}).items():
            yield from ("-e", f"{key}={self.text(value)}")
        if name == "gateway":
            yield from ("-p", f"127.0.0.1:{self.port}:{one['ports'][0].rpartition(':')[2]}")
        entrypoint = one.get("entrypoint", [])
        if entrypoint:
            yield from ("--entrypoint", entrypoint[0])
        yield self.text(one["image"])
        command = one.get("command", [])
        yield from (
            *entrypoint[1:],
            *(self.text(word) for word in ([command] if isinstance(command, str) else command)),
        )

    def _spaces(self, name: str, one: Mapping[str, Any]) -> Iterator[str]:
        """Network, IPC and PIDs: its own, none, or another container's."""
        if one.get("network_mode") == "none":
            yield "--network=none"
        else:
            yield from (f"--network={PROJECT}", f"--ip={self.address(name)}", f"--hostname={name}")
            for other in self.services:
                yield from ("--add-host", f"{other}:{self.address(other)}")
        for kind in ("ipc", "pid"):
            value = str(one.get(kind, ""))
            if value:
                yield f"--{kind}={value.replace('service:', f'container:{PROJECT}-')}"

    def is_healthy(self, name: str) -> bool:
        """Run a service's health check in its container, once; one that has none is healthy when it runs."""
        test = self.services[name].get("healthcheck", {}).get("test", ["CMD", "true"])
        words = ["sh", "-c", test[1]] if test[0] == "CMD-SHELL" else test[1:]
        return succeeds("exec", container(name), *words)


def container(name: str) -> str:
    """A service's container."""
    return f"{PROJECT}-{name}"


def remove_everything(project: Project) -> None:
    """Remove containers, volumes and network of a run."""
    for name in reversed(project.in_order()):
        succeeds("rm", "-f", "-t", "1", container(name))
    volumes = [line for line in podman("volume", "ls", "-q").splitlines() if line.startswith(f"{PROJECT}-")]
    if volumes:
        podman("volume", "rm", "-f", *volumes)
    succeeds("network", "rm", "-f", PROJECT)


def make_network() -> None:
    podman("network", "create", "--subnet", f"{SUBNET}.0/24", "--disable-dns", PROJECT)


EXPAND = _expand().expand
