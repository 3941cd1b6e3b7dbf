"""The choice between `transformers` and our own families, by `model_impl`."""

from __future__ import annotations

import importlib.util
import logging

from engine.config import EngineConfig
from engine.families import FAMILIES, architectures, read_fields
from modelfiles.gguf import is_gguf
from modelfiles.served import of_transformers

log = logging.getLogger("baton.engine")


def is_foreign(config: EngineConfig) -> bool:
    """True if `transformers` computes it; with "auto", if no family knows it and `transformers` is installed.

    Raises ValueError when it is asked for and not installed, or can't be.
    """
    if is_gguf(config.model) and config.model_impl == "transformers":
        raise ValueError("model_impl = transformers reads no GGUF files: use auto")
    if config.model_impl == "baton":
        return False
    installed = importlib.util.find_spec("transformers") is not None
    if config.model_impl == "transformers":
        if not installed:
            raise ValueError("model_impl = transformers needs the package: pip install 'transformers>=5.17'")
        if config.quantization != "auto":
            raise ValueError("model_impl = transformers knows no quantization but auto")
        return True
    fields = read_fields(config.model)
    named = architectures(fields)
    known = of_transformers() & {*named, str(fields.get("model_type"))}
    if not installed or not named or any(name in FAMILIES for name in named) or not known:
        return False
    if config.quantization != "auto":
        raise ValueError(f"quantization = {config.quantization!r} is for models of Baton's families, not {named}")
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"--tensor-parallel-size {config.tensor_parallel_size}: transformers computes {named} whole, no family of Baton's"
            " shares it among ranks: take 1"
        )
    log.warning("engine.model_by_transformers", extra={"architectures": named})
    return True
