"""Writes docs/models.md: what is read from each case's config.json by the code that loads it.

PYTHONPATH=. .venv/bin/python -m tests.unit.engine.families.table > docs/models.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import fields as fields_of
from dataclasses import is_dataclass, replace
from typing import Any

from engine.families import FAMILIES, model_spec
from engine.spec.attention import AttentionSpec
from engine.spec.experts import SparseMlpSpec
from engine.spec.mla import MLASpec
from engine.spec.model import DenseBesideExpertsSpec, GatedMlpSpec, LayerSpec, ModelSpec, ShortcutSpec, SideBySideSpec
from engine.spec.scaling import RopeSpec
from engine.spec.states import MambaSpec, SelectiveSpec, ShortConvolutionSpec
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.families.rewritten import REWRITTEN
from tests.unit.engine.families.sizes import cards
from tests.unit.gateway.parsing.families import formats_of

HEAD = '''\
# Models

This page is about models that generate; [embeddings](embeddings.md) lists those of vectors and scores.

Baton serves these architectures (`architectures` in config.json), in float32, bfloat16 and float16. A field of config.json
that a family does not know is refused by name. Of checkpoints that see or hear the text part is served; image and audio parts
of messages are refused. Logits of Cohere 2 and Granite are multiplied beside towers, too, where transformers 5.17 forgets it.

Checked: for each row, small random models in float32 give the tokens and logprobs of `transformers`. Two engines hand blocks
over, prompts are cut into chunks, begin with cached blocks, join a batch, and lose their blocks
(`tests/unit/engine/families/`). `make models` does it with separate processes. Kernels are checked for each switch in
Triton's interpreter (`tests/unit/kernels/`).

Layers with a window, or attention within chunks, keep what the longest window sees, beside layers that see everything
([kv.md](kv.md) says where); in models without such layers, or with states, they keep all positions. Values that are smaller
than keys (MiMo-V2) are kept with zeros up to a key's size: its pool is a fifth larger than it could be. LongRoPE's long
factors are used where `--max-model-len` is above `original_max_position_embeddings`, for short prompts too. Dynamic NTK
changes nothing up to `max_position_embeddings`, and no worker goes beyond.

Other causal models of `transformers` run over Baton's cache by its own code, where it is installed (the extra
`transformers`): `--model-impl auto` does so for architectures that are not below, with a line in the log, and `--model-impl
transformers` for any. Nothing is fused, so that is slower: Llama 3.1 8B's shape decodes in 6.9 and 9.3 ms for 1 and 32 sequences
on an H200 (`engine-transformers.md`; 4.1 and 5.4 by Baton's own). On a GPU passes are captured in CUDA graphs as those of Baton's
own families are, unless

- a pass brings numbers from the host, or leaves something in the model for the next one (PhiMoE): a trial without weights
  shows it;
- the host waits for the GPU within a pass: torch tells at the start. Experts do so in float16 and float32, whose products torch
  computes in a loop; in bfloat16 they are captured.

`engine.not_captured` in the log then says why. Neither way changes an answer (`tests/gpu/test_graphs.py`). Refused by name:
models with states, attention of their own (biases, latents), masks of their own, attention to later tokens, LongRoPE and
dynamic ropes. Seven are checked as above.

DeepSeek-V3.2 and GLM-5 attend to the 2,048 positions that an indexer chooses; of equal scores the earliest. Its queries and keys
are not rotated by a Hadamard matrix (which changes no product) and not rounded to 8 bits, as in `transformers`. Its kernels'
checks passed on an H200; those of prompts' scores have changed since.

LongCat-Flash counts as twice its `num_layers`: each is two layers with latents. Experts that do nothing take no part in the
experts' products. A GPU answers as a CPU.

Not served yet, by use: DeepSeek-V4, MiniMax-M3 and Step 3.5 and 3.7; ERNIE 4.5 VL; Llama 3.2 Vision; MiniMax-01; Zamba2 and
FalconMamba; DBRX. Not planned: models whose prompts are images (OCR), see both ways (PaliGemma), or make no text; diffusion.
Of others whose code is not in transformers (InternLM 2, ChatGLM, Baichuan, Molmo, DeciLM) none.
`--model-impl transformers` takes OPT, GPT-NeoX, GPT-BigCode and BitNet;
it refuses GPT-2, GPT-J, BLOOM, Falcon and MPT.

[GGUF files](gguf.md) of some of them are read, too.

## A family of your own

A package that is installed beside Baton may bring families: entry points of the group `baton.families`, by the class in
`config.json`. Gateway, `baton doctor` and `baton show` know the names; workers call the function, which reads `config.json` into
a `ModelSpec`, as those in `engine/families` do. Layers are those that Baton computes. Its `pyproject.toml`:

```toml
[project]
name = "pencil-for-baton"
version = "1"

[project.entry-points."baton.families"]
PencilForCausalLM = "pencil:read_pencil"
```

and its `pencil.py`, for a Llama whose gate has another name for its size:

```python
from engine.families.meta import read_llama
from engine.families.reading import Fields
from engine.spec.model import ModelSpec


def read_pencil(fields: Fields) -> ModelSpec:
    """Llama, with `ffn_size`."""
    size = fields.number("ffn_size")
    fields.ignore("ffn_size")  # the copy below has it, too
    return read_llama(fields.with_values(intermediate_size=size))
```

A field that the function does not read is refused, as with Baton's own. A name that Baton has stays Baton's. The functions are
not a stable interface yet: name Baton's version in the package's requirements.

A worker is one GPU, or one for each of its [ranks](operations.md#ranks), which ran on CPUs alone so far. So the largest of
these are served in small relatives only, or not yet:

CARDS

`./baton doctor FOLDER --device cuda` says whether a checkpoint fits the cards that are here.

Tool calls and reasoning are told from content where the last two columns name a format
([HTTP API](http-api.md#tool-calls-and-reasoning)): of published models, by what their folders show
(`tests/unit/gateway/parsing/families.py`). Elsewhere, and where a folder shows no format, calls come as text. Templates of
Phi-4-mini, InternLM 3 and DeepSeek-V3.2 show the model no tools.

This page is written by `python -m tests.unit.engine.families.table > docs/models.md`. The first column is the file in
`engine/families/` that reads it: the maker's, or `towers`, where `text_config` says whose text model it is.

| maker | architecture | what | switches that were checked | calls | reasoning |
|---|---|---|---|---|---|
'''
NAMES = {
    "backwards": "rotation backwards",
    "clip": "queries, keys, values cut off",
    "after_eps": "another epsilon behind halves",
    "latent_scale": "scale of latents",
    "ends_shortcut": "experts across layers",
    "qkv_bias": "biases of queries, keys, values",
    "output_bias": "bias of attention's output",
    "scale": "scale of scores",
    "softcap": "soft-cap of scores",
    "sinks": "attention sinks",
    "query_growth": "queries grow with the position",
    "borrows": "keys and values of earlier layers",
    "layer_inputs": "inputs of each layer",
    "altup": "several residual streams",
    "laurel": "residual of low rank",
    "sparsity": "sparse gates",
    "window": "windows",
    "fused": "fused tensors",
    "bias": "biases of the MLP",
    "has_bias": "biases of convolutions",
    "most_strength": "negative eigenvalues",
    "shares": "parallel halves",
    "multiplier": "residual multiplier",
    "scalar": "layer multiplier",
    "interleaved": "interleaved pairs",
    "taps_bias": "bias of the convolution",
    "multipliers": "multipliers of the state's product",
    "gate_multiplier": "multiplier of the gate",
    "in_bias": "bias of the state's product",
    "shortest": "limits of steps",
    "share": "partial rotation",
}


def table() -> str:
    rows = [_row(architecture) for architecture in sorted(FAMILIES, key=lambda name: (_maker(name), name.lower()))]
    return HEAD.replace("CARDS", cards()) + "".join(rows)


def _row(architecture: str) -> str:
    cases = [case for case in CASES if case.architecture() == architecture]
    found = sorted({switch for case in cases for switch in switches(_spec(case))})
    what = (FAMILIES[architecture].__doc__ or "").split("\n", 1)[0]
    checked = (", ".join(found) or "none beside the plain ones") if cases else "not checked by itself"
    if architecture in REWRITTEN:
        other, _ = REWRITTEN[architecture]
        checked = f"those of `{other.architecture()}`, by other names"
    calls, reasoning = formats_of(architecture)
    return f"| {_maker(architecture)} | `{architecture}` | {what} | {checked} | {calls} | {reasoning} |\n"


def _maker(architecture: str) -> str:
    """The maker's file or folder in `engine/families/`."""
    return FAMILIES[architecture].__module__.split(".")[2]


