"""A config.json's fields, and which were read: unread ones that are not known to be harmless are refused.

A checkpoint says in these fields what must be computed. One that is unknown may change the arithmetic, so it is never skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from engine.spec.model import UnsupportedModelError

# Fields about training, generation defaults, or transformers' implementation; or repeats of others.
_HARMLESS = """
add_cross_attention architectures attention_dropout attn_implementation auto_map aux_loss_alpha bad_words_ids
begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout cross_attention_hidden_size
decoder_start_token_id dtype embd_pdrop embedding_dropout eod_token_id eos_token_id exponential_decay_length_penalty
finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout id2label init_method
initializer_factor initializer_range is_decoder is_encoder_decoder is_llama_config label2id length_penalty max_length
max_sequence_length min_length model_max_length model_type num_beam_groups num_beams num_return_sequences output_attentions
output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type repetition_penalty
resid_pdrop residual_dropout return_dict return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id
suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
transformers_version typical_p use_bfloat16 use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
_HARMLESS_BEGINNINGS = ("_", "unsloth_", "transformers.js")

# Releases of transformers gave the number of experts different names.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# A limit: the author of a config.json must not decide how much memory a worker takes before it sees a weight.
_MOST_OF_ALL = 2**31 - 1
_FEW = (*NUM_EXPERTS, "zero_expert_num", "num_nextn_predict_layers")
_MOST = {"num_hidden_layers": 4096, "num_layers": 2048, "index_topk": 1 << 16} | dict.fromkeys(_FEW, 4096)


class Fields(Mapping[str, Any]):
    """Parsed JSON that records which fields were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()
        self._ignored: set[str] = set()  # irrelevant in copies, too
        self._inner: list[Fields] = []
        self._newest = [""]  # the last field read, shared with copies

    def __getitem__(self, name: str) -> Any:
        """A field's value. Raises UnsupportedModelError for infinity and NaN, which JSON lacks."""
        value = self._values[name]
        self._read.add(name)
        self._newest[0] = name
        inner = value.values() if isinstance(value, Mapping) else (value,)
        if any(isinstance(each, float) and not math.isfinite(each) for each in inner):
            raise UnsupportedModelError(f"config.json: {name} = {value!r:.40} is not finite")
        return value

    @property
    def newest(self) -> str:
        """The field that was read last."""
        return self._newest[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def number(self, name: str) -> int:
        """A positive integer. Raises UnsupportedModelError, as the three below."""
        value, most = self.get(name), _MOST.get(name, _MOST_OF_ALL)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise UnsupportedModelError(
                f"config.json: {name} must be a positive integer up to {most}, not {value!r:.40}"
            )
        return value

    def count(self, name: str) -> int:
        """Like `number`, but 0 if it is absent, null or 0."""
        value = self.get(name)
        return 0 if value is None or (value == 0 and type(value) is int) else self.number(name)

    def real(self, name: str, default: float) -> float:
        """A number, or the default if it is absent or null."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnsupportedModelError(f"config.json: {name} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false where it is absent or null."""
        value = self.get(name)
        if value not in (None, False, True):  # also 0 and 1
            raise UnsupportedModelError(f"config.json: {name} must be true or false, not {value!r:.40}")
        return bool(value)

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """The same with defaults for absent fields: a config.json omits its class's defaults."""
        return self._with(Fields({**defaults, **self._values}), defaults)

    def text(self) -> Fields:
        """The text model's fields of a multimodal checkpoint, or these."""
        inner = self._values.get("text_config")
        if not isinstance(inner, Mapping):
            return self
        shared = {name: self._values[name] for name in _SHARED_WITH_TEXT if name in self._values}
        self.ignore("text_config", *shared)
        return self._with(Fields({**inner, **shared}))

    def with_values(self, **values: Any) -> Fields:
        """The same with some values replaced."""
        return self._with(Fields({**self._values, **values}), {})

    def ignore(self, *names: str) -> None:
        """Mark fields as irrelevant, also in copies."""
        self._read.update(names)
        self._ignored.update(names)

    def only(self, name: str, *values: object) -> None:
        """Refuse any value of a field except these and None. Raises UnsupportedModelError."""
        value = self.get(name)
        if value is not None and value not in values:
            raise UnsupportedModelError(
                f"config.json: {name} = {value!r} is not supported; supported: {', '.join(map(repr, values or [None]))}"
            )

    def check_all_known(self, remedy: str = ", or load the model with --model-impl transformers") -> None:
        """Raise UnsupportedModelError for fields that are unread, unknown, and not off."""
        unknown = [name for name, value in self._values.items() if value and not self._is_known(name)]
        if unknown:
            several = ", ".join(f"{name} = {str(self._values[name])[:40]}" for name in sorted(unknown)[:4])
            raise UnsupportedModelError(
                f"config.json: {several} is not supported by this family; remove the field if it changes nothing{remedy}"
            )
        for inner in self._inner:
            inner.check_all_known(remedy)

    def unread(self) -> list[str]:
        """The unread fields that are not off."""
        return sorted(name for name, value in self._values.items() if value and name not in self._read)

    def _is_known(self, name: str) -> bool:
        return name in self._read or name in HARMLESS or name.startswith(_HARMLESS_BEGINNINGS)

    def _with(self, inner: Fields, defaults: Mapping[str, Any] | None = None) -> Fields:
        self._inner.append(inner)
        inner._newest = self._newest
        if defaults is not None:
            self._read.update(self._values)  # the copy checks them
            inner.ignore(*self._ignored)
            inner._read.update(name for name in defaults if name not in self._values)
        return inner


_SHARED_WITH_TEXT = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "eos_token_id")
