"""Checks of a known gateway, from options or a running `baton up`; the other checks then use its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from cli.doctor.settings import DoctorSettings
from cli.reach import Gateway
from common.settings import ConfigError
from services.runtime.checks.finding import Finding
from services.runtime.running import Running

SERVERS = ("nats", "redis")


async def running(settings: DoctorSettings) -> tuple[list[Finding], DoctorSettings]:
    """Return the known gateway's state, and settings completed from `baton up`. Raises ConfigError."""
    try:
        gateway = settings.gateway()
    except ConfigError as error:
        return [Finding("gateway", "fail", str(error), "stop that `baton up` and start it again")], settings
    if not settings.url and gateway.running is None:
        return [], settings
    urls = gateway.running.own_urls if gateway.running is not None else []
    found = [await asyncio.to_thread(_ready, replace(gateway, url=url)) for url in [gateway.url, *urls]]
    if gateway.running is not None:
        settings = settings.model_copy(update=_adopted(settings, gateway.running))
    return found, settings


def _adopted(settings: DoctorSettings, stack: Running) -> Mapping[str, Any]:
    """Settings of a `baton up`, except for a server or model that the person named."""
    given = settings.model_fields_set
    named = tuple(f"{server}_" for server in SERVERS if any(name.startswith(f"{server}_") for name in given))
    known = {name: value for name, value in stack.observer.items() if name in type(settings).model_fields}
    adopted: dict[str, Any] = {name: value for name, value in known.items() if not name.startswith(named)}
    if stack.model and "model" not in given:
        adopted |= {"model": Path(stack.model), "served_model_name": stack.served_model_name}
    return adopted if "port" in given else adopted | {"port": 0}


def _ready(gateway: Gateway) -> Finding:
    try:
        with gateway.client(timeout_s=5) as client:
            answer = client.get("/ready")
    except httpx.HTTPError as error:
        return Finding("gateway", "fail", f"{gateway.url} ({gateway.said}) does not answer: {error}", "see its log")
    if answer.status_code == 200:
        workers = answer.json().get("workers", {})
        counts = ", ".join(f"{count} {role}" for role, count in workers.items())
        return Finding("gateway", "ok", f"{gateway.url} ({gateway.said}) is ready: {counts} workers")
    try:
        reason = str(answer.json()["reason"])
    except (ValueError, KeyError, TypeError):
        reason = f"status {answer.status_code}"
    return Finding("gateway", "fail", f"{gateway.url} ({gateway.said}) is not ready: {reason}", "see its log")
