"""Settings of `baton trace`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cli.reach import ClientOptions


class TraceSettings(ClientOptions):
    """`baton trace [REQUEST]`: where the time of a recent request went."""

    request: Annotated[str, Field(max_length=4096)] = Field(
        "",
        description="id of an answer or of one of its choices, or a file that --json wrote; empty: lists to choose from",
    )
    slowest: bool = Field(False, description="the request whose first token took longest in the last 15 minutes")
    latest: bool = Field(False, description="the request that ended last")
    status: str = Field("", description="list requests that ended so: stop, length, cancelled, error, refused")
    tenant: str = Field("", description="list requests of this tenant")
    worker: str = Field("", description="list requests that were on this worker")
    min_ms: Annotated[float, Field(ge=0)] = Field(0.0, description="list requests that took so long; 0: any")
    limit: Annotated[int, Field(ge=1, le=100)] = Field(10, description="entries of a list")
    print_json: bool = Field(False, description="print what the gateway answers")
