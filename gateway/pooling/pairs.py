"""Pairs for decoders that score: query and document in a template, since such a model has no second text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.answers.encoding import ControlTokens
from gateway.answers.tokenizer import special_texts
from gateway.templates.template import ChatTemplate, TemplateRefusalError, TemplateSource, read_source
from modelfiles.files import CONFIG, TOKENIZER_CONFIG, read_json
from modelfiles.pooling import Pooling
from modelfiles.scoring import read_template_options
from modelfiles.served import named_in

# Qwen3-Reranker's form, as its authors give it; query, document and instruction are messages with these roles.
_QWEN3 = """\
{%- set instruction = 'Given a web search query, retrieve relevant passages that answer the query' -%}
{%- set ns = namespace(instruction=instruction, query='', document='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- set ns.instruction = message.content -%}
{%- elif message.role == 'query' -%}{%- set ns.query = message.content -%}
{%- elif message.role == 'document' -%}{%- set ns.document = message.content -%}{%- endif -%}
{%- endfor -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ ns.instruction }}
<Query>: {{ ns.query }}
<Document>: {{ ns.document }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ '' }}"""
_OWN_FORM = "<Query>:"  # written by a client itself
_PROBES = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
MAX_CUTS = 8


class PairTemplate:
    """Query and document as the tokens of one text. Only the template's own text becomes control tokens. Thread-safe."""

    def __init__(
        self, template: ChatTemplate, controls: ControlTokens, *, is_flat: bool, options: Mapping[str, Any]
    ) -> None:
        """`is_flat`: contents are texts, and no lists of parts."""
        self._template, self._controls, self._is_flat = template, controls, is_flat
        self._generates = bool(options.get("add_generation_prompt", False))
        self._options = {name: value for name, value in options.items() if name != "add_generation_prompt"}

    def is_filled(self, query: str) -> bool:
        """True for a query that a client has put into the form already."""
        return _OWN_FORM in query

    def tokens(self, query: str, document: str, instruction: str, most: int | None, *, from_left: bool) -> list[int]:
        """At most so many tokens, for which the document loses an end. Raises InvalidRequestError, UnavailableError."""
        found = self._tokens(query, document, instruction)
        for _ in range(MAX_CUTS):
            if most is None or len(found) <= most or not document:
                break
            document = self._shorter(document, len(found) - most, from_left=from_left)
            found = self._tokens(query, document, instruction)
        return found

    def _tokens(self, query: str, document: str, instruction: str) -> list[int]:
        shaded = self._shaded(query, document, instruction)
        return self._controls.encode_named(self._controls.named(shaded, self._controls.shade.plain(shaded)))

    def _shaded(self, query: str, document: str, instruction: str) -> str:
        texts = {"system": instruction, "query": query, "document": document}
        messages = [
            {"role": role, "content": text if self._is_flat else [{"type": "text", "text": text}]}
            for role, text in texts.items()
            if text or role != "system"
        ]
        return self._template.shaded(messages, add_generation_prompt=self._generates, variables=self._options)

    def _shorter(self, document: str, over: int, *, from_left: bool) -> str:
        """The document without so many tokens at an end."""
        ends = self._controls.offsets(document)
        if over >= len(ends):
            return ""
        return document[ends[over][0] :] if from_left else document[: ends[-over][0]]

    def shows_both(self) -> bool:
        """True if the template shows queries and documents."""
        try:
            shown = [self._shaded(query, document, "") for query, document in _PROBES]
        except TemplateRefusalError:
            return False
        return len(set(shown)) == len(_PROBES)


def read_pair_template(folder: Path, tokenizer: Tokenizer, raw: bytes, pooling: Pooling) -> PairTemplate | None:
    """The template of a decoder that scores: its own, or Qwen3-Reranker's. None: a pair is a text behind the other.

    Raises what reading the files raises.
    """
    scoring = pooling.scoring
    if scoring is None or len(scoring.labels) != 1 or not scoring.has_each:
        return None
    config = read_json(folder, TOKENIZER_CONFIG)
    special = special_texts(config)
    own = read_source(folder, config)
    is_qwen3 = any(name.startswith("Qwen3For") for name in named_in(read_json(folder, CONFIG)))
    options = read_template_options(folder)
    for source, flat, given in (
        (own, True, options),
        (own, False, options),
        *([(TemplateSource(_QWEN3), True, dict[str, Any]())] if is_qwen3 else []),
    ):
        if not source.source:
            continue
        controls = ControlTokens(tokenizer, json.loads(raw)["model"], source.texts())
        template = source.compiled(special, controls.shade)
        if template is None:
            continue
        found = PairTemplate(template, controls, is_flat=flat, options=given)
        if found.shows_both():
            return found
        template.close()
    return None