def _spec(case: Case) -> ModelSpec:
    return model_spec({**case.config_object().to_dict(), "architectures": [case.architecture()]})


def switches(spec: ModelSpec) -> set[str]:
    """What is on in a model, in words."""
    found = set(_on(spec))
    kinds = {"rms_plus_one": "norms of 1 + weight", "layer": "LayerNorm", "layer_plus_one": "LayerNorm of 1 + weight"}
    if spec.norms.kind != "rms":
        found.add(kinds[spec.norms.kind])
    if not spec.norms.has_weight:
        found.add("norms without weights")
    head, embedding = spec.head, spec.embedding
    told = {
        "norm of embeddings": bool(embedding.norm or embedding.is_normed),
        "embedding multiplier": embedding.multiplier != 1.0,
        "rows of images' tokens": bool(embedding.placeholders),
        "another kind of last norm": head.norm_kind is not None,
        "tied head": head.is_tied,
        "logits multiplier": head.multiplier != 1.0,
        "soft-cap of logits": bool(head.softcap),
        "bias of the head": head.bias,
    }
    found |= {name for name, is_on in told.items() if is_on}
    if len({layer.mixer for layer in spec.layers}) > 1:
        found.add("kinds of layers")
    if any(None in (layer.mixer, layer.mlp) for layer in spec.layers):
        found.add("layers of one half")
    for layer in spec.layers:
        found |= _of_layer(layer)
    return found


