# mypy: allow-untyped-calls
"""One checkpoint that our engine and `transformers` both read: a config class of theirs with small sizes, random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from tests.models import EOS_TOKEN_ID, VOCAB_SIZE, build_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family's checkpoint. Each of its switches is on in some case."""

    name: str
    config: str  # transformers' config class: "LlamaConfig"
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its config.json, over `SHAPE`
    text_in: str = ""  # the config class that has this one as `text_config`: "Gemma3Config"
    outer: Mapping[str, Any] = field(default_factory=dict)  # that one's other fields
    max_model_len: int | None = None
    shortest: int = 1  # tokens of a prompt: what transformers computes of shorter ones can't be cached
    can_be_cached: bool = True  # False: transformers computes a decoded token otherwise than in a prompt
    model_impl: str = "auto"
    is_long: bool = False  # too slow for each run

    def build(self, folder: Path, *, seed: int = 0) -> Path:
        """Write config.json, weights as people publish them, and a tokenizer into `folder`; return `folder`."""
        self.built(folder, seed=seed)
        return folder

    def built(self, folder: Path, *, seed: int = 0) -> torch.nn.Module:
        """Write the same; return what transformers would load of it."""
        config = self.config_object()
        with without_towers():
            model = getattr(transformers, self.architecture())._from_config(config, dtype=torch.float32)
        _randomise(model, seed)
        model.generation_config = transformers.GenerationConfig(eos_token_id=EOS_TOKEN_ID, pad_token_id=0)
        model.save_pretrained(folder)
        build_tokenizer(folder)
        model.set_attn_implementation("eager")
        return model.eval()

    def architecture(self) -> str:
        """What config.json calls the model."""
        names = transformers.models.auto.modeling_auto
        lists = [names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, names.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES]
        whole = self.text_in or self.config
        kind = getattr(transformers, whole).model_type
        named = next((kinds[kind] for kinds in lists[bool(self.text_in) :] if kind in kinds), None)
        return str(named or whole.replace("Config", "ForConditionalGeneration"))  # it is in no list

    def config_object(self) -> transformers.PreTrainedConfig:
        """Transformers' own object."""
        config = getattr(transformers, self.config)(**(SHAPE | dict(self.fields)))
        if self.text_in:
            config = getattr(transformers, self.text_in)(text_config=config.to_dict(), **self.outer)
        config.dtype = torch.float32
        return config


@contextmanager
def without_towers() -> Iterator[None]:
    """Within, what needs packages that only images need is left out of a model: Gemma 3n's tower."""
    from_config = transformers.AutoModel.from_config

    def known(config: Any, **options: Any) -> Any:
        return torch.nn.Identity() if config.model_type == "gemma3n_vision" else from_config(config, **options)

    with mock.patch.object(transformers.AutoModel, "from_config", known):
        yield


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw weights so that greedy decoding wanders, and no two tensors of a shape are alike.

    Norms stay around the values that they begin with: 1, or 0 where 1 is added.
    """
    generator = torch.Generator().manual_seed(seed)
    learned = {name for name, _ in model.named_parameters()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        if name not in learned:
            if name in model.state_dict() and tensor.is_floating_point():
                tensor.add_(0.1 * noise)
        elif "embed_tokens" in name:
            tensor.copy_(0.2 * noise)  # small beside what the layers add: tied models would echo their input
        elif tensor.dim() > 1:
            tensor.copy_(noise * 1.5 / tensor.shape[-1] ** 0.5)
        elif "norm" in name:
            tensor.add_(0.2 * noise)
        else:
            tensor.copy_(0.5 * noise)
