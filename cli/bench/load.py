"""The load: prompts and arrival times from a seed; pure except for reading the file of prompts."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from cli.bench.settings import BenchSettings
from common.settings import ConfigError

TOKEN_IDS = 256  # random ids are below, so that any vocabulary has them


def bodies(settings: BenchSettings, model: str, count: int, seed: int) -> list[bytes]:
    """`count` request bodies, the same for the same seed. Raises ConfigError for an unusable file."""
    random_ = random.Random(seed)
    if settings.dataset_path:
        prompts = read_prompts(Path(settings.dataset_path), settings.output_len)
        random_.shuffle(prompts)
        chosen = [prompts[index % len(prompts)] for index in range(count)]
        return [_body(settings, model, prompt, answer) for prompt, answer in chosen]
    shared = random.Random(settings.seed)
    prefix = [shared.randrange(TOKEN_IDS) for _ in range(settings.prefix_len)]
    return [_random_body(settings, model, prefix, random_) for _ in range(count)]


def arrivals(settings: BenchSettings, seed: int) -> list[float]:
    """Due times in seconds after the start; all 0 without a rate."""
    count, rate = settings.num_prompts, settings.request_rate
    if rate and not settings.burstiness:  # inf
        return [index / rate for index in range(count)]
    return poisson(count, rate, random.Random(seed), settings.burstiness)


def poisson(count: int, rate: float, random_: random.Random, shape: float = 1.0) -> list[float]:
    """Arrival times from the first of `count`: gamma gaps (shape 1: Poisson), scaled to span `count / rate` seconds.

    So does `vllm bench serve`: unscaled, a few hundred arrivals miss the rate by up to a tenth. All 0 for a rate of 0.
    """
    if not rate:
        return [0.0] * count
    gaps = (random_.expovariate(rate) if shape == 1 else random_.gammavariate(shape, 1 / shape) for _ in range(count))
    ends = list(itertools.accumulate(gaps))
    scale = count / rate / ends[-1]
    return [0.0, *(scale * end for end in ends[:-1])]


def read_prompts(path: Path, default_len: int) -> list[tuple[str, int]]:
    """Read prompts and output lengths: JSON lines of {"prompt": …, "output_len": …}, ShareGPT conversations, or a list.

    Raises ConfigError when the file can't be read or has no prompts.
    """
    try:
        text = path.read_text(encoding="utf-8")
        rows = (
            json.loads(text) if text.lstrip().startswith("[") else [json.loads(row) for row in text.split("\n") if row]
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path {path}: {error}") from None
    prompts = [found for row in rows if (found := _prompt(row, default_len))]
    if not prompts:
        raise ConfigError(f'--dataset-path {path}: no row has a "prompt" or "conversations"')
    return prompts


def more_fields(settings: BenchSettings) -> dict[str, Any]:
    """Return the fields that `--extra-body` adds to each request. Raises ConfigError."""
    if not settings.extra_body:
        return {}
    try:
        fields = json.loads(settings.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra-body: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError('--extra-body: a JSON object, for instance {"top_k": 5}')
    return fields


def _prompt(row: Any, default_len: int) -> tuple[str, int] | None:
    if not isinstance(row, dict):
        return None
    turns = row.get("conversations") or row.get("messages") or []
    text = row.get("prompt") or (turns and (turns[0].get("value") or turns[0].get("content")))
    length = row.get("output_len") or row.get("output_tokens") or default_len
    return (str(text), int(length)) if text else None


def _random_body(settings: BenchSettings, model: str, prefix: list[int], random_: random.Random) -> bytes:
    length, answer = (
        _length(mean, settings.range_ratio, random_) for mean in (settings.input_len, settings.output_len)
    )
    tokens = [*prefix, *(random_.randrange(TOKEN_IDS) for _ in range(length))]
    if settings.endpoint == "chat":
        return _body(settings, model, " ".join(f"w{token}" for token in tokens), answer)
    return _body(settings, model, tokens, answer)


def _length(mean: int, ratio: float, random_: random.Random) -> int:
    return max(1, random_.randint(round(mean * (1 - ratio)), round(mean * (1 + ratio))))


def _body(settings: BenchSettings, model: str, prompt: str | list[int], answer: int) -> bytes:
    request: dict[str, Any] = {"model": model, "max_tokens": answer, "temperature": 0, "stream": True}
    request["stream_options"] = {"include_usage": True}
    if settings.ignore_eos:
        request["ignore_eos"] = True
    if settings.endpoint == "chat":
        request["messages"] = [{"role": "user", "content": prompt}]
    else:
        request["prompt"] = prompt
    return json.dumps(request | more_fields(settings)).encode()
