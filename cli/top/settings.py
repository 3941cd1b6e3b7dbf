"""Settings of `baton top`."""

from __future__ import annotations

from pydantic import Field

from cli.reach import ClientOptions


class TopSettings(ClientOptions):
    """`baton top`: workers, requests, tenants and events, live in the terminal. `?` says what its keys do."""

    print_json: bool = Field(False, description="print one JSON document and end")
