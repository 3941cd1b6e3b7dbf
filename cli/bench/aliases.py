"""Translation of `vllm bench serve` options to `baton bench`, so that its scripts run unchanged; pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from cli.bench.settings import SEPARATOR
from common.settings import ConfigError

RENAMED = {
    "--base-url": "--url",
    "--model": "--served-model-name",
    "-m": "--served-model-name",
    "--random-input-len": "--input-len",
    "--random-output-len": "--output-len",
    "--sharegpt-output-len": "--output-len",
    "--custom-output-len": "--output-len",
    "--random-range-ratio": "--range-ratio",
    "--random-prefix-len": "--prefix-len",
}
OBJECTIVES = {"ttft": "--ttft-slo-ms", "tpot": "--tpot-slo-ms", "e2el": "--e2e-slo-ms", "e2e": "--e2e-slo-ms"}
NEEDLESS = {"--tokenizer": 1, "--tokenizer-mode": 1, "--ready-check-timeout-sec": 1, "--trust-remote-code": 0}
NEEDLESS |= {"--disable-tqdm": 0, "--use-beam-search": 0, "--skip-tokenizer-init": 0}
NEEDLESS |= {"--percentile-metrics": 1, "--metric-percentiles": 1}
DATASETS = ("random", "sharegpt", "custom")
BACKENDS = {"vllm": "completions", "openai": "completions", "openai-chat": "chat", "vllm-chat": "chat"}
SEVERAL = ("--goodput", "--metadata")


def translated(arguments: Sequence[str], *, now: datetime | None = None) -> tuple[list[str], list[str]]:
    """Our arguments for vLLM's or our own, and the options that are not needed here. Raises ConfigError."""
    given, out, needless = _pairs(arguments), list[str](), list[str]()
    place = {"--host": "127.0.0.1", "--port": "8000"}
    saved: dict[str, str] = {}
    for name, values in given:
        if name in NEEDLESS:
            needless.append(name)
        elif name == "--dataset-name":
            needless.append(_dataset(_one(name, values)))
        elif name in place:
            place[name] = _one(name, values)
        elif name in ("--save-result", "--save-detailed", "--result-dir", "--result-filename"):
            saved[name] = values[0] if values else ""
        else:
            out += _renamed(name, values)
    if any(name in place for name, _ in given):
        out += ["--url", f"http://{place['--host']}:{place['--port']}"]
    return out + _files(saved, now or datetime.now()), needless


def _pairs(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Options with their values; `--a=b` equals `--a b`."""
    found: list[tuple[str, list[str]]] = []
    for word in arguments:
        is_option = word.startswith("--") or word in RENAMED
        if not is_option and found:
            found[-1][1].append(word)
        else:
            name, equals, value = word.partition("=") if is_option else (word, "", "")
            found.append((name, [value] if equals else []))
    return found


def _renamed(name: str, values: list[str]) -> list[str]:
    if name == "--goodput":
        return [word for value in values for word in _objective(value)]
    if name == "--backend" or name == "--endpoint-type":
        if _one(name, values) not in BACKENDS:
            raise ConfigError(f"{name} {values[0]}: {', '.join(BACKENDS)} are known")
        return ["--endpoint", BACKENDS[values[0]]]
    if name == "--endpoint" and values and values[0].startswith("/"):
        return ["--endpoint", "chat" if values[0].endswith("/chat/completions") else "completions"]
    if name == "--arrivals":
        return _arrivals(_one(name, values))
    if name == "--label":
        return ["--metadata", f"label={_one(name, values)}"]
    if name in SEVERAL:
        return [name, SEPARATOR.join(values)]
    return [RENAMED.get(name, name), *values]


def _dataset(kind: str) -> str:
    """Drop the option, which --dataset-path implies. Raises ConfigError for generated prompts."""
    if kind not in DATASETS:
        raise ConfigError(
            f"--dataset-name {kind}: {', '.join(DATASETS)} are known, and --dataset-path FILE says it alone"
        )
    return "--dataset-name"


def _arrivals(how: str) -> list[str]:
    """Return release 0.1.0's two kinds of burstiness under their new names. Raises ConfigError."""
    if how not in ("poisson", "constant"):
        raise ConfigError(f"--arrivals {how}: use --burstiness, 1 for Poisson or inf for constant gaps")
    return ["--burstiness", "inf"] if how == "constant" else []


def _objective(text: str) -> list[str]:
    """Convert `ttft:500`, in milliseconds, to our option. Raises ConfigError."""
    name, _, limit = text.partition(":")
    if name not in OBJECTIVES or not limit:
        raise ConfigError(f"--goodput {text}: ttft:MS, tpot:MS or e2el:MS, for instance --goodput ttft:500 tpot:50")
    return [OBJECTIVES[name], limit]


def _files(saved: dict[str, str], now: datetime) -> list[str]:
    """Output paths of `--save-result` and `--save-detailed`."""
    if not saved.keys() & {"--save-result", "--save-detailed"}:
        return []
    name = saved.get("--result-filename") or f"baton-bench-{now:%Y%m%d-%H%M%S}.json"
    path = Path(saved.get("--result-dir") or ".") / name
    detailed = ["--output", str(path.with_suffix(".jsonl"))] if "--save-detailed" in saved else []
    return ["--output", str(path), *detailed]


def _one(name: str, values: list[str]) -> str:
    if len(values) != 1:
        raise ConfigError(f"{name} takes one value")
    return values[0]
