"""A job may come from another worker, in a `Reserve`: what would hurt others here is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.errors import InvalidRequestError
from common.messages import SamplingParams
from tests.fakes.worker import new_job
from worker.serving.checks import check_job

NAN, INF = float("nan"), float("inf")
SOUND = new_job("r", [1, 2, 3], SamplingParams(max_tokens=4))
BAD_JOBS: list[dict[str, Any]] = [
    {"gateway": "a b"},  # its frames would have no subject, and those of all others wait behind
    {"gateway": ""},
    {"gateway": "x.>"},
    {"decode_workers": ["ok", "*"]},
    {"request_id": "r" * 300},
    {"traceparent": "t" * 300},
    {"attempt": 0},
    {"token_ids": b"\x01"},
    {"hash_root": b"short"},
    {"num_prompt_tokens": 4},
]
BAD_SAMPLING: list[dict[str, Any]] = [
    {"temperature": NAN},
    {"temperature": -1.0},
    {"temperature": INF},
    {"top_p": NAN},
    {"top_p": 1.5},
    {"top_k": 2**40},
    {"min_p": 2.0},
    {"typical_p": float("nan")},
    {"seed": -1},
    {"seed": 2**65},
    {"presence_penalty": INF},
    {"frequency_penalty": NAN},
    {"repetition_penalty": 0.0},
    {"logprobs": 10**9},
    {"max_tokens": 0},
    {"max_tokens": 2**40},
    {"min_tokens": -1},
    {"logit_bias": {3: NAN}},
    {"logit_bias": {10**9: 1.0}},
    {"stop_token_ids": [-1]},
]


def test_a_sound_job_is_taken() -> None:
    check_job(SOUND, vocab_size=100, max_model_len=60)


@pytest.mark.parametrize("wrong", BAD_JOBS, ids=str)
def test_a_job_that_is_no_gateways_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        check_job(msgspec.structs.replace(SOUND, **wrong), vocab_size=100, max_model_len=60)


@pytest.mark.parametrize("wrong", BAD_SAMPLING, ids=str)
def test_what_no_device_can_compute_is_refused_before_it_joins_a_batch(wrong: dict[str, Any]) -> None:
    sampling = msgspec.structs.replace(SOUND.sampling, **wrong)
    with pytest.raises(InvalidRequestError):
        check_job(msgspec.structs.replace(SOUND, sampling=sampling), vocab_size=100, max_model_len=60)
