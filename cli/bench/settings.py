"""Settings of `baton bench`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cli.reach import ClientOptions
from common.settings import Positive, Seconds


class BenchSettings(ClientOptions):
    """`baton bench`: load for any OpenAI-compatible server, and what its clients saw."""

    served_model_name: str = Field("", description="model to ask for; empty: the first that the server lists")
    endpoint: Literal["completions", "chat"] = Field("completions", description="which API")
    dataset_path: str = Field("", description="JSONL or ShareGPT-like JSON with prompts; empty: random ones")
    input_len: Positive = Field(512, description="tokens of a random prompt (chat: words), beside the shared prefix")
    output_len: Positive = Field(128, description="tokens of an answer")
    range_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="random lengths lie within (1 - this) and (1 + this) of the given ones"
    )
    prefix_len: Annotated[int, Field(ge=0)] = Field(0, description="tokens that prompts have in common")
    prefix_share: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="share of prompts with that prefix")
    vocab_size: Positive = Field(1000, description="random token ids are below this")
    ignore_eos: bool = Field(True, description="answers have their full length")
    request_rate: Annotated[float, Field(ge=0)] = Field(
        0.0, description="requests a second; 0: as many as may be in flight"
    )
    arrivals: Literal["poisson", "constant"] = Field("poisson", description="how requests are spread at that rate")
    max_concurrency: Annotated[int, Field(ge=0)] = Field(0, description="requests in flight at most; 0: any number")
    num_prompts: Positive = Field(100, description="requests in all")
    duration_s: Annotated[float, Field(ge=0)] = Field(0.0, description="stop sending after this; 0: send all")
    num_warmups: Annotated[int, Field(ge=0)] = Field(1, description="requests before, one by one, that do not count")
    timeout_s: Seconds = Field(600.0, description="a request that takes longer is an error")
    seed: int = Field(0, description="the same seed sends the same load")
    ttft_slo_ms: Annotated[float, Field(ge=0)] = Field(0.0, description="goodput: longest time to first token; 0: any")
    tpot_slo_ms: Annotated[float, Field(ge=0)] = Field(0.0, description="goodput: longest mean time per token; 0: any")
    e2e_slo_ms: Annotated[float, Field(ge=0)] = Field(0.0, description="goodput: longest time of a request; 0: any")
    print_each: bool = Field(False, description="print a line for each request that ended")
    json_file: str = Field("", description="write the results there as JSON")
