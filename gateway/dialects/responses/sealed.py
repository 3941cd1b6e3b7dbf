"""Opaque texts that a client stores and returns unread: reasoning, and compacted conversations.

Nothing in them is secret, and whoever writes one may say as much in a message, so they are packed and not encrypted: each gateway
reads those of the others.
"""

from __future__ import annotations

import base64
import binascii

REASONING, COMPACTION = "reasoning", "compaction"
MAX_SEALED_CHARS = 8 << 20
_VERSION = "baton1"


def sealed(kind: str, text: str) -> str:
    """The text for an item's `encrypted_content`."""
    packed = base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()
    return f"{_VERSION}.{kind}.{packed}"


def unsealed(kind: str, content: str) -> str:
    """The text in `encrypted_content`. Raises ValueError unless a gateway of Baton wrote it for this kind of item."""
    if len(content) > MAX_SEALED_CHARS:
        raise ValueError(f"encrypted_content: at most {MAX_SEALED_CHARS} characters are allowed")
    version, _, rest = content.partition(".")
    found, _, packed = rest.partition(".")
    try:
        if version == _VERSION and found == kind:
            return base64.b64decode(packed, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        pass
    raise ValueError(f"encrypted_content: no {kind} of this server: leave the item out")
