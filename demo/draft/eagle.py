"""An EAGLE-3 draft head: one decoder layer on the target's hidden states, its loss over unrolled steps, its files.

Row i reads the embedding of token i + 1 and the target's hidden states of position i, and predicts token i + 2. Step s of the
training-time test feeds each row its own output of step s - 1 in place of the target's hidden states, with the next token: what
a server does when it drafts a chain (arXiv 2503.01840).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear, log_softmax, rms_norm, silu

from demo.draft.target import Rotation, Target, by_head, rotated, rotations

STEP_WEIGHT = 0.8  # a step's loss counts so much of the one before it
_PER_CHUNK = 4096  # positions whose logits over the whole vocabulary exist at once


class Draft(nn.Module):
    """The draft head's parameters and one of its steps."""

    def __init__(self, target: Target, kept: torch.Tensor, aux: torch.Tensor, intermediate: int) -> None:
        """`kept`: the target's ids of the draft vocabulary, ascending. `aux`: hidden states, which scale the input."""
        super().__init__()
        shape = target.shape
        self.shape, self.intermediate = shape, intermediate
        self.kept = kept
        # Some dimensions of the residual stream are a hundred times others: the scale is folded into `fc` when it is saved.
        self.scale = aux.float().flatten(0, -2).square().mean(0).sqrt().clamp(min=1e-3).reciprocal()
        hidden, attention = shape.hidden, shape.heads * shape.head_dim
        inputs = 2 * hidden
        self.fc = self._matrix(hidden, 3 * hidden)
        self.q_proj = self._matrix(attention, inputs)
        self.k_proj = self._matrix(shape.kv_heads * shape.head_dim, inputs)
        self.v_proj = self._matrix(shape.kv_heads * shape.head_dim, inputs)
        self.o_proj = self._matrix(hidden, attention)
        self.gate_proj = self._matrix(intermediate, hidden)
        self.up_proj = self._matrix(intermediate, hidden)
        self.down_proj = self._matrix(hidden, intermediate)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.Parameter(torch.ones(hidden, device=kept.device)) for _ in range(3)
        )
        self.norm = nn.Parameter(target.norm.detach().float().clone())
        self.lm_head = nn.Parameter(target.head[kept].detach().float().clone())

    def unrolled(self, aux: torch.Tensor, embedded: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Each step's logits over the draft vocabulary [B, R, D], for the R = T - steps - 1 rows that have all tokens.

        `aux` [B, T, 3 * hidden] and `embedded` [B, T, hidden] are of positions 0 to T - 1.
        """
        shape, rows = self.shape, aux.shape[1] - steps - 1
        cos, sin = rotations(shape, rows + steps, aux.device)
        hidden = linear(aux[:, :rows] * self.scale.to(aux.dtype), self.fc)
        keys, values = list[torch.Tensor](), list[torch.Tensor]()
        for step in range(steps):
            rotation = cos[step : step + rows], sin[step : step + rows]
            hidden = self._step(embedded[:, step + 1 : step + 1 + rows], hidden, rotation, keys, values)
            yield linear(rms_norm(hidden, (shape.hidden,), self.norm.to(hidden.dtype), shape.eps), self.lm_head)

    def _step(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        rotation: Rotation,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """The decoder layer: a row sees the first step's rows up to itself, and its own of later steps."""
        shape, group = self.shape, self.shape.heads // self.shape.kv_heads
        x = torch.cat((self._normed(embedded, self.input_layernorm), self._normed(hidden, self.hidden_norm)), -1)
        q, k, v = (by_head(linear(x, w), shape.head_dim) for w in (self.q_proj, self.k_proj, self.v_proj))
        q = rotated(q, rotation) * shape.head_dim**-0.5
        keys.append(rotated(k, rotation).repeat_interleave(group, 1))
        values.append(v.repeat_interleave(group, 1))
        rows = q.shape[2]
        unseen = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        scores = [torch.matmul(q, keys[0].transpose(-1, -2)).masked_fill(unseen, float("-inf"))]
        scores += [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
        shares = torch.cat(scores, -1).float().softmax(-1).to(q.dtype)
        mixed = torch.matmul(shares[..., :rows], values[0])
        for later, value in enumerate(values[1:]):
            mixed = mixed + shares[..., rows + later, None] * value
        hidden = hidden + linear(mixed.transpose(1, 2).flatten(2), self.o_proj)
        x = self._normed(hidden, self.post_attention_layernorm)
        return hidden + linear(silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.shape.eps)

    def _matrix(self, outputs: int, inputs: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(outputs, inputs, device=self.kept.device) * inputs**-0.5)

    def save(self, folder: Path, target_name: str) -> None:
        """Write model.safetensors and config.json as SpecForge lays EAGLE-3 heads out."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        config = json.dumps(self.config(target_name), indent=2, sort_keys=True)
        (folder / "config.json").write_text(config + "\n", encoding="utf-8")

    def tensors(self) -> dict[str, torch.Tensor]:
        """The file's tensors by name; `embed_tokens` is the target's and not in it."""
        own = {name: value.detach() for name, value in self.named_parameters()}
        own["fc"] = own["fc"] * self.scale
        places = dict.fromkeys(("fc", "norm", "lm_head"), "")
        places |= {f"{name}_proj": "midlayer.self_attn." for name in "qkvo"}
        places |= {f"{name}_proj": "midlayer.mlp." for name in ("gate", "up", "down")}
        found = {
            f"{places.get(name, 'midlayer.')}{name}.weight": value.to("cpu", torch.bfloat16).contiguous()
            for name, value in own.items()
        }
        kept = self.kept.cpu()
        t2d = torch.zeros(self.shape.vocabulary, dtype=torch.bool)
        t2d[kept] = True
        return found | {"d2t": kept - torch.arange(len(kept)), "t2d": t2d}

    def config(self, target_name: str) -> dict[str, object]:
        """The fields of config.json."""
        shape = self.shape
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "target_hidden_size": shape.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": shape.eps,
            "rope_theta": shape.theta,
            "max_position_embeddings": shape.positions,
            "vocab_size": shape.vocabulary,
            "draft_vocab_size": len(self.kept),
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "norm_before_residual": False,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
                "use_aux_hidden_state": True,
            },
            "target_model": target_name,
        }


class Lesson:
    """The target's outputs for a batch: its hidden states, its greedy tokens, its logits over the draft vocabulary."""

    @torch.no_grad()
    def __init__(self, target: Target, ids: torch.Tensor, kept: torch.Tensor) -> None:
        self.ids, self.embedded = ids, target.embedding[ids]
        self.aux, last = target.whole(ids)
        flat = last.flatten(0, 1)
        greedy, chunks = list[torch.Tensor](), list[torch.Tensor]()
        for begin in range(0, len(flat), _PER_CHUNK):
            logits = linear(flat[begin : begin + _PER_CHUNK], target.head)
            greedy.append(logits.argmax(-1))
            chunks.append(logits[:, kept])
        self.greedy = torch.cat(greedy).view_as(ids)
        self.logits = torch.cat(chunks).unflatten(0, ids.shape)


def loss_of(draft: Draft, lesson: Lesson, known: torch.Tensor, steps: int) -> torch.Tensor:
    """The weighted cross-entropy of all steps with the target's distribution over the draft vocabulary.

    `known` [V]: True for ids of the draft vocabulary; positions where the target's choice is another id don't count.
    """
    total, weights = torch.zeros((), device=lesson.ids.device), 0.0
    for step, logits in enumerate(draft.unrolled(lesson.aux, lesson.embedded, steps)):
        there = slice(step + 1, step + 1 + logits.shape[1])
        counted = known[lesson.greedy[:, there]].float()
        wanted = lesson.logits[:, there].float().softmax(-1)
        entropy = -(wanted * log_softmax(logits.float(), -1)).sum(-1)
        total = total + STEP_WEIGHT**step * (entropy * counted).sum() / counted.sum().clamp(min=1)
        weights += STEP_WEIGHT**step
    return total / weights


@torch.no_grad()
def drafted(draft: Draft, lesson: Lesson, steps: int) -> torch.Tensor:
    """The draft's greedy chain behind each row [B, T - steps - 1, steps], as ids of the target's.

    A step is fed the text's tokens: its own, as long as they were right, which is all that acceptance asks about.
    """
    unrolled = draft.unrolled(lesson.aux, lesson.embedded, steps)
    return torch.stack([draft.kept[logits.argmax(-1)] for logits in unrolled], -1)
