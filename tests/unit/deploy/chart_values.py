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
    "image": {"pullSecrets": [{"name": "registry"}], "repository": "our.registry:5000/baton", "tag": "1.2"},
    "pair": {"replicas": 1},
    "monitoring": {"enabled": True, "dashboards": True, "labels": {"release": "prometheus"}},
    "autoscaling": {"enabled": True},
    "commonLabels": {"team": "models"},
    "podAnnotations": {"linkerd.io/inject": "disabled"},
    "extraEnv": [{"name": "BATON_LOG_LEVEL", "value": "debug"}],
    "serviceAccount": {"create": True, "annotations": {"for": "us"}},
    "servedModelName": "demo",
    "gateway": {
        "extraArgs": ["--max-connections", "500"],
        "affinity": {"nodeAffinity": {}},
        "nodeSelector": {"disk": "ssd"},
    },
    "ingress": {"enabled": True, "className": "nginx", "hosts": ["baton.example.org", "llm.example.org"]},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "web"}], "hostnames": ["baton.example.org"]},
    "pools": {
        "cpu": {
            "role": "worker",
            "device": "cpu",
            "replicas": 0,
            "autoscaled": False,
            "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "4Gi"}},
            "tensorParallelSize": 1,
            "pipelineParallelSize": 2,
            "extraArgs": ["--threads", "2"],
            "extraEnv": [{"name": "BATON_LOG_LEVEL", "value": "info"}],
            "nodeSelector": {"cpu": "many"},
            "affinity": {"nodeAffinity": {}},
        },
        "vectors": {"role": "pool", "device": "cpu", "model": "/models/mini", "servedModelName": "mini", "replicas": 2},
        "coder": {
            "role": "decode",
            "model": "/models/coder",
            "servedModelName": "coder",
            "tensorParallelSize": 4,
            "nodeSelector": {"gpu": "h200"},
            "speculativeConfig": '{"method": "ngram", "num_speculative_tokens": 4}',
        },
        "deep": {"role": "prefill", "pipelineParallelSize": 2},
        "wide": {"role": "worker", "pipelineParallelSize": 4, "tensorParallelSize": 4, "nodes": 2, "replicas": 3},
    },
}
NOTHING: dict[str, Any] = {
    "usersSecret": "",
    "networkPolicies": False,
    "planner": {"enabled": False},
    "fullnameOverride": "other",
    "serviceAccount": {"name": "ours"},
    "pools": {"prefill": None, "decode": None, "all": {"role": "worker", "device": "cpu", "maxReplicas": 2}},
}
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
    {"image": {"gateway": "baton:cpu"}},  # 0.3.0's
    {"image": {"repository": "team/baton"}},  # in no registry
    {"image": {"repository": "registry.example.org/baton:cpu"}},  # a tag is another value
    {"pools": {"cpu": {"device": "cpu"}}},
    {"pools": {"cpu": {"role": "worker", "replica": 1}}},
    {"podAnnotations": {"a": 1}},
    {"pools": {"wide": {"role": "worker", "pipelineParallelSize": 4, "nodes": 1}}},
]
