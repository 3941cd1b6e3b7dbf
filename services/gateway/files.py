"""The gateway's files: the models' tokenizers and weights, and the tenants."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from common.settings import ConfigError
from engine.checkpoint.fingerprint import files_fingerprint
from gateway.answers.tokenizer import ChatTokenizer
from gateway.parsing.choose import Parsers
from gateway.placement.agreement import Own
from gateway.pooling.texts import TextTokenizer
from gateway.tenants.tenants import Tenants
from modelfiles.pooling import is_pooled
from services.gateway.settings import LOOPBACK, GatewaySettings
from services.runtime.models.named import by_name

log = logging.getLogger("baton.gateway")


def read_tokenizers(settings: GatewaySettings) -> dict[str, ChatTokenizer]:
    """Return each model's tokenizer by its name in the API. Raises ConfigError."""
    option = "--served-models {name}={folder}" if settings.served_models else "--model {folder}"
    found = {
        name: _tokenizer(
            folder, settings.parsers(name), settings.template(name), option.format(name=name, folder=folder)
        )
        for name, folder in settings.folders.items()
        if not is_pooled(folder)
    }
    for name, tokenizer in found.items():
        calls, reasoning = tokenizer.format.format.name, tokenizer.format.format.reasoning
        log.info("model.format", extra={"model": name, "calls": calls or "text", "reasoning": reasoning or "content"})
    return found


def read_text_tokenizers(settings: GatewaySettings) -> dict[str, TextTokenizer]:
    """Return tokenizer and pooling of each model of vectors or scores, by its name in the API. Raises ConfigError."""
    found = dict[str, TextTokenizer]()
    for name, folder in settings.folders.items():
        if is_pooled(folder):
            found[name] = _text_tokenizer(folder, str(folder))
    return found


def _text_tokenizer(folder: Path, called: str) -> TextTokenizer:
    try:
        return TextTokenizer.read(folder)
    except Exception as error:  # the tokenizers library has no narrower exception
        raise ConfigError(f"--model {called}: {error}") from error


def _tokenizer(folder: Path, parsers: Parsers, template: str, option: str) -> ChatTokenizer:
    try:
        return ChatTokenizer(folder, parsers, template)
    except Exception as error:  # the tokenizers library has no narrower exception
        raise ConfigError(f"{option}: {error}") from error


def read_own(settings: GatewaySettings, tokenizers: Mapping[str, ChatTokenizer | TextTokenizer]) -> dict[str, Own]:
    """Return the fingerprints that workers of each model must have. A folder without weights has none."""
    own = {
        name: Own(
            tokenizer=tokenizers[name].fingerprint,
            files=files_fingerprint(folder),
            called=settings.called_by_workers.get(name, ""),
        )
        for name, folder in settings.folders.items()
        if name in tokenizers
    }
    for name in (name for name, one in own.items() if not one.files):
        log.info("gateway.no_weights", extra={"model": name, "meaning": "any weights of this name are served"})
    return own


def read_newcomer(settings: GatewaySettings, name: str) -> tuple[ChatTokenizer | TextTokenizer, Own]:
    """Read a model that came to the cache; what defines its text is fetched if it isn't here. Raises ConfigError."""
    folder = by_name(name, log.info, text_alone=True)
    tokenizer: ChatTokenizer | TextTokenizer
    if is_pooled(folder):
        tokenizer = _text_tokenizer(folder, name)
    else:
        tokenizer = _tokenizer(folder, settings.parsers(name), settings.template(name), f"--model {name}")
    return tokenizer, Own(tokenizer=tokenizer.fingerprint, files=files_fingerprint(folder))


def read_tenants(settings: GatewaySettings) -> Tenants:
    """Return the tenants. Raises ConfigError if the network could send requests without a key."""
    path = Path(settings.tenants) if settings.tenants else None
    needs_keys = settings.host not in LOOPBACK
    own = {"admin_key": settings.admin_key, "orders_key": settings.orders_key, "metrics_key": settings.metrics_key}
    return Tenants(api_keys=settings.keys, path=path, needs_keys=needs_keys, **own)


def reload(tenants: Tenants) -> None:
    """Reload the tenants' file. Running requests continue; an invalid file changes nothing."""
    try:
        tenants.reload()
        log.info("tenants.reloaded", extra={"tenants": len(tenants.names), "keys": len(tenants.keys)})
    except ConfigError as error:
        log.error("tenants.not_reloaded", extra={"error": str(error)})
