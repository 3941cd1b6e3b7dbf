"""Texts that a model writes: questions of its own (Magpie) with its answers, and continuations of text."""

from __future__ import annotations

import inspect
import json
import math
import pkgutil
import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.quality.real_texts import PAGES
from demo.draft.target import Target, rotations
from modelfiles.files import read_file

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER = "<|im_start|>user\n"
OPENINGS = ("", "", "What", "How", "Write", "Explain", "Can you", "Why", "List", "Give me", "I", "Tell me", "Is", "Who")
QUESTION_TEMPERATURE, TEMPERATURE, MIN_P = 0.9, 0.8, 0.05
LONG_LINE = 40
PROMPT = 64  # most tokens of a text that is continued


@dataclass(frozen=True)
class Sampled:
    """Texts of one length: ids [B, T], and `own` [B, T], True where the model chose the token of an answer or continuation."""

    ids: torch.Tensor
    own: torch.Tensor


class Speaker:
    """A model that writes texts in large batches."""

    def __init__(self, model: Path, target: Target, seed: int) -> None:
        self.target, self._chance = target, random.Random(seed)
        self._tokenizer = Tokenizer.from_str((read_file(model, "tokenizer.json") or b"").decode())
        self._noise = torch.Generator(target.device).manual_seed(seed)
        self._end = self._tokenizer.token_to_id("<|im_end|>")
        self._texts = [ids for ids in map(self.encode, training_texts()) if len(ids) > 2 * PROMPT]
        turns = [self.encode("\n<|im_start|>assistant\n"), self.encode("\n" + USER)]
        width = max(map(len, turns))
        # Template tokens after a question and after an answer; right-aligned, as `speak` counts them down.
        self._turns = torch.tensor([[0] * (width - len(ids)) + ids for ids in turns], device=target.device)
        self._turn_lengths = torch.tensor([len(ids) for ids in turns], device=target.device)

    def encode(self, text: str) -> list[int]:
        """The text's token ids, as they are."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def text(self, ids: Sequence[int]) -> str:
        """The tokens' text, with its control tokens."""
        found: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return found

    def texts(self, rows: int, length: int) -> Sampled:
        """Conversations (three in four) and continuations; in half of them the answers are greedy."""
        prompts, chats = list[list[int]](), list[bool]()
        for _ in range(rows):
            chats.append(self._chance.random() < 0.75)
            prompts.append(self._question() if chats[-1] else self._piece())
        temperatures = [TEMPERATURE * (self._chance.random() < 0.5) for _ in range(rows)]
        return self.speak(prompts, chats, temperatures, length)

    def conversations(self, rows: int, length: int) -> Sampled:
        """Conversations with greedy answers."""
        return self.speak([self._question() for _ in range(rows)], [True] * rows, [0.0] * rows, length)

    def continued(self, texts: Sequence[Sequence[int]], length: int) -> Sampled:
        """The texts with greedy continuations."""
        return self.speak(texts, [False] * len(texts), [0.0] * len(texts), length)

    @torch.inference_mode()
    def speak(
        self, prompts: Sequence[Sequence[int]], chats: Sequence[bool], temperatures: Sequence[float], length: int
    ) -> Sampled:
        """One text of `length` tokens behind each prompt; in a chat, turns follow each other by the template."""
        device, rows = self.target.device, len(prompts)
        width = max(map(len, prompts))
        padded = torch.tensor([[*ids, *[-1] * (width - len(ids))] for ids in prompts]).to(device)
        chat, answering = torch.tensor(chats, device=device), ~torch.tensor(chats, device=device)
        temperature = torch.tensor(temperatures, device=device)
        forced = torch.zeros(rows, dtype=torch.long, device=device)  # tokens of the template still to come
        cache, rotation = self.target.cache(rows, length), rotations(self.target.shape, length, device)
        ids = torch.zeros(rows, length, dtype=torch.long, device=device)
        own = torch.zeros(rows, length, dtype=torch.bool, device=device)
        ids[:, 0] = padded[:, 0]
        turn = self._turns.shape[1]
        for at in range(1, length):
            logits = self.target.step(ids[:, at - 1], at - 1, cache, rotation)
            heat = torch.where(answering, temperature, QUESTION_TEMPERATURE)
            chosen = self._chosen(logits, heat)
            template = self._turns[(~answering).long(), (turn - forced).clamp(0, turn - 1)]
            chosen = torch.where(forced > 0, template, chosen)
            given = padded[:, at] >= 0 if at < width else torch.zeros_like(chat)
            free = (forced == 0) & ~given
            own[:, at] = free & answering
            ids[:, at] = torch.where(given, padded[:, at], chosen) if at < width else chosen
            ended = free & chat & (chosen == self._end)
            answering = answering ^ ended
            forced = torch.where(ended, self._turn_lengths[(~answering).long()], (forced - 1).clamp(min=0))
        return Sampled(ids, own)

    def _chosen(self, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Sampled with min-p by Gumbel noise, greedy where the temperature is 0."""
        logits = logits.float()
        best, greedy = logits.max(-1, keepdim=True)
        heat = temperature[:, None].clamp(min=1e-6)
        floor = best + math.log(MIN_P) * heat
        noise = torch.empty_like(logits).exponential_(generator=self._noise).log_().neg_()
        noisy = (logits / heat + noise).masked_fill_(logits < floor, float("-inf"))
        return torch.where(temperature > 0, noisy.argmax(-1), greedy[:, 0])

    def _question(self) -> list[int]:
        return self.encode(SYSTEM + USER + self._chance.choice(OPENINGS))

    def _piece(self) -> list[int]:
        ids = self._chance.choice(self._texts)
        begin = self._chance.randrange(len(ids) - PROMPT)
        return ids[begin : begin + self._chance.randint(PROMPT // 4, PROMPT)]


def training_texts() -> list[str]:
    """Pages of Python's manual and its library's documentation strings, but none that shares a line with a page held out."""
    topics = pydoc_data.topics.topics
    documented = (json, inspect, pkgutil, random)
    strings = [text for module in documented for text in map(inspect.getdoc, vars(module).values()) if text]
    held_out = _long_lines(*(topics[name] for name in PAGES))
    return [text for text in (*topics.values(), *strings) if held_out.isdisjoint(_long_lines(text))]


def _long_lines(*texts: str) -> set[str]:
    """Lines that stand in two texts only if one quotes the other: the manual's pages hold parts of each other."""
    return {line.strip() for text in texts for line in text.splitlines() if len(line.strip()) > LONG_LINE}
