"""What clients ask for under chaos, and what the answers must be: the fake device's tokens are a pure function of the request.

The text is what the gateway's own detokenizer and stop matcher make of the whole list of tokens, without processes, frames,
retries or time between them. The fake device takes no notice of penalties: `tests.chaos.real_model` has those.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.messages import Grammar, SamplingParams
from engine.config import CacheConfig, EngineConfig
from engine.fake.engine import FakeEngine
from gateway.answers.detokenizer import Detokenizer, StopMatcher
from gateway.answers.start import choice_seed
from gateway.answers.tokenizer import ChatTokenizer
from gateway.dialects.openai.formats import wanted_of
from gateway.grammars.forms import text_of

SPECIAL = 3  # token ids below this end or open messages
VOCABULARY = 500
SHARED_PREFIXES = 6
KINDS = (
    "greedy, streamed", "greedy, whole", "sampled, streamed", "sampled, n = 3", "stop string, streamed",
    "stop string, n = 2", "penalties, streamed", "client leaves a stream", "end of text allowed", "long prompt, streamed",
    "client leaves a whole answer", "grammar, streamed", "grammar, n = 2",
)  # fmt: skip


LEGS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer"},
        "is": {"enum": ["red", "blue"]},
    },
    "required": ["name", "legs", "is"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": LEGS, "strict": True}}},
    {"structured_outputs": {"regex": "([a-z]{3,9} ){4,40}[.]"}},
    {"guided_grammar": 'root ::= line{2,30}\nline ::= [a-z]+ "=" [0-9]+ ";"', "min_tokens": 8},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a client. `leaves_after`: it hangs up after so many tokens (0: once the request is sent)."""

    number: int
    kind: str
    body: dict[str, Any]
    deadline_s: float
    leaves_after: int | None = None

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a client has of one choice; also what it should have."""

    tokens: list[int]
    text: str
    finish: str = ""


class Oracle:
    """Answers of the fake device, computed without Baton."""

    def __init__(self, model: Path) -> None:
        self._engine = FakeEngine(EngineConfig(model=model, cache=CacheConfig(num_blocks=1)))
        self._tokenizer = ChatTokenizer(model)

    def answer(self, body: dict[str, Any]) -> dict[int, Seen]:
        """Choice by index for a completion's body."""
        return {index: self._choice(body, index) for index in range(body.get("n", 1))}

    def text(self, tokens: list[int]) -> str:
        """The text of generated tokens."""
        detokenizer = Detokenizer(self._tokenizer)
        return detokenizer.push(tokens) + detokenizer.flush()

    def _choice(self, body: dict[str, Any], index: int) -> Seen:
        stop_ids = [] if body.get("ignore_eos") else self._tokenizer.eos_ids
        sampling = SamplingParams(
            max_tokens=body["max_tokens"],
            min_tokens=body.get("min_tokens", 0),
            temperature=body["temperature"],
            seed=choice_seed(body.get("seed", 0), index),
            stop_token_ids=stop_ids,
        )
        tokens = self._engine.expected(body["prompt"], body["max_tokens"], sampling, grammar=_grammar(body))
        ended = bool(tokens) and tokens[-1] in stop_ids
        detokenizer, stops, text = Detokenizer(self._tokenizer), StopMatcher(body.get("stop", [])), ""
        for count, token in enumerate(tokens, start=1):
            if ended and count == len(tokens):
                break
            text += stops.push(detokenizer.push([token]))
            if stops.matched is not None:
                return Seen(tokens=tokens[:count], text=text, finish="stop")
        text += stops.push(detokenizer.flush()) + stops.flush()
        return Seen(tokens=tokens, text=text, finish="stop" if ended or stops.matched is not None else "length")


def ask(
    number: int, oracle: Oracle, *, deadline_s: float, longest_answer: int = 70, kinds: Sequence[str] = KINDS
) -> Ask:
    """Request `number` of a load: the same number asks the same thing."""
    chance = random.Random(number)
    kind = kinds[number % len(kinds)]
    length = chance.randint(150, 400) if kind.startswith("long prompt") else chance.randint(4, 120)
    prompt = [chance.randint(SPECIAL, VOCABULARY) for _ in range(length)]
    if number % 3 == 0:
        family = random.Random(number % SHARED_PREFIXES)
        prompt = [family.randint(SPECIAL, VOCABULARY) for _ in range(64)] + prompt
    body: dict[str, Any] = {
        "model": "tiny", "prompt": prompt, "max_tokens": chance.randint(longest_answer // 2, longest_answer),
        "temperature": 0, "ignore_eos": True, "return_token_ids": True, "timeout": deadline_s,
        "stream": "streamed" in kind or "stream" in kind,
    }  # fmt: skip
    leaves_after = None
    if kind.startswith("sampled"):
        body |= {"temperature": 0.8, "top_p": 0.9, "seed": number}
    if "n = 3" in kind:
        body["n"] = 3
    if kind.startswith("stop string"):
        body |= {"n": 2, "temperature": 1.0, "seed": number} if "n = 2" in kind else {}
        body["stop"] = [_piece_of(oracle, body, chance)]
    if kind.startswith("penalties"):
        body |= {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    if kind.startswith("grammar"):
        body |= GRAMMARS[number % len(GRAMMARS)] | {"ignore_eos": False, "temperature": 0.9, "seed": number}
        body["n"] = 2 if "n = 2" in kind else 1
    if kind.startswith("end of text"):
        body |= {"ignore_eos": False, "min_tokens": 5}
    if kind.startswith("client leaves"):
        leaves_after = chance.randint(1, longest_answer // 3) if body["stream"] else 0
    return Ask(number=number, kind=kind, body=body, deadline_s=deadline_s, leaves_after=leaves_after)


def _grammar(body: dict[str, Any]) -> Grammar | None:
    wanted = wanted_of(body)
    return None if wanted is None else Grammar(text=text_of(wanted.form, ()))


def _piece_of(oracle: Oracle, body: dict[str, Any], chance: random.Random) -> str:
    """A few characters from the middle of the answer that would come without a stop string."""
    text = oracle.answer(body)[0].text
    begin = len(text) * chance.randint(30, 70) // 100
    return text[begin : begin + 4]
