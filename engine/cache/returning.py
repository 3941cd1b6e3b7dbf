"""Returning: requests whose answers ended by a tool call, and are likely to come back once the tool ran."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from engine.cache.retention import Retention
from engine.sequence import Hold

MOST = 1024  # requests remembered of each kind


class Returning:
    """Begins a request's `Keep.call_ttl_s` at the word of its call, and at each later release of its blocks.

    The word and the releases come in any order: a worker that prefilled alone released before.
    """

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self._released: OrderedDict[str, Hold] = OrderedDict()  # by request
        self._called: OrderedDict[str, None] = OrderedDict()

    def releasing(self, hold: Hold) -> None:
        """Heed a hold whose blocks are about to be released."""
        if hold.request_id in self._called:
            _wish(hold)
            return
        self._released[hold.request_id] = hold
        if len(self._released) > MOST:
            self._released.popitem(last=False)

    def called(self, request_id: str) -> None:
        """Heed the word that a request's answer ended by a call."""
        self._called[request_id] = None
        if len(self._called) > MOST:
            self._called.popitem(last=False)
        if (hold := self._released.pop(request_id, None)) is not None:
            _wish(hold)
            self._retention.extend(hold)


def _wish(hold: Hold) -> None:
    """Give a hold the time to live of a call, unless its request has a wish of its own."""
    hold.keep = msgspec.structs.replace(hold.keep, ttl_s=hold.keep.ttl_s or hold.keep.call_ttl_s, call_ttl_s=0.0)
