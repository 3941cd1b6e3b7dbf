"""Texts as tokens for models that pool, in threads: the event loop is never held by a tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from common.blocks import pack_tokens, tokenizer_fingerprint, unpack_tokens
from common.errors import InvalidRequestError, OverloadedError
from gateway.answers.catalogue import PooledFacts
from gateway.answers.tokenizer import Saved, saved_as
from gateway.http.problem import ContextLengthError
from gateway.pooling.late import Marked
from gateway.pooling.pairs import PairTemplate, read_pair_template
from modelfiles.files import CONFIG, TOKENIZER, TOKENIZER_CONFIG, read_file, read_json
from modelfiles.pooling import SIDES, Pooling, read_pooling

TEXTS_AT_ONCE = 64  # texts of one thread's turn
SHORT_CHARS = 500  # tokenised sooner than a thread is switched
MAX_HELD_CHARS = 64 << 20  # characters of waiting texts, of all requests

# One input: a text, a pair of texts, or tokens as they are.
PooledText = str | tuple[str, str] | list[int]


@dataclass(frozen=True, slots=True)
class Input:
    """An input as a worker gets it."""

    packed: bytes
    second: int = 0  # where its second text begins; 0: nowhere

    @property
    def count(self) -> int:
        return len(self.packed) // 4


@dataclass(slots=True)
class Fitting:
    """The treatment of inputs: `longest` tokens are kept; None: more than the model's are refused."""

    longest: int | None = None
    from_left: bool = False  # which end is cut off
    prompt: str = ""  # before each text
    side: str = ""  # "query" or "document", which ColBERT tells apart; "": neither
    adapter: str = ""  # the model's own for these inputs
    sides_are_apart: bool = False  # a pair's texts are no input together, but one each
    document: int | None = None  # tokens kept of a text, or of a pair's second one
    instruction: str = ""  # the one in a template of pairs; "": its own


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledTexts:
    """The inputs of a request."""

    inputs: list[Input]
    skipped: int = 0  # tokens of the prompt, which no vector is pooled from

    @property
    def tokens(self) -> int:
        return sum(one.count for one in self.inputs)


@dataclass(slots=True)
class _Held:
    chars: int = 0


