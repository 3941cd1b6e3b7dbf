"""Grammars of live sequences: compiled in the background, and asked for masks by each pass."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from common.messages import GRAMMAR_LIMITS, Grammar, SamplingParams
from engine.arrays import Longs
from engine.grammars.following import Following
from engine.kernels.sampling import mask_words
from engine.sequence import Chunk, Sequence
from modelfiles.files import CONFIG, GENERATION_CONFIG, TOKENIZER, has_tokenizer, read_file, read_json

log = logging.getLogger("baton.grammars")

BUILDING_THREADS = 2  # a hard grammar takes a second; masks are needed meanwhile
MOST_FILLING_THREADS = 8
KEPT = 64  # compiled grammars kept for later requests


@dataclass(slots=True)
class Masks:
    """Masks of a pass's rows; rows without a grammar are unrestricted."""

    rows: list[int] = field(default_factory=list)
    words: Longs = field(
        default_factory=lambda: np.zeros((0, 0), dtype=np.int64)
    )  # [listed rows, V / 64]: bit v = token v
    problems: dict[Chunk, str] = field(default_factory=dict)  # chunks without an allowed token

    def allowed(self, vocab_size: int) -> dict[int, npt.NDArray[np.bool_]]:
        """Return the tokens allowed in each listed row, [V] bool."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return dict(zip(self.rows, bits.view(np.bool_), strict=True))


NO_MASKS = Masks()


class Grammars:
    """The grammars. `masks` is for the launching thread, everything else for the thread that owns the sequences."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        """`model`: a folder with a tokenizer.json, or a GGUF file; without a tokenizer, grammars are unsupported."""
        self._tokenizer = _Tokenizer(model, vocab_size)
        self._limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
        self._following: WeakKeyDictionary[Sequence, Future[Following]] = WeakKeyDictionary()
        self._threads = ThreadPoolExecutor(BUILDING_THREADS, thread_name_prefix="grammar")
        self._built: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # guards `_built`
        self._filling: LLExecutor | None = None
        self.looks_ahead = False  # `forced` needs it
        self._vocab_size = vocab_size
        self._words = np.zeros((0, 0), dtype=np.int64)

    @property
    def available(self) -> bool:
        """False without a tokenizer, or once llguidance could not read it."""
        return self._tokenizer.is_there

    def read_ahead(self) -> None:
        """Read the tokenizer now, in another thread, and not when the first grammar comes."""
        self._threads.submit(self._tokenizer.get)

    def prepare(self, sequence: Sequence) -> Future[Following] | None:
        """Start compiling the sequence's grammar, once, in another thread; None without a grammar."""
        if sequence.grammar is None:
            return None
        building = self._following.get(sequence)
        if building is None:
            building = self._following[sequence] = self._threads.submit(
                self._build, sequence.grammar, sequence.sampling, sequence.token_ids[sequence.num_prompt_tokens :]
            )
        return building

    def is_ready(self, sequence: Sequence) -> bool:
        """True if a pass with the sequence would find its grammar compiled, without waiting."""
        building = self.prepare(sequence)
        return building is None or building.done()

    def forced(self, sequence: Sequence) -> list[int]:
        """The tokens behind the known ones about which the grammar leaves no choice, as far as the last masks showed.

        The model may cut the same text into other tokens.
        """
        building = self._following.get(sequence)
        if building is None or not building.done():
            return []
        known, forced = sequence.num_generated, building.result().forced
        for start, tokens in reversed(forced.items()):
            passed = known - start
            if (
                0 <= passed < len(tokens)
                and sequence.token_ids[sequence.num_prompt_tokens + start :] == tokens[:passed]
            ):
                return tokens[passed:]
        return []

    def masks(self, chunks: SequenceOf[Chunk], pending: Callable[[Sequence], int]) -> Masks:
        """Return the masks for these chunks' sampled tokens, in their order; valid until the next call.

        `pending(sequence)`: the token that the pass before sampled for it, which its tokens lack. It may wait for that.
        """
        constrained = [(row, chunk) for row, chunk in enumerate(chunks) if chunk.sequence.grammar is not None]
        if not constrained:
            return NO_MASKS
        masks = Masks()
        followed, states = list[Following](), list[Following]()
        for row, chunk in constrained:
            # The row behind a drafted token comes next to the one before it.
            following = states[-1].behind(chunk.drafted[-1]) if chunk.drafted else self._followed(chunk, pending)
            states.append(following)
            if self.looks_ahead:
                base = following if not chunk.drafted else states[-1 - len(chunk.drafted)]
                base.look_ahead(following)
            if following.problem:
                masks.problems[chunk] = following.problem
            elif not following.is_free:
                masks.rows.append(row)
                followed.append(following)
        words = self._filled([following.asked for following in followed])
        self._cut(words)
        for mask, following in zip(words.view(np.uint32), followed, strict=True):
            following.complete(mask)
        for at in np.flatnonzero(~words.any(axis=1)):
            followed[at].ends_here()
        for at, following in enumerate(followed):
            if following.problem:
                masks.problems[chunks[masks.rows[at]]] = following.problem
                words[at] = -1
        masks.words = np.ascontiguousarray(words[:, : mask_words(self._vocab_size)])
        return masks

    def _followed(self, chunk: Chunk, pending: Callable[[Sequence], int]) -> Following:
        """The state after the chunk's last token."""
        sequence = chunk.sequence
        building = self._following.get(sequence) or self.prepare(sequence)
        assert building is not None
        following = building.result()
        start, end = sequence.num_prompt_tokens + following.num_followed, chunk.end
        tokens = sequence.token_ids[start:end]
        if start + len(tokens) < end:
            tokens.append(pending(sequence))
        following.follow(tokens)
        return following

    def _filled(self, matchers: SequenceOf[LLMatcher | None]) -> Longs:
        """The masks [rows, V / 64] of these matchers; None skips its row."""
        if len(self._words) < len(matchers):
            tokenizer = self._tokenizer.get()
            width = max(self._vocab_size, tokenizer.vocab_size if tokenizer else 0)
            self._words = np.zeros((2 * len(matchers), -(-width // 64)), dtype=np.int64)
        words = self._words[: len(matchers)]
        asked = [(matcher, at) for at, matcher in enumerate(matchers) if matcher is not None]
        if asked:
            if self._filling is None:
                self._filling = LLExecutor(min(os.cpu_count() or 1, MOST_FILLING_THREADS))
            self._filling.unsafe_compute_mask_ptr(asked, words.ctypes.data, words.strides[0], len(words))
        return words

    def _cut(self, words: Longs) -> None:
        """Clear ids beyond the logits, which a tokenizer may have."""
        width, rest = mask_words(self._vocab_size), self._vocab_size % 64
        words[:, width:] = 0
        if rest:
            words[:, width - 1] &= (1 << rest) - 1

    def _build(self, grammar: Grammar, sampling: SamplingParams, generated: list[int]) -> Following:
        """Compile the grammar, advance it by earlier tokens, and compute a first mask, which warms its caches."""
        matcher = self._matcher(grammar) if grammar.text else None
        tokenizer = self._tokenizer.get()
        ends = tokenizer.eos_tokens if tokenizer else []
        following = Following(grammar, sampling, matcher, ends)
        following.problem = _problem(matcher, self.available or not grammar.text)
        following.follow(generated)
        if following.asked is not None:
            following.asked.compute_bitmask()
        return following

    def _matcher(self, grammar: Grammar) -> LLMatcher | None:
        """A new matcher at the start of the text; None without a tokenizer."""
        tokenizer = self._tokenizer.get()
        if tokenizer is None:
            return None
        with self._lock:
            built = self._built.get(grammar.text)
        if built is None:
            built = LLMatcher(tokenizer, grammar.text, log_level=0, limits=self._limits)
            built.compute_bitmask()
        with self._lock:
            self._built[grammar.text] = built
            self._built.move_to_end(grammar.text)
            while len(self._built) > KEPT:
                self._built.popitem(last=False)
            return built.deep_copy()


def _problem(matcher: LLMatcher | None, available: bool) -> str:
    if not available:
        return "this worker can't follow grammars: its model folder has no tokenizer.json that llguidance reads"
    return f"the grammar can't be built: {matcher.get_error()}" if matcher is not None and matcher.is_error() else ""


class _Tokenizer:
    """A model's tokenizer for llguidance, read when it is first asked for. Thread-safe.

    One of 49,000 tokens takes 0.6 s and 35 MB, which most workers on a CPU would spend on nothing before they are ready.
    """

    def __init__(self, model: Path, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self._reading = threading.Lock()
        self._read: LLTokenizer | None = None
        self.is_there = has_tokenizer(model)  # and was not found to be unreadable

    def get(self) -> LLTokenizer | None:
        """The tokenizer; None if there is none that the library reads, which is logged."""
        with self._reading:
            if self._read is None and self.is_there:
                try:
                    text = (read_file(self._model, TOKENIZER) or b"").decode("utf-8")
                    width = max(self._vocab_size, _num_tokens(text))
                    self._read = LLTokenizer(text, n_vocab=width, eos_token=_eos_ids(self._model) or None)
                except Exception as error:  # the library has no narrower exception
                    self.is_there = False
                    log.warning("grammars.unavailable", extra={"error": str(error)})
            return self._read


def _num_tokens(tokenizer: str) -> int:
    """The number of ids in a tokenizer.json."""
    fields = json.loads(tokenizer)
    vocab = fields["model"]["vocab"]
    ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
    return 1 + max([*ids, *(added["id"] for added in fields.get("added_tokens", []))])


def _eos_ids(model: Path) -> list[int]:
    """The model's EOS tokens; a request's stop tokens replace them."""
    for name in (GENERATION_CONFIG, CONFIG):
        named = read_json(model, name).get("eos_token_id")
        if named is not None:
            return named if isinstance(named, list) else [named]
    return []
