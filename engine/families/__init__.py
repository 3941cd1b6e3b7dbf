"""config.json -> `ModelSpec`. A family is a function that reads its own fields; nothing else depends on the family.

Unsupported settings are refused with the field's name; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from engine.families import (
    ai21,
    allenai,
    arcee,
    baidu,
    bigcode,
    bytedance,
    cohere,
    deepseek,
    glm,
    google,
    huggingface,
    ibm,
    inception,
    inclusionai,
    internlm,
    jetbrains,
    karpathy,
    kimi,
    kyutai,
    lg,
    liquid,
    meituan,
    meta,
    microsoft,
    minimax,
    mistral,
    naver,
    nvidia,
    openai,
    openbmb,
    poolside,
    qwen,
    rednote,
    skt,
    stability,
    swiss_ai,
    tencent,
    tii,
    towers,
    upstage,
    xiaomi,
)
from engine.families.gguf import config_of
from engine.families.gguf.names import as_in_file
from engine.families.quantised import beside_config, in_files, in_halves, in_tiles, online
from engine.families.quantised.gguf import IN_TILES, beside_experts, kept_as
from engine.families.reading import Family, Fields
from engine.spec.model import ModelSpec, UnsupportedModelError
from modelfiles.gguf import is_gguf, read_header
from modelfiles.served import GROUP, named_in, of_packages, refusal

# fmt: off
_MAKERS = (
    ai21, allenai, arcee, baidu, bigcode, bytedance, cohere, deepseek, glm, google, huggingface, ibm, inception,
    inclusionai, internlm, jetbrains, karpathy, kimi, kyutai, lg, liquid, meituan, meta, microsoft, minimax, mistral,
    naver, nvidia, openai, openbmb, poolside, qwen, rednote, skt, stability, swiss_ai, tencent, tii, towers, upstage,
    xiaomi,
)
# fmt: on
# Architectures as config.json names them.
FAMILIES: dict[str, Family] = {name: read for maker in _MAKERS for name, read in maker.FAMILIES.items()}


def _of_package(point: EntryPoint) -> Family:
    """A family of an installed package, which is imported when a model asks for it."""

    def read(fields: Fields) -> ModelSpec:
        try:
            family: Family = point.load()
        except Exception as error:  # another one's code
            raise UnsupportedModelError(f"{point.name}: {GROUP} names {point.value}, which fails: {error}") from error
        return family(fields)

    return read


# One that Baton has, too, stays Baton's.
FAMILIES = {name: _of_package(point) for name, point in of_packages().items()} | FAMILIES


def read_model_spec(
    folder: Path, *, quantization: str = "auto", device: str = "cpu", dtype: str = "float32"
) -> ModelSpec:
    """Read `folder/config.json` or a GGUF file. Raises UnsupportedModelError naming the field, or FileNotFoundError.

    `quantization`: what plain weights become while they are loaded, one of `ONLINE`. `device` and `dtype` ("auto": not
    asked for) decide what quantised weights become otherwise.
    """
    spec = _in_gguf(folder) if is_gguf(folder) else model_spec(beside_config(folder, read_fields(folder)))
    return in_halves(_quantised(spec, folder, quantization, device, dtype), folder, device=device, dtype=dtype)


def _quantised(spec: ModelSpec, folder: Path, quantization: str, device: str, dtype: str) -> ModelSpec:
    """The model with the formats of its modules."""
    if quantization != "auto":
        spec = online(spec, quantization)
        if quantization == "int8" and device == "cpu" and is_gguf(folder):
            return replace(spec, quantization=beside_experts(folder, spec.quantization))
        return in_tiles(spec, device=device, dtype=dtype)
    if is_gguf(folder):
        kept = kept_as(folder, device=device, dtype=dtype)
        # Tiles take and give float32: another dtype between them costs conversions and digits.
        return replace(spec, quantization=kept, dtype="float32" if kept.name == IN_TILES else spec.dtype)
    return in_tiles(in_files(spec, folder), device=device, dtype=dtype)


def _in_gguf(file: Path) -> ModelSpec:
    try:
        spec = model_spec(beside_config(file, read_fields(file)))
    except UnsupportedModelError as error:
        said = str(error)
        raise UnsupportedModelError(f"{file}, read as a {said}" if said.startswith("config.json") else said) from error
    return as_in_file(spec, read_header(file).tensors)


def read_fields(folder: Path) -> dict[str, Any]:
    """The JSON of `folder/config.json`, or its equivalent from a GGUF file. Raises as `read_model_spec`."""
    if is_gguf(folder):
        return config_of(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: is it a model folder in Hugging Face's format?")
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UnsupportedModelError(f"{path} is no JSON object")
    return fields


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Translate a config.json of transformers 4 or 5. Raises UnsupportedModelError, naming the field."""
    fields = Fields(config)
    family = FAMILIES[_architecture(fields)]
    try:
        spec = family(fields)
    except UnsupportedModelError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:  # a value of another type
        name = fields.newest
        raise UnsupportedModelError(f"config.json: {name} has a value that can't be read: {error}") from error
    fields.check_all_known()
    return spec


def architectures(fields: Mapping[str, Any]) -> list[str]:
    """The names of a checkpoint's classes; none if it has none."""
    try:
        return named_in(fields)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from None


def _architecture(fields: Fields) -> str:
    named = architectures(fields)
    for name in named:
        if name in FAMILIES:
            return str(name)
    raise UnsupportedModelError(f"config.json: {refusal(named)}")
