"""The reason for which a gateway is not ready, by what its models need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from common.peers import Peers
from gateway.answers.catalogue import PooledFacts
from gateway.answers.tokenizer import ChatTokenizer
from gateway.lifecycle.requests import OwnerSettings, OwnModels, Requests
from gateway.pooling.service import PoolingModels
from modelfiles.pooling import Pooling
from tests.fakes.bus import MemoryBus
from tests.fakes.ledger import MemoryLedger
from tests.fakes.workers import a_worker

POOLED = {"mini": PooledFacts(pooling=Pooling(size=4, max_len=8))}


@pytest.mark.parametrize(
    ("generates", "pools", "reason"),
    [
        (True, False, "no decode worker is ready"),
        (False, True, "no pool worker is ready"),
        (True, True, "no decode or pool worker is ready"),
        (False, False, "no decode worker is ready"),
    ],
)
def test_the_reason_names_the_workers_that_are_waited_for(
    tokenizer: ChatTokenizer, *, generates: bool, pools: bool, reason: str
) -> None:
    ready = [0]
    vectors = {name: SimpleNamespace(tokenizer=SimpleNamespace(facts=facts)) for name, facts in POOLED.items()}
    pooling = SimpleNamespace(models=vectors, num_ready_of=lambda _: ready[0], is_ready=lambda _: False)
    models = OwnModels(
        tokenizers={"tiny": tokenizer} if generates else {}, pooling=cast("PoolingModels", pooling) if pools else None
    )
    peers = Peers()
    requests = Requests(MemoryBus(), MemoryLedger(), peers, OwnerSettings(gateway_id="g", incarnation=1), models)
    assert requests.not_ready_reason == reason
    if pools and not generates:
        peers.saw(a_worker("other", "decode"))
        assert requests.not_ready_reason == reason, "another gateway's worker is no help"
    ready[0] = int(pools)
    assert requests.ready == pools
