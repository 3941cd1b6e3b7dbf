"""Settings of `baton trace`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cli.reach import ClientOptions


class TraceSettings(ClientOptions):
    """`baton trace [REQUEST]`: where the time of a recent request went."""

    request: Annotated[str, Field(max_length=4096)] = Field(
        "",
        description="id of an answer or of one of its choices, a file that --json wrote, slowest (first token of the last 15 "
        "minutes) or latest (to end); without one: lists to choose from",
    )
    print_json: bool = Field(False, description="print what the gateway answers")
