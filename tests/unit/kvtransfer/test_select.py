"""Transports are chosen by name."""

from __future__ import annotations

import pytest

from kvtransfer.select import open_transport


def test_an_unknown_transport_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="shm, ucx"):
        open_transport("pigeon")
