"""Settings of `baton batch`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cli.reach import ClientOptions


class BatchSettings(ClientOptions):
    """`baton batch submit FILE | list | watch ID | cancel ID | get ID`: batches, docs/http-api.md#batches."""

    action: Literal["submit", "list", "watch", "cancel", "get"] = Field(
        "list", description="submit, list, watch, cancel or get; without one: list"
    )
    name: Annotated[str, Field(max_length=4096)] = Field(
        "",
        description="a JSONL file to submit, else a batch's id; watch, cancel and get: without one the newest",
    )
    watch: bool = Field(False, description="submit: stay until the batch is over")
    output: str = Field("", description="get: the answers go there; empty: to standard output")
    errors: bool = Field(False, description="get: the lines that failed, in place of the answers")
    print_json: bool = Field(False, description="print what the gateway answers")
