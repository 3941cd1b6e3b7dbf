"""Settings of `baton users`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from common.settings import Options


class UsersSettings(Options):
    """`baton users [FOLDER [MEMBERS]]`: make up users and passwords for NATS and Redis, and a key for Prometheus."""

    folder: Path = Field(Path("users"), description="where the files go, readable by their owner alone")
    members: str = Field(
        "", description="processes as ROLE:ID by commas, a user for each; a role without any has one user for all"
    )
    beside_0_1_0: bool = Field(
        False,
        description="for an upgrade from 0.1.0: its workers need more on Redis; make users again without it afterwards",
    )
