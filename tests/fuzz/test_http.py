"""The gateway's own OpenAPI document, turned against it: whatever is sent, it answers as it says that it does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import httpx
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.dialects.openai.schema import Message
from tests.e2e.cluster import Cluster
from tests.models import build_tiny_model

KEY = "an-admin-key-of-a-test"
FAKE = {"fake": True, "kv_memory_mb": 8, "fake_step_ms": 0.1}


def fails_only_by_deadline(context: Any, response: Any, case: Case) -> bool | None:
    """A valid request may give itself no time: 504 is the answer to that."""
    return None if response.status_code == 504 else not_a_server_error(context, response, case)


CHECKS: list[CheckFunction] = [
    fails_only_by_deadline,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
SHORT_EXAMPLES = 4  # of each operation and mode: one of a conversation takes up to a second to draw
PARTS = 8  # of the operations, some of each dialect. Others than the first are `long`: drawing takes the time.
QUICK_PARTS = 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("fuzzed")
    model = build_tiny_model(folder / "tiny", "llama")
    async with Cluster(folder / "cluster", model=model, gateway_options=("--admin-key", KEY), **FAKE) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def operations(cluster: Cluster) -> list[list[Any]]:
    """All of the document's, in parts. Chat is in the first; keys are last, since the first one closes an open gateway."""
    schema = await asyncio.to_thread(schemathesis.openapi.from_url, f"{cluster.url}/openapi.json")
    found = [operation.ok() for operation in schema.get_all_operations()]
    found.sort(key=lambda operation: operation.path != "/v1/chat/completions")
    keys = [operation for operation in found if operation.path.startswith("/admin/keys")]
    others = [operation for operation in found if operation not in keys]
    parts = [others[part::PARTS] for part in range(PARTS)]
    return [*parts[:-1], [*parts[-1], *keys]]


@pytest.fixture(scope="module")
def answered() -> Counter[int]:
    """How often each status was answered."""
    return Counter()


@pytest.mark.quick(first=QUICK_PARTS)
@pytest.mark.parametrize("part", range(PARTS))
async def test_the_gateway_answers_as_its_document_says(
    operations: list[list[Any]], part: int, tried: Counter[str], answered: Counter[int]
) -> None:
    """Valid and invalid requests to every operation."""
    for operation in operations[part]:
        if operation.path != "/console/events":  # a stream that doesn't end (tests/e2e/test_console.py)
            await asyncio.to_thread(turn_against, operation, tried, answered)


async def test_after_all_that_it_still_serves_and_no_process_has_died(
    cluster: Cluster, tried: Counter[str], answered: Counter[int]
) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        admin = {"authorization": f"Bearer {KEY}"}
        made = await client.post("/admin/keys", json={}, headers=admin)
        body = {"model": "tiny", "prompt": "still there?", "max_tokens": 4}
        own = {"authorization": f"Bearer {made.json()['key']}"}
        assert (await client.post("/v1/completions", json=body, headers=own)).status_code == 200
    assert [name for name, process in cluster.processes.items() if process.returncode is not None] == []
    logged = "".join(path.read_text(errors="replace") for path in cluster.folder.glob("*.log"))
    assert "Traceback" not in logged
    assert tried["POST /v1/chat/completions"] >= SHORT_EXAMPLES
    assert answered[200], "no request was ever served: only refusals were tried"
    assert answered[400], "no request was ever refused"


def turn_against(operation: Any, tried: Counter[str], answered: Counter[int]) -> None:
    """Try an operation with valid and with invalid data."""
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        if mode is GenerationMode.NEGATIVE and not list(operation.body):
            continue  # there is nothing to get wrong but the path
        checks = [*CHECKS, negative_data_rejection] if mode is GenerationMode.NEGATIVE else CHECKS
        try_operation(operation, mode, checks, tried, answered)


def try_operation(
    operation: Any, mode: GenerationMode, checks: list[CheckFunction], tried: Counter[str], answered: Counter[int]
) -> None:
    many = settings().max_examples > 1_000  # `make fuzz`

    @settings(
        max_examples=300 if many else SHORT_EXAMPLES,
        deadline=None,  # a busy machine is no failure
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        tried[f"{operation.method.upper()} {operation.path}"] += 1
        if mode is GenerationMode.POSITIVE:
            _make_short(case)
        elif isinstance(case.body, dict):
            assume(None not in case.body.values())  # null is as if the field were absent, whatever its name
        response = case.call(timeout=60, headers={"authorization": f"Bearer {KEY}"})
        answered[response.status_code] += 1
        # 413: refused by its length (of a key's body 4,096 bytes), before anybody looked at its form
        is_read = response.status_code != HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case.validate_response(response, checks=checks if is_read else CHECKS)

    send()


def _make_short(case: Case) -> None:
    """Ask for the model that is served and for few tokens, so that some requests go all the way."""
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "tiny"
        if "stream" in case.body or "max_tokens" in case.body or len(case.body) < 4:
            case.body["max_tokens"] = 3


def test_the_document_names_every_field() -> None:
    """So that a new field is in it, and a field that is known but refused is, too."""
    by_role = Message.model_json_schema()["oneOf"]
    properties = {name for role in by_role for name in role["properties"]}
    assert properties == {*Message.model_fields, *Message.unsupported}