def _of_layer(layer: LayerSpec) -> set[str]:
    if isinstance(layer.mixer, SideBySideSpec):
        halves = (
            replace(layer, mixer=layer.mixer.mamba, around_mixer=layer.mixer.around_mamba),
            replace(layer, mixer=layer.mixer.attention, around_mixer=layer.mixer.around_attention),
        )
        return {"mixers side by side"}.union(*map(_of_layer, halves)) - {NAMES["shares"]}
    parts = (layer.mixer, layer.mlp, layer.around_mixer, layer.around_mlp)
    found = {switch for part in (*parts, layer) if part is not None for switch in _on(part)}
    if isinstance(layer.mixer, AttentionSpec) and layer.mixer.window < 0:
        found = found - {NAMES["window"]} | {"attention within chunks"}
    if layer.around_mixer.after:
        found.add("norms around halves" if layer.around_mixer.before else "norms after halves")
    if isinstance(layer.mlp, GatedMlpSpec) and layer.mlp.activation != "silu":
        found.add(layer.mlp.activation)
    if type(layer.mlp).__name__ == "PlainMlpSpec":
        found.add(f"{getattr(layer.mlp, 'activation', '')} without a gate")
    if isinstance(layer.mlp, SparseMlpSpec):
        found |= set(_of_experts(layer.mlp))
    if isinstance(layer.mlp, ShortcutSpec):
        found |= set(_of_experts(layer.mlp.experts))
    if isinstance(layer.mlp, DenseBesideExpertsSpec):
        found |= {"experts beside the MLP", layer.mlp.dense.activation, *_of_experts(layer.mlp.experts)}
    if isinstance(layer.mixer, AttentionSpec):
        found |= _of_attention(layer.mixer)
    if isinstance(layer.mixer, MLASpec):
        found |= {"latents", *_of_rope(layer.mixer.rope)}
        found |= {"queries through fewer features"} if layer.mixer.sizes.query_rank else set()
        if (sparse := layer.mixer.sparse) is not None:
            found |= {"chosen positions"} | ({"choices of earlier layers"} if sparse.indexer is None else set())
    if isinstance(layer.mixer, ShortConvolutionSpec):
        found.add("short convolutions")
    if isinstance(layer.mixer, SelectiveSpec):
        found.add("a decay for each number of a state")
    if isinstance(layer.mixer, MambaSpec):
        found |= set(_on(heads := layer.mixer.heads))
        if heads.norm != "after":
            found.add("no norm of the state's answer" if heads.norm == "none" else "norm before the gate")
    return found


def _of_experts(mlp: SparseMlpSpec) -> Iterable[str]:
    rule = mlp.router.rule
    yield "routing by " + rule.score.name.lower().replace("_", " ")
    told = {
        "routing in groups": rule.num_groups > 1,
        "routing renormalised": rule.renormalised,
        "routing scaled": rule.scale != 1.0,
        "routing corrected": bool(mlp.tensors.correction),
        "shared experts": mlp.shared is not None,
        "experts without gates": not mlp.has_gates,
        "experts of fewer features": mlp.latent is not None,
        "gated shared expert": mlp.shared is not None and mlp.shared.is_gated,
        "biases of experts": mlp.expert_bias,
        "clamped activation": mlp.clamp is not None,
        "weighted inputs of experts": mlp.weighs_inputs,
        "experts' weights scaled": bool(mlp.router.weight_scale),
        "experts without a product": bool(mlp.identities),
    }
    yield from (name for name, is_on in told.items() if is_on)


def _of_attention(mixer: AttentionSpec) -> set[str]:
    found = set()
    if (norm := mixer.qk_norm) is not None:
        where = "after rope " if norm.after_rope else ""
        found.add(f"QK-norm {where}over {'all heads' if norm.over == 'all' else 'each head'}")
        found |= {"LayerNorm of each head"} if norm.over == "each" else set()
    for part in (mixer.scores, mixer.projections, mixer.sharing):
        found |= set(_on(part))
    told = {
        "norm of values": mixer.values.norm,
        "values are keys": mixer.values.are_keys,
        "values of another size": bool(mixer.values.features),
        "scale of values": mixer.values.scale != 1.0,
        "gate of attention's output": mixer.has_fused_gate,
        "gate beside attention's product": bool(mixer.gate_size),
        "gates of heads": mixer.gate is not None and mixer.gate.by_head,
    }
    return found | {name for name, is_on in told.items() if is_on} | _of_rope(mixer.rope)


def _of_rope(rope: RopeSpec | None) -> set[str]:
    if rope is None:
        return {"layers without rope"}
    found = set(_on(rope))
    if rope.scaling is not None:
        found.add("rope " + type(rope.scaling).__name__.removesuffix("Scaling").lower())
    return found


def _on(part: Any) -> Iterable[str]:
    assert is_dataclass(part)
    for field in fields_of(part):
        if field.name in NAMES and getattr(part, field.name) not in (field.default, False):
            yield NAMES[field.name]


if __name__ == "__main__":
    sys.stdout.write(table())
