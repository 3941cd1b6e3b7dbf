"""Values of the chart that tests try: what must work, and what must be refused."""

from __future__ import annotations

from typing import Any

import pytest

EVERYTHING: dict[str, Any] = {
    "tlsSecret": "tls",
    "natsUrl": "tls://nats:4222",
    "redisUrl": "rediss://redis:6379",
    "tenantsSecret": "tenants",
    "cacheClaim": "cache",
    "otlpEndpoint": "http://otel-collector:4318",
    "topology": {"required": True},
    "gpuNodes": {"runtimeClass": "nvidia", "selector": {"nvidia.com/gpu.product": "NVIDIA-H200"}},
    "image": {"pullSecrets": [{"name": "registry"}]},
    "pair": {"replicas": 1},
    "monitoring": {"enabled": True},
    "autoscaling": {"enabled": True},
}
NOTHING: dict[str, Any] = {"usersSecret": "", "networkPolicies": False, "planner": {"enabled": False}}
VARIANTS = [
    pytest.param({}, id="default"),
    pytest.param(EVERYTHING, id="everything"),
    pytest.param(NOTHING, id="nothing"),
]
WRONG: list[dict[str, Any]] = [
    {"natsUrl": "nats:4222"},
    {"tlsSecret": "tls", "natsUrl": "tls://nats:4222"},  # and Redis in the clear
    {"topology": {"requird": True}},
    {"gateway": {"replicas": 0}},
    {"pair": {"memory": "64"}},
    {"autoscaling": {"missedShare": 5}},
    {"image": {"pullSecrets": ["registry"]}},
]
