"""`make containers`: the image is built, and compose's services run as containers, are killed one by one, and stop.

    python -m tests.containers [--keep] [--skip-build]

Needs root, podman, runc and mmdebstrap (Debian's packages). Prints a table: the image's size, when all was healthy, memory, and
how long each service was away after `kill -9`. Returns 1 if an answer was lost or wrong, a service did not come back, took
another one with it, or did not end with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx

from services.runtime.servers import free_port
from tests.containers.compose import Project, container, make_network, remove_everything
from tests.containers.images import OURS, build_all, size_mb
from tests.containers.podman import PodmanError, inspected, podman

KEY, ADMIN_KEY = "key-of-this-test", "admin-key-of-this-test"
PROFILES = {"cpu", "planner"}
WATCH = "prometheus"  # of the profile watch the only one that Debian has
TOOLS = ("podman", "runc", "mmdebstrap")
SERVES = ("nats", "redis", "gateway", "planner", "decode-cpu", "prefill-cpu")  # in the order in which each is killed
HEALTHY_S, ANSWER_S = 180.0, 120.0
PAUSE_S = 0.25  # between two looks: podman tells nobody when a container is up
TOKENS = 24


class Failed(Exception):
    """An outcome that should not have been."""


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.containers", description=__doc__.splitlines()[0])
    parser.add_argument("--skip-build", action="store_true", help="take the images that are there")
    parser.add_argument("--keep", action="store_true", help="leave containers, volumes and network for a look")
    options = parser.parse_args()
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        print(f"containers: apt-get install {' '.join(missing)}", file=sys.stderr)
        return 2
    variables = {"BATON_API_KEYS": KEY, "BATON_ADMIN_KEY": ADMIN_KEY, "BATON_MODELS": "./demo"}
    project = Project.of(PROFILES, {WATCH}, variables, free_port())
    remove_everything(project)
    try:
        if not options.skip_build:
            build_all(*(project.services[name]["image"] for name in ("nats", "redis", WATCH)))
        for row in check(project):
            print(f"| {row[0]} | {row[1]} |", flush=True)
    except (Failed, PodmanError, subprocess.SubprocessError, httpx.HTTPError) as error:
        print(f"containers: {error}", file=sys.stderr)
        for name in project.services:
            print(f"--- {name}: {last_lines(name)}", file=sys.stderr)
        return 1
    finally:
        if not options.keep:
            remove_everything(project)
    return 0


def check(project: Project) -> Iterator[tuple[str, str]]:
    """Start, ask, kill, ask again, stop: a row for each thing measured. Raises Failed."""
    yield "what", "measured"
    yield "---", "---"
    yield "image", f"{size_mb(OURS)} MB"
    make_network()
    started = time.monotonic()
    for name in project.in_order():
        if name in ("gateway", "planner", "spaces"):  # after `users`, NATS and Redis, as depends_on says
            until(lambda: all(project.is_healthy(one) for one in ("nats", "redis")), "NATS and Redis to be healthy")
        project.start(name)
    until(lambda: all(project.is_healthy(name) for name in (*SERVES, WATCH)), "all services to be healthy")
    yield "all healthy after", f"{time.monotonic() - started:.1f} s"
    expected = answer(project)
    yield "an answer, streamed", json.dumps(expected)
    until(lambda: scraped() == {"baton-gateway": "up", "baton-planner": "up"}, "Prometheus to scrape both")
    yield "Prometheus scrapes with the key of `users`", ", ".join(scraped())
    for name in SERVES:
        yield f"memory of {name}", memory(name)
    for name in SERVES:
        yield f"{name} killed: away for", f"{killed(project, name, expected):.1f} s"
    yield from stopped(project)


def killed(project: Project, name: str, expected: str) -> float:
    """Kill a service's first process; seconds until it is healthy again and the same answer comes. Raises Failed."""
    before = {other: inspected(container(other))["StartedAt"] for other in SERVES}
    began = time.monotonic()
    os.kill(inspected(container(name))["Pid"], signal.SIGKILL)
    until(
        lambda: _is_up(name) and inspected(container(name))["StartedAt"] != before[name], f"{name} to be started again"
    )
    until(lambda: project.is_healthy(name), f"{name} to be healthy again")
    if (found := answer(project)) != expected:
        raise Failed(f"after {name} was killed the answer is {found!r}, not {expected!r}")
    away = time.monotonic() - began
    after = {other: inspected(container(other))["StartedAt"] for other in SERVES}
    if gone := [other for other in SERVES if other != name and after[other] != before[other]]:
        raise Failed(f"{name}'s end took {', '.join(gone)} with it")
    return away


def stopped(project: Project) -> Iterator[tuple[str, str]]:
    """Stop all as `docker compose down` does; ours drain and end with 0. Raises Failed."""
    began, codes = time.monotonic(), {}
    for name in reversed(project.in_order()):
        if name in SERVES:
            grace = str(project.services[name].get("stop_grace_period", "10s")).rstrip("s")
            podman("stop", "-t", grace, container(name), limit_s=90.0)
            codes[name] = inspected(container(name))["ExitCode"]
    yield "all stopped after", f"{time.monotonic() - began:.1f} s, exit codes {codes}"
    ours = [name for name in SERVES if name not in ("nats", "redis")]
    if wrong := [name for name in ours if codes[name]]:
        raise Failed(f"{', '.join(wrong)} did not end with 0")
    if noisy := [name for name in ours if "Traceback" in podman("logs", container(name))]:
        raise Failed(f"the logs of {', '.join(noisy)} have a traceback")


def answer(project: Project) -> str:
    """A streamed chat's text; asked again while services come back. Raises Failed when none comes in time."""
    found: list[str] = []
    until(lambda: found.append(_streamed(project)) is None and bool(found[-1]), "an answer", limit_s=ANSWER_S)
    return found[-1]


def _streamed(project: Project) -> str:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "stream": True,
    }
    url, head, text = f"http://127.0.0.1:{project.port}", {"Authorization": f"Bearer {KEY}"}, ""
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=head, timeout=60) as response:
            if response.status_code == 503:
                return ""
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    text += delta.get("content") or ""
                elif line == "data: [DONE]":
                    return text
    except httpx.TransportError:  # the gateway itself is being started again
        return ""
    raise Failed(f"the stream ended without [DONE] after {text!r}")


def scraped() -> dict[str, str]:
    """The health of what Prometheus scrapes, by its job."""
    told = podman("exec", container(WATCH), "wget", "-qO-", "http://127.0.0.1:9090/api/v1/targets")
    return {one["labels"]["job"]: one["health"] for one in json.loads(told)["data"]["activeTargets"]}


def memory(name: str) -> str:
    return podman("stats", "--no-stream", "--format", "{{.MemUsage}}", container(name)).partition(" / ")[0]


def last_lines(name: str) -> str:
    try:
        return "\n".join(podman("logs", "--tail", "12", container(name)).splitlines())
    except PodmanError as error:
        return str(error)


def _is_up(name: str) -> bool:
    return bool(inspected(container(name))["Running"])


def until(holds: Callable[[], bool], what: str, *, limit_s: float = HEALTHY_S) -> None:
    """Return once it holds. Raises Failed when it does not in time."""
    ends = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > ends:
            raise Failed(f"waited {limit_s:.0f} s for {what}")
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.exit(main())
