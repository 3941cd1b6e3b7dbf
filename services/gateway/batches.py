"""The Batch API of a gateway, from its settings."""

from __future__ import annotations

from common.config import GatewaySettings
from common.tracing import Tracer
from gateway.batches.records import BatchLimits
from gateway.batches.service import Batches
from gateway.tenants import Tenants
from services.connections import nats_settings

DAY_S = 86_400.0


def make_batches(settings: GatewaySettings, tenants: Tenants, tracer: Tracer) -> Batches:
    """Nothing is connected yet."""
    limits = BatchLimits(
        store_bytes=settings.batch_store_mb << 20,
        file_bytes=settings.batch_file_mb << 20,
        file_lines=settings.batch_lines,
        line_bytes=settings.batch_line_kb << 10,
        concurrency=settings.batch_concurrency,
        window_s=settings.batch_window_s,
        keep_s=settings.batch_keep_days * DAY_S,
    )
    return Batches(nats_settings(settings), limits, tenants, tracer=tracer, trace_share=settings.trace_share)
