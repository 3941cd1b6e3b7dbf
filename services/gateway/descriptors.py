"""File descriptor limits: many systems allow a process 1,024 unless it asks for more."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("baton.gateway")

# NATS, Redis, files, and the 2,048 connections that are accepted before any is refused.
OTHER_DESCRIPTORS = 2300


def make_room(max_connections: int) -> None:
    """Raise the process's own limit as far as the system allows; warn if that is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + OTHER_DESCRIPTORS
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        remedy = "raise the hard limit of open files (ulimit -Hn), or lower --max-connections"
        log.warning("gateway.few_descriptors", extra={"allowed": allowed, "wanted": wanted, "remedy": remedy})
