"""Settings of `baton trace`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cli.reach import ClientOptions


class TraceSettings(ClientOptions):
    """`baton trace [REQUEST]`: where the time of a recent request went."""

    request: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{0,200}$")] = Field(
        "", description="id of an answer or of one of its choices; empty: list the running, slowest and latest requests"
    )
    print_json: bool = Field(False, description="print what the gateway answers")
