"""Settings of `baton top`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cli.reach import ClientOptions


class TopSettings(ClientOptions):
    """`baton top`: workers, requests, tenants and events, live in the terminal. `?` says what its keys do."""

    interval_s: Annotated[float, Field(ge=0.1, le=60)] = Field(1.0, description="time between two pictures")
    tab: Literal["workers", "requests", "tenants", "events"] = Field("workers", description="what to show first")
    once: bool = Field(False, description="print one picture and end")
    print_json: bool = Field(False, description="print one JSON document and end")
