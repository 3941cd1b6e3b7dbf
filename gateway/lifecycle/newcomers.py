"""Models that come while a gateway runs: those that hosts say they have, as far as its settings allow their names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from common.errors import ServingError
from common.messages import HostState
from common.settings import ConfigError
from gateway.answers.catalogue import Catalogue
from gateway.answers.tokenizer import ChatTokenizer
from gateway.lifecycle.running import Background
from gateway.placement.agreement import Agreement, Own
from gateway.placement.hosts import Hosts
from gateway.pooling.service import PoolingModels
from gateway.pooling.texts import TextTokenizer

log = logging.getLogger("baton.gateway")

AGAIN_S = 30.0  # until a model is tried again whose files couldn't be read
MAX_NEWCOMERS = 256
Read = Callable[[str], tuple[ChatTokenizer | TextTokenizer, Own]]


class Newcomers:
    """Adds models to the catalogue, and drops them when no host has them any more."""

    def __init__(
        self,
        catalogue: Catalogue,
        agreement: Agreement,
        hosts: Hosts,
        background: Background,
        read: Read,
        pooling: PoolingModels | None = None,
    ) -> None:
        """`read(name)`, on a thread: what a gateway must know of a model. Raises ConfigError or OSError."""
        self._catalogue, self._agreement, self._hosts = catalogue, agreement, hosts
        self._background, self._read, self._pooling = background, read, pooling
        self._failed_at: dict[str, float] = {}

    def saw(self, state: HostState) -> None:
        """Read what is new."""
        now = time.monotonic()
        for name in state.models:
            is_known = name in self._catalogue.own_names or name in self._catalogue.coming
            if is_known or not self._catalogue.may_come(name):
                continue
            has_room = len(self._catalogue.came) + len(self._catalogue.coming) < MAX_NEWCOMERS
            if has_room and now - self._failed_at.get(name, -AGAIN_S) >= AGAIN_S:
                self._catalogue.coming.add(name)
                self._background.spawn(self._take(name))

    async def _take(self, name: str) -> None:
        try:
            tokenizer, own = await asyncio.to_thread(self._read, name)
        except (ConfigError, ServingError, OSError, ValueError) as error:
            self._failed_at[name] = time.monotonic()
            log.warning("model.not_read", extra={"model": name, "why": str(error)})
            return
        finally:
            self._catalogue.coming.discard(name)
        self._failed_at.pop(name, None)
        if isinstance(tokenizer, ChatTokenizer):
            self._agreement.add(name, own)
            self._catalogue.add(name, tokenizer)
        elif self._pooling is not None:
            self._pooling.add(name, tokenizer, own)
            self._catalogue.add_pooled(name, tokenizer.facts)
        self._hosts.changed()
        log.info("model.came", extra={"model": name})

    def look(self) -> None:
        """Drop what no host has."""
        for name in self._catalogue.came:
            if self._hosts.find(name) is None and not self._hosts.is_active(name):
                self._catalogue.drop(name)
                self._agreement.drop(name)
                if self._pooling is not None:
                    self._pooling.drop(name)
                log.info("model.went", extra={"model": name})
        if len(self._failed_at) > MAX_NEWCOMERS:
            self._failed_at.clear()
