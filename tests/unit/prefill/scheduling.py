"""Prompts for tests of the prefill scheduler."""

from __future__ import annotations

from common.messages import SamplingParams
from prefill.request import PrefillRequest
from tests.fakes.worker import claim, new_job
from worker.serving.allocation import sequence_of


def waiting(*lengths: int) -> list[PrefillRequest]:
    requests = []
    for index, length in enumerate(lengths):
        claimed = claim(new_job(f"r{index}", list(range(length)), SamplingParams(max_tokens=4), prefill=True))
        requests.append(PrefillRequest(claimed=claimed, sequence=sequence_of(claimed.job), admitted=True))
    return requests
