"""Train an EAGLE-3 draft head for a Llama on its own answers: `python -m demo.draft.train --model FILE.gguf --out DIR`.

The time given is for all of it: answers, training, and what it measures. Weights are bf16 safetensors in SpecForge's layout, the
embedding is the target's, and the head knows the most frequent tokens alone. `draft.json` says how much a greedy target accepts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.real_texts import real_texts
from demo.draft.acceptance import acceptance
from demo.draft.answers import PROMPT, Sampled, Speaker
from demo.draft.eagle import Draft, Lesson, drafted, loss_of
from demo.draft.target import Target

MOST_DRAFTED = 5
DATA_SHARE, MEASURING_SHARE = 0.4, 0.1  # of the time
WARM_UP, LAST_RATE = 0.03, 0.02


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    length: int = 512  # tokens of a text
    speaking: int = 2048  # texts written at once
    batch: int = 32  # texts of a training step
    vocabulary: int = 5120
    intermediate: int = 768
    unrolled: int = 4
    rate: float = 1.5e-3
    held_out: int = 256
    windows: int = 16  # of each real text
    steps: int = 1 << 30  # at most
    rounds: int = 1 << 30  # of answers, at most


QUICK = Plan(40, 8, 4, 256, 64, held_out=4, windows=1, steps=20, rounds=1)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a folder of a Llama")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few texts and steps, to see that it works")
    options = parser.parse_args(arguments)
    if not options.model.exists():
        parser.error(f"--model: there is no {options.model}: give a GGUF file or a folder of a Llama")
    if options.quick:
        torch.set_num_threads(1)
    run = Run(options.model, torch.device(options.device), 60 * options.minutes, options.seed)
    plan = QUICK if options.quick else Plan()
    draft = run.trained(plan)
    draft.save(options.out, options.model.stem)
    figures = run.figures(plan, draft)
    (options.out / "draft.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


class Run:
    """A training run within a time."""

    def __init__(self, model: Path, device: torch.device, seconds: float, seed: int) -> None:
        self._begin, self._seconds = time.monotonic(), seconds
        self.losses, self._said = list[float](), 0
        torch.manual_seed(seed)
        self.device, self._dtype = device, torch.bfloat16 if device.type == "cuda" else torch.float32
        self.target = Target(model, device, self._dtype)
        self.speaker = Speaker(model, self.target, seed)
        self._say(f"{model.name} on {device}, torch {torch.__version__}, seed {seed}")

    def trained(self, plan: Plan) -> Draft:
        """The draft head, in all but the time for measuring."""
        texts = self._spoken(plan)
        kept = most_frequent(texts, plan.vocabulary, self.target.shape.vocabulary)
        known = torch.zeros(self.target.shape.vocabulary, dtype=torch.bool, device=self.device)
        known[kept] = True
        self._say(f"{len(kept)} tokens are {100 * known[texts.flatten()].float().mean():.2f} % of the texts")
        return self._learned(plan, texts, kept, known)

    def figures(self, plan: Plan, draft: Draft) -> list[dict[str, Any]]:
        """The cost of training and the acceptance by a greedy target, in the form of the benchmarks' results."""
        recent = self.losses[-50:]
        figures = [_figure("training loss", sum(recent) / len(recent), "nats", "lower")]
        figures += [_figure("training tokens", len(self.losses) * plan.batch * plan.length, "tokens", "higher")]
        figures += [_figure("tokens of its texts", self._said, "tokens", "higher")]
        held_out = self.speaker.conversations(plan.held_out, plan.length)
        for name, sampled in {"own answers": held_out, **self._continued(plan)}.items():
            figures += self._measured(draft, name, sampled)
        for figure in figures:
            print(f"{figure['name']}: {figure['value']:.5g} {figure['unit']}", flush=True)
        self._say("done")
        return figures

    def _continued(self, plan: Plan) -> dict[str, Sampled]:
        """Windows of each real text with greedy continuations as long."""
        size = min(2 * PROMPT, plan.length // 2)
        prompts, owners = list[list[int]](), list[str]()
        for name, text in real_texts().items():
            ids = self.speaker.encode(text)
            begins = range(0, max(1, len(ids) - size), max(size, len(ids) // plan.windows))[: plan.windows]
            prompts += [ids[begin : begin + size] for begin in begins]
            owners += [name] * len(begins)
        found = self.speaker.continued(prompts, 2 * size)
        self._say(f"{len(prompts)} windows of real texts continued")
        rows = {name: [row for row, owner in enumerate(owners) if owner == name] for name in owners}
        return {name: Sampled(found.ids[some], found.own[some]) for name, some in rows.items()}

    def _spoken(self, plan: Plan) -> torch.Tensor:
        """Texts of the model, for as long as a round of them ends in their share of the time."""
        rounds, longest = list[torch.Tensor](), 0.0
        while not rounds or (len(rounds) < plan.rounds and self._passed() + longest < DATA_SHARE * self._seconds):
            begin = self._passed()
            sampled = self.speaker.texts(plan.speaking, plan.length)
            rounds.append(sampled.ids)
            if len(rounds) == 1:
                for row in sampled.ids[:4]:
                    print(repr(self.speaker.text(row.tolist()))[:600], flush=True)
            self._said += sampled.own.numel()
            sampled.own.any().item()  # ends when the device does
            longest = max(longest, self._passed() - begin)
            rate = sampled.ids.numel() / (self._passed() - begin)
            self._say(f"{self._said:,} tokens of texts, {rate:,.0f} a second")
        return torch.cat(rounds)

    def _learned(self, plan: Plan, texts: torch.Tensor, kept: torch.Tensor, known: torch.Tensor) -> Draft:
        draft = Draft(self.target, kept, self.target.whole(texts[: plan.batch])[0], plan.intermediate)
        optimizer = torch.optim.AdamW(draft.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.01)
        begin, end, said = self._passed(), (1 - MEASURING_SHARE) * self._seconds, 0.0
        self._say(f"{sum(p.numel() for p in draft.parameters()):,} parameters")
        order = torch.empty(0, dtype=torch.long)
        for step in range(plan.steps):
            done = max((self._passed() - begin) / max(end - begin, 1.0), step / plan.steps)
            if done >= 1 and step:
                break
            if len(order) < plan.batch:
                order = torch.randperm(len(texts))
            chosen, order = order[: plan.batch], order[plan.batch :]
            lesson = Lesson(self.target, texts[chosen.to(texts.device)], kept)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype is torch.bfloat16):
                loss = loss_of(draft, lesson, known, plan.unrolled)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 0.5)
            for group in optimizer.param_groups:
                group["lr"] = plan.rate * learning_rate(done)
            optimizer.step()
            self.losses.append(loss.item())
            if self._passed() > said + 5 or step + 1 == plan.steps:
                said = self._passed()
                recent = self.losses[-50:]
                self._say(f"step {step} loss {sum(recent) / len(recent):.4f}")
        return draft

    def _measured(self, draft: Draft, name: str, sampled: Sampled) -> list[dict[str, Any]]:
        chains, greedy = list[torch.Tensor](), list[torch.Tensor]()
        for ids, own in zip(sampled.ids.split(16), sampled.own.split(16), strict=True):
            lesson = Lesson(self.target, ids, draft.kept)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype is torch.bfloat16):
                chains.append(drafted(draft, lesson, MOST_DRAFTED))
            same = torch.cat((torch.zeros_like(own[:, :1]), lesson.greedy[:, :-1] == ids[:, 1:]), 1)
            greedy.append(own & same)
        figures = list[dict[str, Any]]()
        for length in range(1, MOST_DRAFTED + 1):
            found = acceptance(torch.cat(chains), sampled.ids, torch.cat(greedy), length)
            figures.append(_figure(f"{name}, {length} drafted, accepted length", found.mean_length, "tokens", "higher"))
        figures.append(_figure(f"{name}, steps counted", found.steps, "steps", "higher"))
        return figures + [
            _figure(f"{name}, {length} drafted, position {position} accepted", 100 * share, "%", "higher")
            for position, share in enumerate(found.by_position, 1)
        ]

    def _passed(self) -> float:
        return time.monotonic() - self._begin

    def _say(self, words: str) -> None:
        print(f"{self._passed():6.1f} s  {words}", flush=True)


def most_frequent(texts: torch.Tensor, count: int, vocabulary: int) -> torch.Tensor:
    """The ids of the most frequent tokens, ascending."""
    counts = torch.bincount(texts.flatten(), minlength=vocabulary)
    return counts.topk(min(count, vocabulary)).indices.sort().values


def learning_rate(done: float) -> float:
    """The rate's share of its highest at so much of the training: warm-up, then a cosine."""
    if done < WARM_UP:
        return max(done / WARM_UP, 0.01)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2


def _figure(name: str, value: float, unit: str, better: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "better": better}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
