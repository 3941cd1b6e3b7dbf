"""The gateway's overrides of uvicorn's private parts: the HTTP protocol, and parts of the server.

Where a release of uvicorn lacks one of them, uvicorn's own serves, with what it has of bounds.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from common.log import difference

log = logging.getLogger("baton.gateway")

# Attributes that `gateway.http.connection` calls, reads or replaces.
OF_A_CONNECTION = (
    *(
        "_start_asgi_task",
        "_unset_keepalive_if_required",
        "on_response_complete",
        "on_message_begin",
        "on_url",
        "on_header",
    ),
    *(
        "on_body",
        "on_message_complete",
        "eof_received",
        "pause_writing",
        "resume_writing",
        "timeout_keep_alive_handler",
    ),
    *(
        "connections",
        "pipeline",
        "cycle",
        "flow",
        "headers",
        "url",
        "scope",
        "parser",
        "scheme",
        "transport",
        "loop",
        "app",
    ),
    *("root_path", "server_state", "expect_100_continue", "timeout_keep_alive", "timeout_keep_alive_task", "logger"),
    *("access_logger", "access_log"),
)
OF_AN_EXCHANGE = (
    *("scope", "transport", "flow", "logger", "access_logger", "access_log", "default_headers", "message_event"),
    *("expect_100_continue", "keep_alive", "on_response"),
)
# Attributes that `services.gateway.server` reads or replaces.
OF_A_SERVER = ("capture_signals", "lifespan", "server_state", "servers")
LOST_BY_A_SERVER = "a drain before uvicorn hears a signal, leaving a shared port while the event loop stands still"
LOST = "bounds on heads, on the time that they take and on clients that do not read; answers to clients that sent all they have"


def http_options(max_connections: int) -> dict[str, Any]:
    """Options of `uvicorn.Config`: our protocol class, and limits of uvicorn's own."""
    lacks = lacking()
    if not lacks:
        from gateway.http.connection import bounded_to

        return {"http": bounded_to(max_connections)}
    log.warning("gateway.library_differs", extra=difference("uvicorn", lacks, LOST))
    return {"http": "httptools", "limit_concurrency": max_connections}


def lacking() -> list[str]:
    """Attributes that uvicorn's protocol lacks, found on an instance in a running event loop; nothing is sent."""
    try:
        from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
    except ImportError as error:
        return [str(error)]
    try:
        made = HttpToolsProtocol(uvicorn.Config(_nobody, log_config=None), ServerState(), {})
        made.on_message_begin()  # initialises the remaining attributes
    except (TypeError, AttributeError) as error:
        return [f"HttpToolsProtocol: {error}"]
    taken = inspect.signature(RequestResponseCycle).parameters
    lacks = [f"HttpToolsProtocol.{name}" for name in OF_A_CONNECTION if not hasattr(made, name)]
    lacks += [f"RequestResponseCycle({name}=…)" for name in OF_AN_EXCHANGE if name not in taken]
    return lacks if STATUS_LINE else [*lacks, "STATUS_LINE"]


def can_join() -> bool:
    """True if uvicorn's server can join and leave ports; else the log says what is lost."""
    codes = [each.__code__ for each in vars(uvicorn.Server).values() if hasattr(each, "__code__")]
    named = {name for code in codes for name in code.co_names}
    lacks = [f"Server.{name}" for name in OF_A_SERVER if name not in named]
    if lacks:
        log.warning("gateway.library_differs", extra=difference("uvicorn", lacks, LOST_BY_A_SERVER))
    return not lacks


async def _nobody(scope: Any, receive: Any, send: Any) -> None:
    """An app stub: the probe opens no connection."""
