"""Objects about the server and its models. REST and gRPC have the same fields."""

from __future__ import annotations

from common import VERSION as RELEASE
from common.errors import UnavailableError
from common.words import HostStatus
from gateway.answers.catalogue import PooledFacts, Tally
from gateway.answers.start import Answers
from gateway.dialects.kserve.generate import check_version
from gateway.dialects.kserve.outputs import VERSION
from gateway.dialects.kserve.rows import tensors_of
from gateway.dialects.kserve.tensors import BYTES
from gateway.dialects.kserve.wish import INPUTS, OUTPUTS, TEXT_INPUT
from gateway.http.problem import Json

EXTENSIONS = ["binary_tensor_data", "generate", "model_configuration", "model_repository", "parameters", "statistics"]
PLATFORM = "baton"
_TYPES = {BYTES: "TYPE_STRING"}  # others are TYPE_ and the datatype


def server(answers: Answers) -> Json:
    return {"name": "baton", "version": RELEASE, "extensions": EXTENSIONS}


def live(answers: Answers) -> Json:
    return {"live": True}


def ready(answers: Answers) -> Json:
    """Check readiness. Raises UnavailableError while no model can be served."""
    if not answers.generations.ready:
        raise UnavailableError(answers.generations.not_ready_reason or "no worker is ready")
    return {"ready": True}


def model_ready(answers: Answers, model: str, version: str | None) -> Json:
    """Check a model's readiness. Raises ModelNotFoundError, or UnavailableError without a worker of it."""
    check_version(model, version)
    own = answers.catalogue.pooled_name(model)
    if not (answers.catalogue.pools(own) if own else answers.find(model).is_ready):
        raise UnavailableError(f"the model {model!r} has no ready worker now")
    return {"name": model, "ready": True}


def metadata(answers: Answers, model: str, version: str | None) -> Json:
    """Raises ModelNotFoundError."""
    _check(answers, model, version)
    inputs = [{"name": name, "datatype": datatype, "shape": [1]} for name, datatype in INPUTS.items()]
    outputs = [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in OUTPUTS.items()]
    if (facts := _pooled(answers, model)) is not None:
        inputs, outputs = tensors_of(facts)
    return {"name": model, "versions": [VERSION], "platform": PLATFORM, "inputs": inputs, "outputs": outputs}


def config(answers: Answers, model: str, version: str | None) -> Json:
    """Triton's model configuration, as far as it applies here. Raises ModelNotFoundError."""
    told = metadata(answers, model, version)
    pools = _pooled(answers, model) is not None
    inputs, outputs = (
        [{"name": one["name"], "data_type": _data_type(one["datatype"]), "dims": one["shape"]} for one in told[side]]
        for side in ("inputs", "outputs")
    )
    return {
        "name": model,
        "platform": "",
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [one | {"optional": one["name"] != TEXT_INPUT} for one in inputs],
        "output": outputs,
        "model_transaction_policy": {"decoupled": not pools},
    }


def _pooled(answers: Answers, model: str) -> PooledFacts | None:
    """A model of vectors or scores; None: it generates, or is unknown."""
    return answers.catalogue.pooled.get(answers.catalogue.pooled_name(model))


def _data_type(datatype: str) -> str:
    return _TYPES.get(datatype, f"TYPE_{datatype}")


def statistics(answers: Answers, model: str, version: str | None) -> Json:
    """Counts since this gateway's start, of one model or of all. Raises ModelNotFoundError."""
    if model:
        _check(answers, model, version)
    pooled = answers.catalogue.pooled
    if own := answers.catalogue.pooled_name(model):
        names = [own]
    else:
        names = [answers.find(model).name] if model else [*(card.name for card in answers.models()), *pooled]
    return {"model_stats": [_statistics(name, answers.tallies.of(name)) for name in names]}


def _statistics(model: str, tally: Tally) -> Json:
    nothing = {"count": 0, "ns": 0}
    return {
        "name": model,
        "version": VERSION,
        "last_inference": tally.last_unix_ms,
        "inference_count": tally.succeeded,
        "execution_count": tally.succeeded,
        "inference_stats": {
            "success": {"count": tally.succeeded, "ns": _ns(tally.succeeded_s)},
            "fail": {"count": tally.failed, "ns": _ns(tally.failed_s)},
            "queue": {"count": tally.succeeded, "ns": _ns(tally.waited_s)},
            "compute_input": nothing,
            "compute_infer": {"count": tally.succeeded, "ns": _ns(tally.succeeded_s - tally.waited_s)},
            "compute_output": nothing,
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [],
        "memory_usage": [],
        "response_stats": {},
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


_STATES = {HostStatus.LOADING: "LOADING", HostStatus.UNLOADING: "UNLOADING"}


def index(answers: Answers, *, only_ready: bool) -> list[Json]:
    """The served models, and if they have workers."""
    told = [_indexed(answers, card.name) for card in answers.models()]
    for name in answers.catalogue.pooled:
        state, reason = ("READY", "") if answers.catalogue.pools(name) else ("UNAVAILABLE", "no ready worker")
        told.append({"name": name, "version": VERSION, "state": state, "reason": reason})
    return [one for one in told if one["state"] == "READY" or not only_ready]


def _indexed(answers: Answers, name: str) -> Json:
    served = answers.find(name)
    hosted = answers.loads.find(served.name) if answers.loads is not None else None
    state, reason = ("READY", "") if served.is_ready else ("UNAVAILABLE", "no ready worker")
    if hosted is not None and not served.is_ready:
        reason = hosted.reason or str(hosted.status)
        state = _STATES.get(hosted.status, state)
    return {"name": name, "version": VERSION, "state": state, "reason": reason}


def _check(answers: Answers, model: str, version: str | None) -> None:
    if not answers.catalogue.pooled_name(model):
        answers.find(model)
    check_version(model, version)
