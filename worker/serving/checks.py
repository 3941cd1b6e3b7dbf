"""Checks of a job before it touches memory: a worker trusts no message, although the gateway checked it, too."""

from __future__ import annotations

import math
from array import array

from common.blocks import DIGEST_BYTES
from common.errors import InvalidRequestError
from common.messages import MAX_GRAMMAR_CHARS, Generate, Grammar, Job, SamplingParams
from common.subjects import is_id

MAX_CLOSING = 64  # tokens that end reasoning
MAX_ALLOWED = 65_536
MAX_BANNED = 2_048  # banned token runs, and single tokens
MAX_ID_CHARS = 256
U64, I32 = 2.0**64, 2**31 - 1
# Wider than the limits of the gateway's API.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e4),
    "top_p": (0, 1),
    "top_k": (-1, I32),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "seed": (0, U64),
    "presence_penalty": (-1e4, 1e4),
    "frequency_penalty": (-1e4, 1e4),
    "repetition_penalty": (5e-324, 1e4),
    "logprobs": (0, 100),
    "max_tokens": (1, I32),
    "min_tokens": (0, I32),
    "prompt_logprobs": (0, 100),
}


def check_job(job: Job, *, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidRequestError, naming the field, if no attempt can serve the job."""
    num_tokens, rest = divmod(len(job.token_ids), 4)
    if rest or num_tokens == 0:
        raise InvalidRequestError("token_ids must be packed uint32 and not empty", param="token_ids")
    if not 1 <= job.num_prompt_tokens <= num_tokens:
        raise InvalidRequestError("num_prompt_tokens is out of range", param="num_prompt_tokens")
    if num_tokens >= max_model_len:
        raise InvalidRequestError(
            f"the sequence has {num_tokens} tokens; this model serves {max_model_len} with the answer", param="prompt"
        )
    if len(job.hash_root) != DIGEST_BYTES:
        raise InvalidRequestError(f"hash_root must have {DIGEST_BYTES} bytes", param="hash_root")
    if max(array("I", job.token_ids)) >= vocab_size:
        raise InvalidRequestError(f"a token id is not below the vocabulary size {vocab_size}", param="token_ids")
    num_predicted, rest = divmod(len(job.prediction), 4)
    if rest or num_predicted > max_model_len or max(array("I", job.prediction), default=0) >= vocab_size:
        raise InvalidRequestError(f"prediction must be at most {max_model_len} packed token ids", param="prediction")
    for name in (job.gateway, *job.decode_workers):
        if not is_id(name):
            raise InvalidRequestError("gateway and decode_workers must be ids", param="gateway")
    if len(job.request_id) > MAX_ID_CHARS or len(job.traceparent) > MAX_ID_CHARS or job.attempt < 1:
        raise InvalidRequestError("request_id, traceparent or attempt is out of range", param="request_id")
    _check_generation(job.work, vocab_size)


def _check_generation(work: Generate, vocab_size: int) -> None:
    check_sampling(work.sampling)
    biased = [*work.sampling.logit_bias, *work.sampling.stop_token_ids]
    if any(not 0 <= token < vocab_size for token in biased):
        raise InvalidRequestError("logit_bias or stop_token_ids name a token that is not in the vocabulary")
    if work.grammar is not None:
        _check_grammar(work.grammar, vocab_size)


def _check_grammar(grammar: Grammar, vocab_size: int) -> None:
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"the grammar has more than {MAX_GRAMMAR_CHARS} characters", param="grammar")
    runs = [grammar.allowed, *grammar.banned]
    if len(grammar.allowed) > MAX_ALLOWED or len(runs) > MAX_BANNED or any(len(run) > MAX_BANNED for run in runs[1:]):
        raise InvalidRequestError("too many tokens are allowed or banned", param="grammar")
    if not all(runs[1:]) or not all(0 <= token < vocab_size for run in runs for token in run):
        raise InvalidRequestError("allowed and banned tokens must be in the vocabulary", param="grammar")
    closing = grammar.after
    if closing is not None and not (
        0 < len(closing) <= MAX_CLOSING and all(0 <= token < vocab_size for token in closing)
    ):
        raise InvalidRequestError(f"after must be 1 to {MAX_CLOSING} tokens of the vocabulary", param="grammar")


def check_sampling(sampling: SamplingParams) -> None:
    """Raise InvalidRequestError for parameters that no device can compute: they would fail the whole batch's pass."""
    for name, (low, high) in RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:  # NaN is in no range
            raise InvalidRequestError(f"{name} must be from {low:g} to {high:g}", param=name)
    if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise InvalidRequestError("logit_bias must be finite", param="logit_bias")
