"""Settings of `baton trace`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from common.settings import Options


class TraceSettings(Options):
    """`baton trace [REQUEST]`: where the time of a recent request went."""

    url: str = Field("http://127.0.0.1:8000", description="the gateway that served it")
    api_key: str = Field("", description="key to send: the admin key where there is one")
    request: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{0,200}$")] = Field(
        "", description="id of an answer or of one of its choices; empty: list the running, slowest and latest requests"
    )
    print_json: bool = Field(False, description="print what the gateway answers")
