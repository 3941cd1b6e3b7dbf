"""Checks of a model's files: is it supported, and how large is it. Nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from modelfiles.files import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    is_model,
    other_tokenizer,
    read_file,
)
from modelfiles.gguf import GgufError, is_gguf, read_header
from modelfiles.pooling import MODULES, PoolingError, is_pooled, read_pooling
from modelfiles.scoring import is_qwen3_reranker
from modelfiles.served import named_in, of_transformers, pooled_names, refusal
from services.runtime.checks.finding import Finding
from services.runtime.checks.weights import Weights, weights_of
from services.runtime.settings import no_model

AGAIN = "download it again"
WITHOUT_IT = (
    "a model without one gets it by AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers"
)
PICKLED = "download the safetensors files, or convert them: model.save_pretrained(folder) of transformers"


def check_model(model: Path, *, impl: str = "auto") -> Iterator[Finding]:
    """Check configuration, class, tokenizer and weights. `impl`: `--model-impl`."""
    if is_gguf(model):
        yield from _gguf(model)
        return
    if not is_model(model):
        text, _, remedy = no_model(model).partition("; ")
        yield Finding("model", "fail", text, remedy)
        return
    yield _pooled(model) if is_pooled(model) else _config(model, impl)
    yield from check_tokenizer(model)
    weights = weights_of(model)
    for problem in weights.problems:
        yield Finding("weights", "fail", problem, PICKLED if "pickled" in problem else AGAIN)
    if not weights.problems:
        yield Finding("weights", "ok", described(weights))


def check_tokenizer(folder: Path) -> Iterator[Finding]:
    """Check the tokenizer's files: the first is required, none may be broken."""
    if other := other_tokenizer(folder):
        yield _other(folder, other)
    elif not (folder / TOKENIZER).is_file():
        yield Finding("model", "fail", f"no {TOKENIZER} in {folder}", f"download it; {WITHOUT_IT}")
    there = [file for name in (TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG) if (file := folder / name).is_file()]
    problems = [problem for file in there if (problem := _not_an_object(file))]
    yield from (Finding("model", "fail", problem, AGAIN) for problem in problems)
    if not problems and there[:1] == [folder / TOKENIZER]:
        yield Finding("model", "ok", ", ".join(file.name for file in there))


def _other(folder: Path, name: str) -> Finding:
    """Convert another tokenizer's file, as gateway and workers will."""
    try:
        read_file(folder, TOKENIZER)
    except (ValueError, OSError, RecursionError) as error:
        text, _, remedy = str(error).rpartition(": ")
        return Finding("model", "fail", text or remedy, remedy if text else AGAIN)
    return Finding("model", "ok", f"{name}, as {TOKENIZER}")


def described(weights: Weights) -> str:
    """Describe the model: parameters, dtype, bytes and files."""
    count = f"{_rounded(weights.num_parameters)} parameters, " if weights.num_parameters else ""
    files = f"{weights.num_files} file{'s' if weights.num_files > 1 else ''}"
    return f"{count}mostly {weights.mostly}, {gigabytes(weights.num_bytes)} in {files}, complete"


def gigabytes(count: float) -> str:
    """Format bytes in decimal gigabytes."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def longest(model: Path) -> int | None:
    """The model's context length; None if the family decides. Raises as its readers."""
    if is_gguf(model):
        metadata = read_header(model).metadata
        found = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    else:
        fields = json.loads((model / CONFIG).read_bytes())
        inner = fields.get("text_config")
        text = inner if isinstance(inner, dict) else fields
        found = text.get("max_position_embeddings", fields.get("max_position_embeddings"))
    return found if isinstance(found, int) and found > 0 else None


def check_context(model: Path, asked: int) -> Iterator[Finding]:
    """Check `--max-model-len` against the model's context length; 0: not given."""
    try:
        most = longest(model)
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # `check_model` reports it
    if most is not None and asked > most:
        text = f"--max-model-len {asked}: the model has {most} positions (max_position_embeddings)"
        yield Finding("context", "fail", text, f"use --max-model-len {most} or less, or leave it out")


def _config(folder: Path, impl: str) -> Finding:
    file = folder / CONFIG
    problem = _not_an_object(file)
    if problem:
        return Finding("model", "fail", problem, AGAIN)
    fields: dict[str, Any] = json.loads(file.read_bytes())
    try:
        named = named_in(fields)
    except ValueError as error:
        return Finding("model", "fail", str(error), AGAIN)
    by_others = impl != "baton" and bool(of_transformers() & {*named, str(fields.get("model_type"))})
    text, _, remedy = refusal(named).partition("; ")
    if not text and impl != "transformers":
        return Finding("model", "ok", f"{', '.join(named)} is served")
    if by_others:
        return Finding("model", "ok", f"{', '.join(named)} is computed by the installed transformers, slowly")
    return Finding("model", "fail", f"{file}: {text}", remedy) if text else Finding("model", "ok", ", ".join(named))


def _pooled(folder: Path) -> Finding:
    """Check the class, and what is beside the weights of a model of vectors or scores."""
    fields = json.loads((folder / CONFIG).read_bytes())
    named = named_in(fields)
    is_decoder = (folder / MODULES).is_file() or is_qwen3_reranker(folder, fields)
    if not pooled_names(beside_modules=is_decoder) & {*named}:
        text = f"{folder / CONFIG}: {', '.join(named) or 'no class'} is not served for vectors or scores"
        return Finding("model", "fail", text, "docs/embeddings.md lists the classes")
    try:
        pooling = read_pooling(folder)
    except (PoolingError, OSError) as error:
        text, _, remedy = str(error).rpartition(": ")
        return Finding("model", "fail", text or remedy, remedy if text else AGAIN)
    makes = f"scores of {len(pooling.labels)} labels" if pooling.labels else f"vectors of {pooling.size}"
    return Finding("model", "ok", f"{', '.join(named)} is served: {makes}")


def _not_an_object(file: Path) -> str:
    """Return why a file is not a JSON object, with line and column; "" if it is."""
    try:
        raw = file.read_bytes()
        msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except OSError as error:
        return f"{file}: {error.strerror}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _place(file, raw)
    return ""


def _place(file: Path, raw: bytes) -> str:
    """Parse again with the slower reader, which reports lines and is less strict."""
    try:
        value = json.loads(raw)
    except json.JSONDecodeError as error:
        said = error.msg[0].lower() + error.msg[1:]
        return f"{file} is not JSON: line {error.lineno}, column {error.colno}: {said}"
    except (ValueError, RecursionError) as error:
        return f"{file} is not JSON: {type(error).__name__}"
    return "" if isinstance(value, dict) else f"{file} is no JSON object"


def _rounded(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _gguf(file: Path) -> Iterator[Finding]:
    """Check that all parts are complete, the class is supported, and the tokenizer's rules are known."""
    if not file.is_file():
        yield Finding("model", "fail", no_model(file), "give --model the file's path")
        return
    try:
        header = read_header(file)
        architecture = str(header.metadata.get("general.architecture"))
        text, _, remedy = refusal([architecture], "gguf").partition("; ")
        if text:
            yield Finding("model", "fail", f"{file}: {text}", remedy)
        yield Finding("weights", "ok", described(weights_of(file)))
        read_file(file, TOKENIZER)
        if not text:
            yield Finding("model", "ok", f"{architecture} is served, {file.name}")
    except (GgufError, OSError) as error:
        text, _, remedy = str(error).rpartition(": ")
        yield Finding("model", "fail", text, remedy)
