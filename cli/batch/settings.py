"""Settings of `baton batch`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cli.reach import ClientOptions


class BatchSettings(ClientOptions):
    """`baton batch submit FILE | run FILE | list | watch ID | cancel ID | get ID | errors ID`: docs/http-api.md#batches."""

    action: Literal["submit", "run", "list", "watch", "cancel", "get", "errors"] = Field(
        "list",
        description="submit, run (submit and stay until the batch is over), list, watch, cancel, get (the answers) or errors "
        "(the lines that failed); without one: list",
    )
    name: Annotated[str, Field(max_length=4096)] = Field(
        "",
        description="a JSONL file to submit or run, else a batch's id; without one the newest",
    )
    output: str = Field("", description="get, errors: the lines go there; empty: to standard output")
    print_json: bool = Field(False, description="print what the gateway answers")