@dataclass(slots=True)
class TextTokenizer:
    """Tokenizer and pooling of a model's folder. Thread-safe."""

    fingerprint: str
    pooling: Pooling
    vocab_size: int
    _tokenizer: Tokenizer
    _pairs: PairTemplate | None = None
    # A token behind each text, which tokenizer_config.json asks for and tokenizer.json may forget (e5-mistral).
    _end: int | None = None
    saved: Saved = field(default_factory=Saved)
    _held: _Held = field(default_factory=_Held)

    @classmethod
    def read(cls, folder: Path) -> TextTokenizer:
        """Raises OSError, ValueError, and what the tokenizers library raises."""
        raw = read_file(folder, TOKENIZER)
        if raw is None:
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = read_json(folder, CONFIG)
        vocab_size = int(config.get("vocab_size") or tokenizer.get_vocab_size())
        pooling = read_pooling(folder)
        pairs = read_pair_template(folder, tokenizer, raw, pooling)
        end = _end_of(folder, tokenizer)
        return cls(tokenizer_fingerprint(raw), pooling, vocab_size, tokenizer, pairs, end, saved_as(config))

    @property
    def facts(self) -> PooledFacts:
        return PooledFacts(pooling=self.pooling, saved=self.saved, vocab_size=self.vocab_size)

    @property
    def takes_instruction(self) -> bool:
        """True if pairs stand in a template."""
        return self._pairs is not None

    async def texts(self, given: Sequence[PooledText], fitting: Fitting, *, longest: int, name: str) -> PooledTexts:
        """Tokens of each input. Raises InvalidRequestError about `name`, ContextLengthError, OverloadedError.

        `longest`: the most tokens that workers take.
        """
        chars = sum(map(_chars, given)) + len(fitting.prompt) * len(given)
        if self._held.chars and self._held.chars + chars > MAX_HELD_CHARS:
            raise OverloadedError("too many texts wait to be tokenised")
        self._held.chars += chars
        try:
            if chars <= SHORT_CHARS and self._pairs is None:
                made = [self._inputs(given, fitting, longest, name, 0)]
            else:
                made = await self._apart(given, fitting, longest, name)
        finally:
            self._held.chars -= chars
        skipped = 0
        if fitting.prompt and not self.pooling.prompts.are_pooled:
            skipped = _opening(self._tokenizer.encode(fitting.prompt))
        return PooledTexts(inputs=[one for part in made for one in part], skipped=skipped)

    async def _apart(self, given: Sequence[PooledText], fitting: Fitting, longest: int, name: str) -> list[list[Input]]:
        """The inputs of each slice, in threads."""
        slices = [given[at : at + TEXTS_AT_ONCE] for at in range(0, len(given), TEXTS_AT_ONCE)]
        return await asyncio.gather(
            *(
                asyncio.to_thread(self._inputs, part, fitting, longest, name, at * TEXTS_AT_ONCE)
                for at, part in enumerate(slices)
            )
        )

    def _inputs(
        self, given: Sequence[PooledText], fitting: Fitting, longest: int, name: str, first: int
    ) -> list[Input]:
        most = longest if fitting.longest is None or fitting.longest < 0 else min(fitting.longest, longest)
        if fitting.document is not None:
            given = self._shortened(given, fitting.document, from_left=fitting.from_left)
        if fitting.sides_are_apart:
            return self._compared(given, most, fitting, longest, name, first)
        marked = self._marked(fitting.side)
        texts = [one for one in given if not isinstance(one, list) and not self._is_templated(one)]
        encoded = iter(self._encoded([_with(fitting.prompt, one) for one in texts]))
        found = list[Input]()
        for at, one in enumerate(given):
            if isinstance(one, list):
                if max(one) >= self.vocab_size:
                    raise InvalidRequestError(f"{name}: a token id is not below {self.vocab_size}", param=name)
                input_ = _cut_ids(one, most, fitting)
            elif self._pairs is not None and self._is_templated(one):
                input_ = Input(pack_tokens(self._paired(self._pairs, one, most, fitting)))
            elif marked is not None:
                input_ = Input(pack_tokens(self._side(next(encoded), marked, most, fitting)))
            else:
                input_ = _input(next(encoded), most, fitting, self._end)
            _check_length(input_.count, most, longest, name, first + at)
            found.append(input_)
        return found

    def _compared(
        self, given: Sequence[PooledText], most: int, fitting: Fitting, longest: int, name: str, first: int
    ) -> list[Input]:
        """The tokens of a query and those of a document behind them, for each pair."""
        sides = list[dict[str, list[int]]]()
        for at, side in enumerate(SIDES):
            texts = list(dict.fromkeys(one[at] for one in given if isinstance(one, tuple)))
            prompt, marked = self.pooling.prompts.texts.get(side, ""), self._marked(side)
            encoded = self._encoded([prompt + text for text in texts])
            sides.append({t: self._side(e, marked, most, fitting) for t, e in zip(texts, encoded, strict=True)})
        found = list[Input]()
        for at, one in enumerate(given):
            assert isinstance(one, tuple)
            query, document = sides[0][one[0]], sides[1][one[1]]
            _check_length(max(len(query), len(document)), most, longest, name, first + at)
            found.append(Input(pack_tokens([*query, *document]), len(query)))
        return found

    def _marked(self, side: str) -> Marked | None:
        return Marked(self.pooling.late, side) if self.pooling.late is not None and side in SIDES else None

    def _side(self, encoded: Encoding, marked: Marked | None, most: int, fitting: Fitting) -> list[int]:
        room = most if marked is None else marked.room(most, is_cut=fitting.longest is not None)
        ids = unpack_tokens(_input(encoded, room, fitting, self._end).packed)
        return ids if marked is None else marked.ids(ids, most)

    def _shortened(self, given: Sequence[PooledText], most: int, *, from_left: bool) -> list[PooledText]:
        """The inputs with at most so many tokens of each document, not counting what every text gets."""
        documents = [one[1] if isinstance(one, tuple) else one for one in given]
        # A token has a byte at least.
        long = [at for at, one in enumerate(documents) if isinstance(one, str) and len(one.encode()) > most]
        encoded = self._tokenizer.encode_batch([str(documents[at]) for at in long], add_special_tokens=False)
        found = list(given)
        for at, one in zip(long, encoded, strict=True):
            if len(one.ids) > most:
                text, offsets = str(documents[at]), one.offsets
                kept = text[offsets[-most][0] :] if from_left else text[: offsets[most - 1][1]]
                pair = given[at]
                found[at] = (pair[0], kept) if isinstance(pair, tuple) else kept
        return found

    def _is_templated(self, given: PooledText) -> bool:
        return self._pairs is not None and isinstance(given, tuple) and not self._pairs.is_filled(given[0])

    def _paired(self, pairs: PairTemplate, given: PooledText, most: int, fitting: Fitting) -> list[int]:
        prompts = self.pooling.prompts
        instruction = fitting.instruction or prompts.texts.get(prompts.default, "")
        room = None if fitting.longest is None else most
        query, document = str(given[0]), str(given[1])
        return pairs.tokens(query, document, instruction, room, from_left=fitting.from_left)

    def _encoded(self, texts: list[str | tuple[str, str]]) -> list[Encoding]:
        return self._tokenizer.encode_batch_fast(texts) if texts else []


