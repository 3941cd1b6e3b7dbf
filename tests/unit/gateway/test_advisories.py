"""Advisories of 2026: one request's harm to other servers, the door that each would use here, and that it is shut.

The table in docs/adversary.md names these and the tests of other rooms.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.grammars.child import Opening, Question, Verdict
from gateway.pooling import routes as pooling_routes
from tests.fuzz.messages import DECODERS
from tests.unit.gateway.conftest import MODEL, ROOT, Gateway, run_gateway

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}
EVIL = "evil.example"
PART = {"type": "image_url", "image_url": {"url": f"https://{EVIL}/1x100000.png"}}
REMOTE = {"do_remote_prefill": True, "remote_host": EVIL, "remote_port": 1, "remote_block_ids": [1]}
TEMPLATE = f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{EVIL}"

# Where a worker moves KV, what stands for an image, and how a prompt is rendered are not the client's to say.
SNEAKED: list[tuple[str, dict[str, Any]]] = [
    ("CVE-2026-94624", {"kv_transfer_params": REMOTE}),
    ("CVE-2026-94624", {"extra_args": {"kv_transfer_params": REMOTE}}),
    ("CVE-2026-94624", {"vllm_xargs": {"kv_transfer_params": REMOTE}}),
    ("CVE-2026-94624", {"bootstrap_host": EVIL, "bootstrap_port": 1, "bootstrap_room": 1}),
    ("CVE-2026-94624", {"disaggregated_params": {"request_type": "generation_only", "opaque_state": EVIL}}),
    ("PYSEC-2026-4353", {"multi_modal_data": {"image": EVIL}}),
    ("PYSEC-2026-4353", {"features": {"mm_hashes": {"image": [EVIL]}, "mm_placeholders": {"image": [{"offset": -1}]}}}),
    ("CVE-2026-56340", {"prompt_embeds": EVIL}),
    ("CVE-2026-5760", {"chat_template": TEMPLATE}),
    ("CVE-2026-116173", {"logprob_token_ids": [*range(129)]}),
]  # fmt: skip
CHAT, COMPLETIONS = PATHS
TOO_MANY: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("CVE-2026-34756", {"n": 17}, (CHAT, COMPLETIONS)),
    ("CVE-2026-34756", {"n": 10**9}, (CHAT, COMPLETIONS)),
    ("CVE-2026-34756", {"n": 16, "best_of": 10**9}, (COMPLETIONS,)),
    ("CVE-2026-34756", {"n": 16, "prompt": ["Hi"] * 5}, (COMPLETIONS,)),
    ("CVE-2026-116173", {"logprobs": True, "top_logprobs": 129}, (CHAT,)),
    ("CVE-2026-116173", {"logprobs": 129}, (COMPLETIONS,)),
    ("CVE-2026-116173", {"prompt_logprobs": 129}, (CHAT, COMPLETIONS)),
    ("CVE-2026-116173", {"logit_bias": {str(token): 1 for token in range(1_025)}}, (CHAT, COMPLETIONS)),
]


@pytest.fixture(scope="module", params=[False, True], ids=["refuses", "ignores"])
async def either(request: pytest.FixtureRequest, tokenizer: ChatTokenizer) -> AsyncIterator[Gateway]:
    """A gateway that refuses unknown fields, and one that ignores them."""
    async with run_gateway(tokenizer, HttpSettings(ignores_unknown_fields=request.param)) as gateway:
        gateway.script.max_model_len = 4096
        yield gateway


async def ask(gateway: Gateway, path: str, fields: dict[str, Any]) -> int:
    body = {"model": MODEL, "max_tokens": 2} | PATHS[path] | fields
    return (await gateway.http.post(path, json=body)).status_code


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("advisory", "fields"), SNEAKED)
async def test_nothing_of_it_reaches_a_job(either: Gateway, path: str, advisory: str, fields: dict[str, Any]) -> None:
    await ask(either, path, {})
    plain = either.script.submitted[-1]
    number = len(either.script.submitted)
    status = await ask(either, path, fields)
    assert status in (200, 400)
    for spec in either.script.submitted[number:]:
        assert EVIL not in repr(spec)
        assert (spec.token_ids, spec.grammar) == (plain.token_ids, plain.grammar)
        assert spec.sampling == msgspec.structs.replace(plain.sampling, seed=spec.sampling.seed)
    assert (len(either.script.submitted) > number) == (status == 200)


@pytest.mark.parametrize(("advisory", "fields", "paths"), TOO_MANY)
async def test_counts_have_a_bound_at_each_front_end(
    either: Gateway, advisory: str, fields: dict[str, Any], paths: tuple[str, ...]
) -> None:
    number = len(either.script.submitted)
    assert [await ask(either, path, fields) for path in paths] == [400] * len(paths)
    assert len(either.script.submitted) == number


@pytest.mark.parametrize("advisory", ["PYSEC-2026-4353", "CVE-2026-22773"])
@pytest.mark.parametrize("part", [PART, {"type": "input_audio", "input_audio": {"data": EVIL, "format": "wav"}}])
async def test_parts_that_are_no_text_are_refused(either: Gateway, advisory: str, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, part]}]
    assert await ask(either, "/v1/chat/completions", {"messages": messages}) == 400


async def test_there_is_no_route_that_renders_what_comes_with_it(either: Gateway) -> None:
    """CVE-2026-5760: those that compare texts take them as they are, and have no field for a template."""
    sent = {"model": MODEL, "query": TEMPLATE, "documents": [TEMPLATE]}
    assert (await either.http.post("/inference/v1/generate", json=sent)).status_code == 404
    compared = {"model": MODEL, "queries": TEMPLATE, "documents": [TEMPLATE]}
    for path, body in (
        ("/v1/rerank", sent),
        ("/rerank", sent),
        ("/score", compared),
        ("/v1/score", compared),
        ("/pooling", {"model": MODEL, "input": TEMPLATE}),
    ):
        answer = await either.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model"), answer.text
        assert not {"template", "chat_template", "messages"} & pooling_routes.PATHS[path].api.body.model_fields.keys()


async def test_special_tokens_that_are_typed_are_text(demo: ChatTokenizer) -> None:
    """CVE-2026-44222: whatever a message says, the prompt has the control tokens that the template writes."""
    async with run_gateway(demo, HttpSettings()) as gateway:
        gateway.script.max_model_len = 4096

        async def controls(content: str) -> Counter[int]:
            assert (
                await ask(gateway, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}) == 200
            )
            return Counter(token for token in gateway.script.submitted[-1].token_ids if token in demo.added)

        usual = await controls("Hi")
        typed = "".join([*demo.added.values(), "<|image_pad|>", "<|vision_start|>", "<image>"])
        assert demo.added
        assert await controls(typed) == usual


# -- nothing is unpickled ----------------------------------------------------------------------------------------------

UNPICKLED = (
    "CVE-2026-3059", "CVE-2026-3060", "CVE-2026-14890", "CVE-2026-15969", "CVE-2026-86793", "CVE-2026-93088", "CVE-2026-7304",
    "CVE-2026-26220",
)  # fmt: skip


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.fixture
def bombs(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """The file, and pickles of each protocol that make it."""
    made = tmp_path / "unpickled"
    pickles = [pickle.dumps(Bomb(made), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    pickle.loads(pickles[-1])  # they do
    made.unlink()
    return made, pickles


async def test_no_route_unpickles(gateway: Gateway, bombs: tuple[Path, list[bytes]]) -> None:
    made, pickles = bombs
    document = (await gateway.http.get("/openapi.json")).json()
    paths = [path for path, methods in document["paths"].items() if "post" in methods]
    assert set(PATHS) <= set(paths)
    for path in paths:
        for kind in ("application/json", "application/octet-stream", "application/x-pickle"):
            answer = await gateway.http.post(path, content=pickles[-1], headers={"content-type": kind})
            assert 400 <= answer.status_code < 500, (path, kind)
    assert not made.exists()


@pytest.mark.parametrize("name", [*DECODERS, "Opening", "Question", "Verdict"])
def test_no_message_unpickles(name: str, bombs: tuple[Path, list[bytes]]) -> None:
    made, pickles = bombs
    children = {"Opening": Opening, "Question": Question, "Verdict": Verdict}
    decoder = DECODERS.get(name) or msgspec.msgpack.Decoder(children[name])
    for raw in pickles:
        with pytest.raises(msgspec.DecodeError):
            decoder.decode(raw)
    assert not made.exists()


# -- the table ---------------------------------------------------------------------------------------------------------

NAME = r"(?:CVE|PYSEC|GHSA)-[0-9a-z-]+"


def test_the_table_names_each_advisory_and_a_test() -> None:
    page = (ROOT / "docs/adversary.md").read_text().partition("## Advisories of other servers")[2]
    rows = [line for line in page.partition("\n## ")[0].splitlines() if re.match(rf"\| {NAME}", line)]
    named = {one for row in rows for one in re.findall(NAME, row)}
    tried = {row[0] for row in (*SNEAKED, *TOO_MANY)} | {*UNPICKLED}
    assert tried <= named
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert tests, row
        assert [test for test in tests if not (ROOT / test).exists()] == []
