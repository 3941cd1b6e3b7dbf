"""Messages between gateways for their consoles."""

from __future__ import annotations

import msgspec

from common.messages import PROTOCOL_VERSION


class ConsoleAsk(msgspec.Struct, frozen=True, kw_only=True, tag="console_ask"):
    """Gateway -> gateway, while somebody watches a console. Answered by `ConsoleTold`."""

    v: int = PROTOCOL_VERSION
    request_id: str = ""  # an answer's or a choice's; "": the present activity
    history: str = ""  # a span of `gateway.console.recorder`
    since: float = 0.0  # only newer samples, in unix seconds
    search: dict[str, str] | None = None  # filters of `gateway.console.search`


class ConsoleTold(msgspec.Struct, frozen=True, kw_only=True, tag="console_told"):
    """JSON as the gateway's own console would show it."""

    v: int = PROTOCOL_VERSION
    json: bytes


console_ask_decoder: msgspec.msgpack.Decoder[ConsoleAsk] = msgspec.msgpack.Decoder(ConsoleAsk)
console_told_decoder: msgspec.msgpack.Decoder[ConsoleTold] = msgspec.msgpack.Decoder(ConsoleTold)
