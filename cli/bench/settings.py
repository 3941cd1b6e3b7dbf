"""Settings of `baton bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from cli.reach import ClientOptions
from common.settings import ConfigError, Positive, Word

SEPARATOR = ","
MAX, SLO_SHARE = "max", 0.95
ANY = BeforeValidator(Word("any", 0))
ALL_AT_ONCE = ALL_ALIKE = BeforeValidator(Word("inf", 0))
Milliseconds = Annotated[float, Field(ge=0), ANY]


class BenchSettings(ClientOptions):
    """`baton bench`: load for any OpenAI-compatible server, and what its clients saw.

    `vllm bench serve`'s options are understood, too. `baton bench compare A.json B.json` compares two results of --output.
    """

    action: Literal["send", "compare"] = Field(
        "send", description="send load, or compare two results; without one: send"
    )
    before: str = Field("", description="compare: a JSON result of --output")
    after: str = Field("", description="compare: another one")

    served_model_name: str = Field("", description="model to ask for; empty: the first that the server lists")
    endpoint: Literal["completions", "chat"] = Field("completions", description="which API")
    num_prompts: Positive = Field(
        100, description="requests in all; where there are steps and this is given, of each step"
    )
    request_rate: Annotated[float, Field(ge=0), ALL_AT_ONCE] = Field(
        0.0, description="requests a second; inf: as many as may be in flight. --sweep max begins there, or at 1"
    )
    max_concurrency: Annotated[int, Field(ge=0), ANY] = Field(
        0, description="requests in flight at most; any: no bound"
    )
    input_len: Positive = Field(512, description="tokens of a random prompt (chat: words), beside the shared prefix")
    output_len: Positive = Field(128, description="tokens of an answer")
    sweep: str = Field(
        "",
        description="a step for each load: request rates `1,2,4` or `1:16:5` (5 rates from 1 to 16), or `concurrency=1,4,16`; "
        "max: by bisection up to the highest rate that keeps 0.95 of the requests within the objectives, or `max=0.99` of them",
    )
    ttft_slo_ms: Milliseconds = Field(0.0, description="objective: longest time to first token")
    tpot_slo_ms: Milliseconds = Field(0.0, description="objective: longest mean time per further token")
    e2e_slo_ms: Milliseconds = Field(0.0, description="objective: longest time of a request")
    output: str = Field(
        "",
        description="write the results there, by the file's ending: .html a report that needs no network, .csv a row for each "
        "step, .jsonl a line for each request, else JSON; one flag each, or by commas",
    )
    dataset_path: str = Field("", description="JSONL or ShareGPT-like JSON with prompts; empty: random ones")
    range_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="random lengths lie within (1 - this) and (1 + this) of the given ones"
    )
    prefix_len: Annotated[int, Field(ge=0)] = Field(0, description="tokens that prompts have in common")
    ignore_eos: bool = Field(True, description="answers have their full length")
    extra_body: str = Field("", description="JSON object with more fields for each request")
    burstiness: Annotated[float, Field(ge=0, le=1000), ALL_ALIKE] = Field(
        1.0,
        description="shape of the gaps' gamma distribution; 1: Poisson, below: in bursts, above: more even, inf: all alike",
    )
    num_warmups: Annotated[int, Field(ge=0)] = Field(1, description="requests before, one by one, that do not count")
    seed: int = Field(0, description="the same seed sends the same load")
    metadata: str = Field(
        "", description="NAME=VALUE pairs to keep with the results; label=NAME is the run's in reports and comparisons"
    )

    @property
    def finds_max(self) -> bool:
        return self.sweep.partition("=")[0] == MAX

    @property
    def slo_share(self) -> float:
        """The share of the requests that must meet all objectives. Raises ConfigError."""
        share = self.sweep.partition("=")[2] if self.finds_max else ""
        try:
            found = float(share or SLO_SHARE)
        except ValueError:
            found = 0.0
        if not 0 < found <= 1:
            raise ConfigError(f"--sweep {self.sweep}: max, or max=SHARE of the requests, more than 0 and at most 1")
        return found

    @property
    def has_objectives(self) -> bool:
        return bool(self.ttft_slo_ms or self.tpot_slo_ms or self.e2e_slo_ms)

    @property
    def outputs(self) -> list[Path]:
        """The files to write."""
        return [Path(file) for file in self.output.split(SEPARATOR) if file]

    def objectives(self) -> str:
        """The objectives in words; "" if there are none."""
        limits = {"TTFT": self.ttft_slo_ms, "TPOT": self.tpot_slo_ms, "E2E": self.e2e_slo_ms}
        return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in limits.items() if limit)
