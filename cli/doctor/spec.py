"""A check that the engine supports every field of a model, in a child process that imports torch. Prints findings as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from engine.config import EngineConfig
from engine.families import read_model_spec
from engine.foreign import is_foreign
from engine.pooling.families import read_encoder_spec
from engine.resolving import read_config, staged_model
from engine.spec.model import ModelSpec
from engine.spec.ranks import FLAG, experts_in, for_rank
from engine.spec.stages import FLAG as OF_STAGES
from engine.spec.stages import for_stage
from modelfiles.pooling import is_pooled
from services.runtime.checks.finding import Finding
from services.runtime.checks.fit import check_needs
from services.runtime.loading import load_settings
from services.worker.settings import WorkerServiceSettings


def check(
    model: Path, device: str = "cpu", ranks: int = 1, total: int = 0, whole_experts: int = 1, stages: int = 1
) -> Iterator[Finding]:
    """Read the model as a worker of so many ranks or stages does, without its weights.

    `total`: the memory of a rank's device, in bytes; 0: unknown. `whole_experts`: 0 if ranks have parts of all.
    """
    config = EngineConfig(
        model=model, device=device, tensor_parallel_size=ranks, enable_expert_parallel=bool(whole_experts)
    )
    try:
        if is_pooled(model):
            layers = len(read_encoder_spec(model).layers)
            yield Finding("model", "ok", f"all fields are known: {layers} layers")
            return
        if is_foreign(config):
            return  # only transformers could tell, and it is slow
        spec = read_model_spec(model)
    except (ValueError, OSError) as error:
        yield Finding("model", "fail", " ".join(str(error).split()))
        return
    text = f"all fields are known: {len(spec.layers)} layers, {spec.max_position_embeddings} positions"
    yield Finding("model", "ok", text)
    if ranks > 1:
        yield shared(config)
    if stages > 1:
        yield staged(config, stages)
    options = ["--model", str(model), "--device", device, "--tensor-parallel-size", str(ranks)]
    options += [] if whole_experts else ["--no-enable-expert-parallel"]
    settings = load_settings(WorkerServiceSettings, command="worker", arguments=options, environment={}).sized()
    try:
        fit = check_needs(settings.engine(), total, stages=stages) if total else None
    except ValueError:
        return  # ranks that can't be are told already
    if fit is not None:
        yield fit


def shared(config: EngineConfig) -> Finding:
    """Tell what of a model each of its ranks has, or why they can't share it."""
    ranks = config.tensor_parallel_size
    try:
        spec = read_config(replace(config, device="cpu"))
        share = for_rank(spec, 0, ranks)
    except ValueError as error:
        text, _, remedy = str(error).rpartition(": ")
        return Finding("ranks", "fail", text, remedy)
    if not spec.attentions:
        return Finding("ranks", "ok", f"{FLAG} {ranks}: every rank has all states, which aren't shared")
    heads = f"{share.attentions[0].heads.num_heads} of {spec.attentions[0].heads.num_heads} attention heads"
    ours, all_heads = (each.attentions[0].heads.num_kv_heads for each in (share, spec))
    kept = f"{ours} of {all_heads} key and value heads"
    copies = f", which {ranks // all_heads} ranks each keep" if ranks > all_heads else ""
    return Finding("ranks", "ok", f"{FLAG} {ranks}: a rank has {heads} and {kept}{copies}{_experts(spec, share)}")


def staged(config: EngineConfig, count: int) -> Finding:
    """Tell which layers each of a model's stages has, or why it can't be cut into these."""
    try:
        config.check_stages(count, is_foreign=False)
        spec = staged_model(config, count)
        layers = [for_stage(spec, number, count).own_layers for number in range(count)]
    except ValueError as error:
        text, _, remedy = str(error).rpartition(": ")
        return Finding("stages", "fail", text, remedy)
    ranges = ", ".join(f"{each.start} to {each.stop - 1}" for each in layers)
    return Finding("stages", "ok", f"{OF_STAGES} {count}: stages have the layers {ranges}")


def _experts(spec: ModelSpec, share: ModelSpec) -> str:
    """Tell what a rank has of a model's experts; nothing if there are none."""
    for whole, own in zip(spec.layers, share.layers, strict=True):
        all_of_them, ours = experts_in(whole.mlp), experts_in(own.mlp)
        if all_of_them is None or ours is None:
            continue
        if ours.is_cut:
            return f", and {ours.size} of {all_of_them.size} features of each expert"
        return f", and {ours.num_experts} of {all_of_them.num_experts} experts"
    return ""


if __name__ == "__main__":
    json.dump(
        [asdict(finding) for finding in check(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))], sys.stdout
    )
