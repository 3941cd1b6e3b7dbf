"""Models of vectors that come while a gateway runs, and are loaded for a request by who may have that."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from common.errors import DeadlineExceededError, UnavailableError
from common.messages import HostedModel, HostState
from common.peers import Peers
from common.words import HostStatus
from gateway.answers.catalogue import Catalogue
from gateway.http.exchange import RequestScope, RequestTrace
from gateway.http.problem import ForbiddenError, ModelNotFoundError
from gateway.lifecycle.newcomers import Newcomers
from gateway.lifecycle.running import Background
from gateway.placement.agreement import Own
from gateway.placement.hosts import Hosts
from gateway.pooling.lines import PooledNames
from gateway.pooling.service import Answering, PoolingModels, Wish
from gateway.pooling.texts import Fitting, TextTokenizer
from gateway.tenants.shares import Share
from gateway.tenants.tenants import Tenant
from tests.fakes.bus import MemoryBus
from tests.fakes.generations import ScriptedGenerations, ScriptedWorkers
from tests.pooling_models import build_pooling_model

PATIENCE_S = 60.0


class Scene:
    """A gateway of no model but those of `org`, as far as a model of vectors needs it."""

    def __init__(self, folder: Path) -> None:
        self.bus, self.peers = MemoryBus(), Peers()
        self.pooling = PoolingModels(self.bus, self.peers, {}, {}, gateway_id="g")
        workers = ScriptedWorkers(ScriptedGenerations(lambda spec: []))
        self.catalogue = Catalogue({}, workers, patterns=["org/*"])
        self.hosts = Hosts(self.pooling.is_ready, self.bus, gateway_id="g")
        self.background = Background()
        tokenizer = TextTokenizer.read(folder)
        own = Own(tokenizer=tokenizer.fingerprint)
        mine = self.catalogue, self.pooling.agreement, self.hosts, self.background
        self.newcomers = Newcomers(*mine, lambda name: (tokenizer, own), self.pooling)

    def answering(self, deadline_s: float = PATIENCE_S) -> Answering:
        script = ScriptedGenerations(lambda spec: [])
        budgets: Any = None
        return Answering(
            self.pooling,
            budgets=budgets,
            timelines=script.timelines,
            deadline_s=deadline_s,
            catalogue=self.catalogue,
            loads=self.hosts,
        )

    async def hears(self, *names: str) -> None:
        state = HostState(
            host="h", incarnation=1, models={name: HostedModel(status=HostStatus.UNLOADED) for name in names}
        )
        self.hosts.saw(state)
        self.newcomers.saw(state)
        async with asyncio.timeout(PATIENCE_S):
            while self.catalogue.coming:
                await asyncio.sleep(0)
        self.newcomers.look()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pooling_model(tmp_path_factory.mktemp("models") / "vectors")


def scope(tenant: Tenant) -> RequestScope:
    return RequestScope(request_id="r", tenant=tenant, trace=RequestTrace())


def wish() -> Wish:
    return Wish(model="org/vectors", inputs=["the cat"], fitting=Fitting())


async def test_one_that_hosts_offer_is_known_by_its_names_and_aliases_until_none_has_it(folder: Path) -> None:
    scene = Scene(folder)
    assert scene.catalogue.is_coming("org/vectors")
    with pytest.raises(UnavailableError, match="may be here in a moment"):
        scene.answering().find("org/vectors")
    scene.catalogue.take_aliases({"emb": (Share(model="org/vectors", percent=100.0),)})
    lines = PooledNames(scene.catalogue)
    assert ("emb" in lines, [*lines]) == (False, [])
    await scene.hears("org/vectors", "other/vectors")
    for name in ("org/vectors", "hf.co/org/vectors", "org/vectors:latest", "emb", ""):
        assert scene.answering().find(name).name == "org/vectors"
        assert name in lines
    assert ([*lines], len(lines), "other/vectors" in lines) == (["org/vectors", "emb"], 2, False)
    assert (scene.catalogue.own_names, scene.catalogue.names) == ({"org/vectors"}, ())
    assert scene.catalogue.pooled_aliases == {"emb": "org/vectors"}
    assert "makes no text" in scene.catalogue.unknown("emb")
    await scene.hears()
    assert not scene.catalogue.own_names
    scene.catalogue._listens_until = time.monotonic()
    with pytest.raises(ModelNotFoundError):
        scene.answering().find("emb")


async def test_a_request_waits_for_it_until_its_deadline_if_its_tenant_may_have_it_loaded(folder: Path) -> None:
    scene = Scene(folder)
    await scene.hears("org/vectors")
    with pytest.raises(ForbiddenError, match="may not have model 'org/vectors' loaded"):
        await scene.answering().answer(wish(), scope(Tenant(name="a", loads=())))
    assert scene.hosts.wanted() == {}
    with pytest.raises(DeadlineExceededError, match="before model 'org/vectors' was loaded"):
        await scene.answering(deadline_s=0.01).answer(wish(), scope(Tenant(name="a", loads=("org/vectors",))))
    assert scene.hosts.wanted()["org/vectors"].keep_s > 0
