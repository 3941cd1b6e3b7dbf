# mypy: allow-untyped-calls
"""Checkpoints with a layer for multi-token prediction, and its drafts in plain torch around transformers' own layer.

Every row of the text is computed anew for each token. The layer is one of another checkpoint of the family.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm

from tests.unit.engine.families import experts, hybrids, latents
from tests.unit.engine.families.case import Case

HIDDEN = 64


@dataclass(frozen=True, kw_only=True)
class Mtp:
    """A family's tensors, by what they are, below a prefix; and what else its published forward pass does."""

    case: Case
    under: str  # prefix; {layers}: the model's number of layers
    names: dict[str, str]  # "embedding", "hidden", "projection" and "norm" -> tensors'
    layer: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # fields of the checkpoint over transformers'
    adds_one: bool = False  # to its norms' weights
    hidden_first: bool = False
    skips_first: bool = False  # position 0 has no embedding

    def build(self, folder: Path) -> Path:
        """Write a checkpoint with the layer to `folder / "model"`, and those of model and layer beside it."""
        for seed, name in enumerate(("target", "donor")):
            self.case.build(folder / name, seed=seed)
        tensors, donor = (load_file(folder / name / "model.safetensors") for name in ("target", "donor"))
        layers = json.loads((folder / "target/config.json").read_text())["num_hidden_layers"]
        noise, under = torch.Generator().manual_seed(7), self.under.format(layers=layers)
        prefix = f"model.layers.{layers - 1}."
        for name, tensor in donor.items():
            if name.startswith(prefix):
                tensors[f"{under}{self.layer}{name.removeprefix(prefix)}"] = tensor
        for what, name in self.names.items():
            drawn = torch.randn((HIDDEN, 2 * HIDDEN) if what == "projection" else (HIDDEN,), generator=noise)
            norm = 0.2 * drawn if self.adds_one else 1 + 0.2 * drawn
            tensors[f"{under}{name}.weight"] = drawn * HIDDEN**-0.5 if what == "projection" else norm
        model = folder / "model"
        model.mkdir()
        save_file(tensors, model / "model.safetensors")
        config = json.loads((folder / "target/config.json").read_text()) | self.config
        (model / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (model / name).write_bytes((folder / "target" / name).read_bytes())
        return model


CASES = {case.name: case for module in (experts, hybrids, latents) for case in module.CASES}
QWEN: dict[str, Any] = {
    "under": "mtp.",
    "layer": "layers.0.",
    "names": {"embedding": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "projection": "fc", "norm": "norm"},
    "adds_one": True,
}
DEEPSEEK: dict[str, Any] = {
    "under": "model.layers.{layers}.",
    "names": {"embedding": "enorm", "hidden": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"},
    "config": {"num_nextn_predict_layers": 1},
    "skips_first": True,
}
MIMO: dict[str, Any] = {
    "under": "model.mtp_layers.0.",
    "names": {
        "embedding": "token_layernorm",
        "hidden": "hidden_layernorm",
        "projection": "input_proj",
        "norm": "final_layernorm",
    },
    "config": {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    "hidden_first": True,
    "skips_first": True,
}
FAMILIES = {
    "qwen3_next": Mtp(case=CASES["qwen3_next"], **QWEN),
    "qwen3_5": Mtp(case=CASES["qwen3_5"], **QWEN),
    "qwen3_5_moe": Mtp(case=CASES["qwen3_5_moe"], **QWEN),
    "deepseek_v3": Mtp(case=CASES["deepseek_v3"], **DEEPSEEK),
    "glm4_moe": Mtp(case=CASES["glm4_moe"], **DEEPSEEK),
    "glm4_moe_lite": Mtp(case=CASES["glm4_moe_lite"], **DEEPSEEK),
    "mimo": Mtp(case=Case(name="mimo", config="Qwen2Config"), **MIMO),
}


class Reference:
    """The computation of one such checkpoint in `folder`."""

    def __init__(self, mtp: Mtp, folder: Path) -> None:
        network = getattr(transformers, mtp.case.architecture())
        self._target, self._donor = (
            network.from_pretrained(folder / name, dtype=torch.float32, attn_implementation="eager").eval()
            for name in ("target", "donor")
        )
        self._mtp, self._eps = mtp, self._target.config.rms_norm_eps
        under = mtp.under.format(layers=self._target.config.num_hidden_layers)
        tensors = load_file(folder / "model/model.safetensors")
        self._weights = {what: tensors[f"{under}{name}.weight"] for what, name in mtp.names.items()}

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> tuple[int, ...]:
        """The drafts behind the tokens, of which the last one was just sampled."""
        hidden = self._target.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0]
        tokens, drafted = token_ids[1:], list[int]()
        for _ in range(count):
            embedded = self._target.get_input_embeddings()(torch.tensor(tokens))
            if self._mtp.skips_first:
                embedded[0] = 0
            parts = [self._normed(embedded, "embedding"), self._normed(hidden, "hidden")]
            if self._mtp.hidden_first:
                parts.reverse()
            normed = self._normed(self._layer(linear(torch.cat(parts, -1), self._weights["projection"]))[-1:], "norm")
            drafted.append(int(self._target.lm_head(normed).argmax()))
            tokens.append(drafted[-1])
            hidden = torch.cat((hidden, normed))
        return tuple(drafted)

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(x))[None]
        unseen = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
        model = self._donor.model
        # Three alike, in models of images.
        of_rope = positions.expand(3, 1, -1) if model.config.model_type.startswith("qwen3_5") else positions
        out = model.layers[-1](
            x[None],
            attention_mask=unseen,
            position_ids=positions,
            position_embeddings=model.rotary_emb(x[None], of_rope),
        )
        return (out[0] if isinstance(out, tuple) else out)[0]

    def _normed(self, x: torch.Tensor, what: str) -> torch.Tensor:
        return rms_norm(x, (HIDDEN,), self._weights[what] + self._mtp.adds_one, self._eps)
