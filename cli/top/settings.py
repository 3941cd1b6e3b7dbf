"""Settings of `baton top`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cli.reach import ClientOptions


class TopSettings(ClientOptions):
    """`baton top`: workers and gateways, live in the terminal."""

    interval_s: Annotated[float, Field(ge=0.1, le=60)] = Field(1.0, description="time between two pictures")
    once: bool = Field(False, description="print one table and end")
    print_json: bool = Field(False, description="print one JSON document and end")
