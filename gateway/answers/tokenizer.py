"""Text to tokens by the model's tokenizer and chat template, without transformers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from tokenizers import Tokenizer

from common.blocks import tokenizer_fingerprint
from common.errors import InvalidRequestError, UnavailableError
from gateway.answers.ask import Infill
from gateway.answers.encoding import ControlTokens, Lengths
from gateway.answers.infill import infill_form
from gateway.grammars.maker import GrammarMaker
from gateway.parsing.choose import DEFAULT_PARSERS, Parsers, choose
from gateway.parsing.terminals import PlainTokens, Terminals
from gateway.request.defaults import sampling_defaults
from gateway.templates.template import ChatTemplate, RenderOptions, TooLongError, read_source
from modelfiles.byte_level import BYTE_CHARS
from modelfiles.files import CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, num_tokens, read_file, read_json

# A prompt is a single text: a thread pool for several costs 15 % more, and competes with ours.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_THINKING = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}  # asks templates to think
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_BYTE_OF_CHAR = {character: byte for byte, character in BYTE_CHARS.items()}


class Saved(NamedTuple):
    """Dtype and quantisation of the weights by config.json; "" if it says nothing, as beside a GGUF file."""

    architecture: str = ""
    dtype: str = ""
    quantised: str = ""  # quantisation method


def saved_as(config: Mapping[str, Any]) -> Saved:
    """Read dtype and quantisation from config.json; values that are not texts are ignored."""
    architectures, method = config.get("architectures"), config.get("quantization_config")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    told = (
        first,
        config.get("dtype") or config.get("torch_dtype"),
        method.get("quant_method") if isinstance(method, dict) else "",
    )
    return Saved(*(text[:100] if isinstance(text, str) else "" for text in told))


class ChatTokenizer:
    """Tokenizer, chat template, stop tokens and format of answers of a model folder or GGUF file. Thread-safe.

    `parsers` name formats of tool calls and of reasoning; by default they are those that the template shows. `template` takes
    the place of the folder's.
    """

    def __init__(self, model: Path, parsers: Parsers = DEFAULT_PARSERS, template: str = "") -> None:
        raw = read_file(model, TOKENIZER)
        if raw is None:
            raise FileNotFoundError(f"{model} has no tokenizer.json: name a Hugging Face model folder, or a GGUF file")
        described = json.loads(raw)
        self.tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.fingerprint = tokenizer_fingerprint(raw)
        self.is_byte_level = _is_byte_level(described.get("decoder"))
        config = read_json(model, TOKENIZER_CONFIG)
        whole = read_json(model, CONFIG)
        of_text = whole.get("text_config") or {}
        model_config = {**of_text, **whole}
        self._special = special_texts(config)
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        generation = read_json(model, GENERATION_CONFIG)
        self.defaults = sampling_defaults(generation)
        self.eos_ids = self._eos_ids(generation, model_config)
        self.saved = saved_as(model_config)
        # A field beside `text_config` takes precedence: Ovis 2's vocabulary ends before the chat tokens.
        said = of_text.get("vocab_size") or whole.get("vocab_size")
        self.vocab_size = int(said or num_tokens(model) or self.tokenizer.get_vocab_size())
        self.added = {index: token.content for index, token in added.items()}
        source = read_source(model, config, template)
        self.format = choose(
            source.with_tools,
            {text: index for index, text in self.added.items()},
            response_template=config.get("response_template"),
            parsers=parsers,
        )
        named = "\0".join([source.texts(), *map(self.added.__getitem__, self.added.keys() & self.format.ids)])
        self.controls = ControlTokens(self.tokenizer, described["model"], named)
        self.infill = infill_form(self.tokenizer.token_to_id)
        self.lengths = Lengths(described, self.tokenizer.get_vocab(), self._plain_ids)
        self._template = source.compiled(self._special, self.controls.shade)
        self.eos_ids = list(dict.fromkeys([*self.eos_ids, *self.format.stops]))
        bos = self.tokenizer.token_to_id(self._special["bos_token"]) if "bos_token" in self._special else None
        # EOS and BOS don't name the speaker of the text after them.
        self.borders = frozenset([*self.eos_ids, bos])
        self.grammars = GrammarMaker(
            raw.decode("utf-8"),
            vocab_size=max(self.vocab_size, 1 + max(self.tokenizer.get_vocab().values())),
            eos_ids=self.eos_ids,
            specials=[self.tokenizer.id_to_token(index) or "" for index in self.special_ids],
        )
        self.opens_reasoning = self._opens_reasoning()
        self._bytes: dict[int, bytes] = {}  # filled lazily
        self._plain: dict[Terminals | None, PlainTokens] = {}

    def close(self) -> None:
        """End the child processes."""
        self.grammars.close()
        if self._template is not None:
            self._template.close()

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        limit: int | None = None,
        keep: int | None = None,
    ) -> list[int]:
        """Tokens of a text. Without `parse_special` none is a control token, except those that every text gets.

        Raises TooLongError for more than `limit` tokens, often before any is made. With `keep` a text of any length loses its
        beginning: so many tokens are left at most, those that every text gets among them.
        """
        encode = self._ids if parse_special else self._plain_ids
        return self._encoded(text, text, encode, limit, keep, adds_special=add_special_tokens)

    def _encoded(
        self,
        text: str,
        named: str,
        encode: Callable[[str], list[int]],
        limit: int | None,
        keep: int | None,
        *,
        adds_special: bool,
    ) -> list[int]:
        """`named`: the text as `encode` reads it."""
        before, after = self.controls.around if adds_special else ([], [])
        if keep is not None:
            room = max(0, keep - len(before) - len(after))
            return [*before, *self.lengths.last(named, encode, room), *after][-keep:]
        self._refuse(text, limit)
        return [*before, *self.lengths.encoded(named, encode, limit), *after]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        limit: int | None = None,
        most_s: float | None = None,
        keep: int | None = None,
        add_special_tokens: bool = False,
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """Render the chat template, which mostly writes BOS itself, and tokenise it like `encode`. Raises as that, and
        InvalidRequestError.

        `most_s`: see `ChatTemplate.shaded`. Unless `parse_special` trusts the messages, only the template's own text becomes
        control tokens.
        """
        if options.get("parse_special", False):
            text = self._chat_template().render(messages, most_s=most_s, **options)
            return self.encode(text, add_special_tokens=add_special_tokens, limit=limit, keep=keep)
        shaded = self._chat_template().shaded(messages, most_s=most_s, **options)
        text = self.controls.shade.plain(shaded)
        named = self.controls.named(shaded, text)
        return self._encoded(text, named, self._plain_ids, limit, keep, adds_special=add_special_tokens)

    def encode_infill(self, prompt: Infill, *, limit: int | None = None, keep: int | None = None) -> list[int]:
        """Tokens of a fill-in-the-middle prompt. Raises as `encode`, and InvalidRequestError if the model has no form for it."""
        if self.infill is None:
            raise InvalidRequestError(
                f"{prompt.field}: this model has no tokens for a text between two others: serve one that was trained for it",
                param=prompt.field,
            )
        most = None if keep is not None else limit
        encode = partial(self.encode, add_special_tokens=False, parse_special=False, limit=most)
        return self.infill.tokens(prompt, encode, self.controls.around[0], keep)

    def _refuse(self, text: str, limit: int | None) -> None:
        fewest = self.lengths.fewest_tokens(text) if limit is not None else 0
        if limit is not None and fewest > limit:
            raise TooLongError(f"at least {fewest} tokens")

    def _ids(self, text: str) -> list[int]:
        # `encode` would hold the GIL.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _plain_ids(self, text: str) -> list[int]:
        return self.controls.encode_named(text)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[RenderOptions]) -> str:
        """See `ChatTemplate.render`. Raises InvalidRequestError."""
        return self._chat_template().render(messages, **options)

    @property
    def can_chat(self) -> bool:
        """True if it has a chat template."""
        return self._template is not None

    def special(self, name: str) -> str:
        """The text of `bos_token`, `eos_token`, `pad_token` or `unk_token`; "" if absent."""
        return self._special.get(name, "")

    @property
    def template_source(self) -> str:
        """The source of the chat template, the one with tools if there are several; "" for none."""
        return self._template.source if self._template is not None else ""

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequestError("this model has no chat template: use /v1/completions", param="messages")
        return self._template

    def _opens_reasoning(self) -> bool:
        """True if the template opens a block of reasoning when thinking is requested: the answer then begins inside it."""
        opening = self.format.format.opens_reasoning.rstrip()
        if not opening or self._template is None:
            return False
        try:
            return self.render([{"role": "user", "content": "Hello"}], variables=_THINKING).rstrip().endswith(opening)
        except (InvalidRequestError, UnavailableError):
            return False

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # `decode` would hold the GIL.
        return self.tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token on its own: possibly part of a character, and with the space that decoding strips."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    def plain(self, terminals: Terminals | None) -> PlainTokens:
        """The tokens that only add text in a state that these end."""
        known = self._plain.get(terminals)
        if known is None:
            known = self._plain[terminals] = PlainTokens(self._said, terminals)
        return known

    def _said(self, token_id: int) -> bytes | None:
        return None if token_id in self.special_ids or token_id in self.format.ids else self.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """One token as text, for logprobs; part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""  # padding of the vocabulary
        if self.is_byte_level:
            known = [_BYTE_OF_CHAR.get(character) for character in token]
            return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if token_id in self.special_ids:
            return token.encode()
        byte = _BYTE_TOKEN.match(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()

    def _eos_ids(self, generation: Mapping[str, Any], model: Mapping[str, Any]) -> list[int]:
        found: list[int] = []
        for source in (generation.get("eos_token_id"), model.get("eos_token_id")):
            found += source if isinstance(source, list) else [source] if source is not None else []
        named = self._special.get("eos_token")
        by_name = self.tokenizer.token_to_id(named) if named else None
        return list(dict.fromkeys([*found, *([by_name] if by_name is not None else [])]))


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    """True if tokens are GPT-2's bytes, so that decoding joins bytes."""
    if decoder is not None and decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return decoder is not None and decoder["type"] == "ByteLevel"


def special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names, for templates."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return {name: _content(config[name]) for name in names if config.get(name)}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)
