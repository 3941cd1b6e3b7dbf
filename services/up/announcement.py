"""What `baton up` writes down of itself for tools (`services.runtime.running`), and the keys that it was given."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from common import VERSION
from common.access import write_secret
from services.runtime.running import Running, announced, birth_of
from services.runtime.settings import Settings
from services.up.servers import Reach
from services.up.settings import UpSettings

# What a tool needs of the settings to look at NATS and Redis.
LOOKS_ON = tuple(name for name in Settings.model_fields if name.startswith(("nats_", "redis_")))


def announce(held: contextlib.ExitStack, settings: UpSettings, reach: Reach, *, url: str, data: Path) -> None:
    """Let tools find what runs, until `held` closes. Keys lie in files of their own, as long."""
    users = data / "users"
    several = bool(settings.served_models)
    running = Running(
        url=url,
        pid=os.getpid(),
        born=birth_of(os.getpid()),
        started_unix=round(time.time(), 3),
        release=VERSION,
        model="" if several else str(settings.model.resolve()),
        served_model_name="" if several else settings.served_name,
        observer={name: str(getattr(settings, name)) for name in LOOKS_ON} | reach.settings("observer"),
        api_key_file=_kept(held, users / "gateway.key", next(iter(settings.keys), "")),
        admin_key_file=_kept(held, users / "admin.key", settings.admin_key),
        certificate=str(Path(settings.tls_cert).resolve()) if settings.tls_cert else "",
        logs=str(data / "logs"),
    )
    held.enter_context(announced(running, data))


def _kept(held: contextlib.ExitStack, file: Path, key: str) -> str:
    """The file's name, with the key in it until `held` closes; "" without a key."""
    if not key:
        return ""
    write_secret(file, key + "\n")
    held.callback(file.unlink, missing_ok=True)
    return str(file)
