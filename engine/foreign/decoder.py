# mypy: allow-untyped-calls
"""A model of `transformers` in place of our decoder: a pass is one row with the tokens of many sequences."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.batch.batch import ForwardBatch
from engine.foreign.trial import NAME, Call, read_config, register, spec_of, tried
from engine.foreign.watching import waiting_in
from engine.kernels.attention import HeadShape, Scores, needs_qkv, paged_attention
from engine.kernels.codes import opened
from engine.kernels.launch import is_compiling_ahead
from engine.kernels.rope import Heads, rope_and_write_kv
from engine.model.places import kept_at
from engine.spec.attention import AttentionSpec
from engine.spec.model import ModelSpec
from engine.weights.parameters import Weights

log = logging.getLogger("baton.engine")


class ForeignDecoder:
    """The decoder. It knows the model's shape once built; `load` reads the weights. Raises UnsupportedModelError."""

    aux = None  # no drafter reads it

    def __init__(self, folder: Path) -> None:
        register()
        self._folder, self._config = folder, read_config(folder)
        found = tried(self._config)
        self._calls, self._obstacle = found.calls, found.obstacle
        self.spec: ModelSpec = spec_of(self._config, self._calls)
        self._pass: tuple[ForwardBatch, Sequence[torch.Tensor]] | None = None

    def load(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> ForeignDecoder:
        """Read the weights; safetensors only. `spec`: its own, or with a quantised KV cache."""
        from transformers import AutoModelForCausalLM

        log.warning("engine.slow_model", extra={"by": "transformers", "architectures": self._config.architectures})
        self.spec, self.weights = spec, Weights(dtype, device)
        factors = torch.ones(2, device=device)
        network = AutoModelForCausalLM.from_pretrained(
            self._folder,
            config=self._config,
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,  # whatever else the folder names
        )
        self._network: Any = network.eval().to(device)
        self._takes_rows = "logits_to_keep" in inspect.signature(network.forward).parameters
        for layer, places, call in zip(spec.layers, spec.places, self._calls, strict=True):
            site = _Site(
                self, call, places, factors if isinstance(layer.mixer, AttentionSpec) and layer.mixer.codes else None
            )
            self._network.get_submodule(call.module).baton = site
        return self

    def forward(
        self, batch: ForwardBatch, parts: Sequence[torch.Tensor], *, logits: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """As `Decoder.forward`."""
        ids = batch.tokens.ids()
        if is_compiling_ahead():  # nothing has sampled, but torch reads the embedding's rows nonetheless
            ids = torch.zeros_like(ids)
        rows = torch.arange(len(ids), device=ids.device) if batch.sampled_rows is None else batch.sampled_rows.long()
        asked = {"logits_to_keep": rows} if self._takes_rows else {}
        self._pass = batch, parts
        try:
            answer = self._network(
                input_ids=ids[None], position_ids=batch.positions.long()[None], use_cache=False, **asked
            )
        finally:
            self._pass = None
        if not batch.num_sampled:
            return None
        found: torch.Tensor = answer.logits[0] if self._takes_rows else answer.logits[0].index_select(0, rows)
        return found.to(self.weights.dtype) if logits is None else logits.copy_(found)

    def obstacle(self, rehearse: Callable[[], None]) -> str:
        """Return why no pass can be captured, "" if all can. `rehearse` launches each kind, the second time at least."""
        return self._obstacle or waiting_in(rehearse)

    def with_a_layer_of_each_kind(self) -> ForeignDecoder:
        return self

    @property
    def now(self) -> tuple[ForwardBatch, Sequence[torch.Tensor]]:
        """The current pass, and the pool's parts."""
        assert self._pass is not None, "attention outside of a pass"
        return self._pass


class _Site:
    """The attention of one layer."""

    def __init__(
        self, decoder: ForeignDecoder, call: Call, places: tuple[tuple[int, int], ...], factors: torch.Tensor | None
    ) -> None:
        """`factors`: of the quantised KV cache; None: it is not quantised."""
        self._decoder, self._call, self._places, self._factors = decoder, call, places, factors
        self._shape = HeadShape(call.num_heads, call.num_kv_heads, call.head_dim)

    def __call__(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: object = None,
        **named: Any,
    ) -> torch.Tensor:
        """`q` [1, Hq, T, D], `k` and `v` [1, Hkv, T, D] -> [1, T, Hq, D]."""
        batch, parts = self._decoder.now
        dtype = self._decoder.weights.dtype
        column, kept = kept_at(parts, self._places)
        batch = batch.at(column)
        kv, codes = opened([view for view in kept if isinstance(view, torch.Tensor)], self._factors, dtype)
        plan, call = batch.attention[self._shape], self._call
        qkv = torch.cat((q, k, v), dim=1)[0].transpose(0, 1).flatten(1).to(dtype).contiguous()
        stays = needs_qkv(plan, kv, codes)
        rotated = rope_and_write_kv(
            qkv, batch.positions, None, batch.slots, kv, Heads(), codes=codes, in_place=codes is not None and stays
        )
        sinks = named["s_aux"].float() if call.sinks else None
        how = Scores(scale=call.scale, window=call.window, softcap=call.softcap, sinks=sinks)
        attended = paged_attention(rotated, kv, plan, how, qkv=qkv if stays else None, codes=codes)
        return attended[None].to(q.dtype)
