"""Text to tokens: the model folder's own tokenizer and chat template, without transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

from common.errors import InvalidRequestError

MAX_RENDERED_CHARS = 8_000_000


class ChatTokenizer:
    """Tokenizer, chat template and stop tokens of one model folder. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json: point --model at a Hugging Face model folder")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.fingerprint = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        config = _read(folder / "tokenizer_config.json")
        model_config = _read(folder / "config.json")
        self._special = {
            name: _content(config[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if config.get(name)
        }
        self.special_ids = frozenset(
            index for index, token in self.tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.eos_ids = self._eos_ids(_read(folder / "generation_config.json"), model_config)
        self.vocab_size = int(model_config.get("vocab_size") or self.tokenizer.get_vocab_size())
        self._template = _compile(_template_source(folder, config))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Render the chat template and tokenise it. The template itself writes BOS, so none is added."""
        return self.encode(self.render(messages, **options), add_special_tokens=False)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render the model's template in a sandbox. Raises InvalidRequestError for what the template refuses."""
        if self._template is None:
            raise InvalidRequestError("this model has no chat template: use /v1/completions", param="messages")
        try:
            text = self._template.render(messages=messages, **(self._special | options))
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error
        if len(text) > MAX_RENDERED_CHARS:
            raise InvalidRequestError("the rendered prompt is too long", param="messages")
        return text

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token by itself, for logprobs; part of a character becomes U+FFFD."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def _eos_ids(self, generation: Mapping[str, Any], model: Mapping[str, Any]) -> list[int]:
        found: list[int] = []
        for source in (generation.get("eos_token_id"), model.get("eos_token_id")):
            found += source if isinstance(source, list) else [source] if source is not None else []
        named = self._special.get("eos_token")
        by_name = self.tokenizer.token_to_id(named) if named else None
        return list(dict.fromkeys([*found, *([by_name] if by_name is not None else [])]))


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    inline = config.get("chat_template")
    if isinstance(inline, list):
        named = {entry["name"]: entry["template"] for entry in inline}
        inline = named.get("default") or next(iter(named.values()), None)
    return inline


def _compile(source: str | None) -> jinja2.Template | None:
    if source is None:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)