def _check_length(count: int, most: int, longest: int, name: str, at: int) -> None:
    """Raises ContextLengthError."""
    if count > most:
        raise ContextLengthError(
            f"This model's maximum context length is {longest} tokens. However, {name} {at} has"
            f" {count}. Please reduce its length, or let it be cut by truncate_prompt_tokens: -1.",
            param=name,
            excess=f"{count} tokens > {longest}",
        )


def _with(prompt: str, text: str | tuple[str, str]) -> str | tuple[str, str]:
    return prompt + text if prompt and isinstance(text, str) else text


def _opening(prompt: Encoding) -> int:
    """The tokens of a prompt, and what every text gets before it."""
    special = list(prompt.special_tokens_mask)
    while special and special[-1]:  # what every text gets behind it
        special.pop()
    return len(special)


def _chars(text: PooledText) -> int:
    return len(text[0]) + len(text[1]) if isinstance(text, tuple) else len(text)


def _end_of(folder: Path, tokenizer: Tokenizer) -> int | None:
    config = read_json(folder, TOKENIZER_CONFIG)
    named = config.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    return tokenizer.token_to_id(text) if config.get("add_eos_token") is True and isinstance(text, str) else None


def _input(encoded: Encoding, most: int, fitting: Fitting, end: int | None) -> Input:
    """The tokens of a text or a pair, with `end` behind them unless they end so."""
    ids, types = encoded.ids, encoded.type_ids
    added = [end] if end is not None and ids[-1:] != [end] else []
    most -= len(added)
    if len(ids) > most and fitting.longest is not None and (gone := _cut(encoded, len(ids) - most, fitting)):
        kept = [at for at in range(len(ids)) if at not in gone]
        ids, types = [ids[at] for at in kept], [types[at] for at in kept]
    return Input(pack_tokens([*ids, *added]), types.index(1) if 1 in types else 0)


def _cut(encoded: Encoding, over: int, fitting: Fitting) -> set[int]:
    """Places of the tokens that go: a text's end or beginning, of a pair the second one's. What every text gets stays."""
    sequences, special = encoded.sequence_ids, encoded.special_tokens_mask
    cut = 1 if 1 in sequences else 0
    places = [at for at, one in enumerate(sequences) if one == cut and not special[at]]
    gone = places[:over] if fitting.from_left else places[max(0, len(places) - over) :]
    return set(gone) if len(gone) == over else set()


def _cut_ids(ids: list[int], most: int, fitting: Fitting) -> Input:
    if fitting.longest is None:
        return Input(pack_tokens(ids))
    return Input(pack_tokens(ids[-most:] if fitting.from_left else ids[:most]))
