"""Users of NATS against the real server: each role can do its work and nothing more."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from common import subjects
from common.bus import NatsSettings, QueueLimits, connect_bus
from common.errors import UnavailableError
from common.messages import Ack, Cancel, ToWorker, WorkerReply, to_worker_decoder, worker_reply_decoder
from tests.integration.access.deployment import Deployment, connected
from tests.integration.bus.looks import a_job
from tests.integration.waiting import LIMIT_S, eventually, refusal

JOBS = subjects.JOBS_STREAM
MUST_NOT_PUBLISH = {
    "decode-0": [
        "baton.jobs.prefill-0",
        "baton.heartbeat.prefill-0",
        "baton.gatebeat.gateway-0",
        "baton.gateway.gateway-0.prefill-0",
        "baton.frames.gateway-0.prefill-0",
        "baton.peer.prefill-0.prefill-1",
        "baton.order.prefill-0.decode-0",
        "baton.order.prefill-0.gateway-0",
        "baton.plan.prefill-0.decode-0",
        "baton.planner.planner",
        "baton.planner",
        "baton.dead.job",
        f"$JS.API.STREAM.MSG.GET.{JOBS}",
        f"$JS.API.STREAM.MSG.DELETE.{JOBS}",
        f"$JS.API.STREAM.PURGE.{JOBS}",
        f"$JS.API.STREAM.UPDATE.{JOBS}",
        f"$JS.API.STREAM.CREATE.{JOBS}",
        f"$JS.API.CONSUMER.CREATE.{JOBS}.worker-prefill-0.baton.jobs.prefill-0",
        f"$JS.API.CONSUMER.CREATE.{JOBS}.worker-decode-0.baton.jobs.prefill-0",
        f"$JS.API.CONSUMER.MSG.NEXT.{JOBS}.worker-prefill-0",
        f"$JS.ACK.{JOBS}.worker-prefill-0.1.1.1.1.1",
        "_INBOX.gateway-0.forged",
        "baton.keys.register",
        "$JS.API.STREAM.MSG.GET.BATON_KEYS",
        "baton.usage.1.gateway-0.1",
        "baton.responses.tenant.response.resp_1.record",
        "baton.responseswork.run.tenant.resp_1",
        "$JS.API.DIRECT.GET.BATON_RESPONSES",
        "$JS.API.CONSUMER.MSG.NEXT.BATON_RESPONSES_WORK.run",
    ],
    "prefill-0": [
        "baton.jobs.decode-0",
        "baton.heartbeat.decode-0",
        f"$JS.API.STREAM.DELETE.{JOBS}",
        f"$JS.API.CONSUMER.MSG.NEXT.{JOBS}.worker-decode-0",
    ],
    "gateway-0": [
        "baton.gateway.gateway-1",
        "baton.frames.gateway-1",
        "baton.gatebeat.gateway-1",
        "baton.heartbeat.decode-0",
        "baton.order.decode-0.gateway-1",
        "baton.peer.decode-0.gateway-0",
        "baton.peer.decode-0.prefill-0",
        "baton.gateway.gateway-1.gateway-0",
        "baton.frames.gateway-1.decode-0",
        "baton.planner.gateway-0",
        "baton.plan.decode-0.gateway-0",
        f"$JS.API.STREAM.DELETE.{JOBS}",
        f"$JS.API.STREAM.PURGE.{JOBS}",
        f"$JS.API.CONSUMER.CREATE.{JOBS}.mine.baton.jobs.prefill-0",
        "_INBOX.prefill-0.forged",
        "baton.usage.1.gateway-1.1",
        "$JS.API.STREAM.DELETE.BATON_KEYS",
        "$JS.API.STREAM.DELETE.BATON_RESPONSES",
        "$JS.API.STREAM.INFO.BATON_RESPONSES",
        "$JS.API.CONSUMER.CREATE.BATON_RESPONSES.mine.baton.responses.>",
    ],
    "pool-0": [
        "baton.heartbeat.decode-0",
        "baton.gateway.gateway-0.pool-0",
        "baton.frames.gateway-0.pool-0",
        "baton.peer.decode-0.pool-0",
        "baton.order.decode-0.pool-0",
        "baton.worker.decode-0",
        "baton.jobs.pool-0",
        f"$JS.API.CONSUMER.CREATE.{JOBS}.worker-pool-0.baton.jobs.pool-0",
        f"$JS.API.CONSUMER.MSG.NEXT.{JOBS}.worker-pool-0",
        "baton.keys.register",
    ],
    "planner": [
        "baton.jobs.prefill-0",
        "baton.gateway.gateway-0",
        "baton.frames.gateway-0",
        "baton.heartbeat.decode-0",
        "baton.peer.decode-0.planner",
        "baton.order.decode-0.planner",
        "baton.order.decode-0.gateway-0",
        "baton.gateway.gateway-0.planner",
    ],
    "observer": [
        "baton.jobs.prefill-0",
        "baton.worker.prefill-0",
        "$JS.API.STREAM.MSG.GET.BATON_KEYS",
        "baton.order.prefill-0.observer",
        "baton.planner",
        "baton.gateway.gateway-0",
        "$JS.API.STREAM.LIST",
    ],
}
MUST_NOT_HEAR = {
    "decode-0": [
        "baton.worker.prefill-0",
        "baton.peer.prefill-0.*",
        "baton.order.*.*",
        "baton.frames.*.decode-0",
        "baton.frames.*",
        "baton.gateway.*",
        "baton.jobs.*",
        "baton.responses.*.response.*.events.*",
        "_INBOX.>",
        ">",
    ],
    "prefill-0": ["baton.worker.*", "baton.dead.*", "_INBOX.gateway-0.>", "$JS.API.>"],
    "gateway-0": [
        "baton.frames.gateway-1",
        "baton.frames.*",
        "baton.frames.gateway-1.*",
        "baton.frames.>",
        "baton.gateway.gateway-1",
        "baton.gateway.gateway-1.*",
        "baton.worker.*",
        "_INBOX.gateway-1.>",
        "_INBOX.*.>",
        "baton.jobs.*",
        "baton.responses.>",
        "$SYS.>",
    ],
    "pool-0": [
        "baton.order.decode-0.*",
        "baton.heartbeat.*",
        "baton.gatebeat.*",
        "baton.frames.*",
        "baton.worker.*",
        "baton.>",
    ],
    "planner": ["baton.frames.*", "baton.jobs.*", "baton.>"],
    "observer": ["baton.frames.*", "baton.worker.*", "baton.gateway.*", "baton.>"],
}


@pytest.mark.parametrize("user", MUST_NOT_PUBLISH)
async def test_a_user_publishes_nothing_beyond_its_role(deployment: Deployment, user: str) -> None:
    async with connected(deployment, user) as raw:
        allowed = [
            subject
            for subject in MUST_NOT_PUBLISH[user]
            if not await raw.refused(lambda subject=subject: raw.client.publish(subject, b"{}"))
        ]
    assert allowed == []


@pytest.mark.parametrize("user", MUST_NOT_HEAR)
async def test_a_user_hears_nothing_beyond_its_role(deployment: Deployment, user: str) -> None:
    async with connected(deployment, user) as raw:
        allowed = [
            subject
            for subject in MUST_NOT_HEAR[user]
            if not await raw.refused(lambda subject=subject: raw.client.subscribe(subject))
        ]
    assert allowed == []


async def test_what_a_role_needs_is_allowed(deployment: Deployment) -> None:
    """The control of the two tests above: the same question, answered with yes."""
    async with connected(deployment, "decode-0") as raw:
        for own in (
            "baton.frames.gateway-0.decode-0",
            "baton.gateway.gateway-0.decode-0",
            "baton.peer.prefill-0.decode-0",
        ):
            assert not await raw.refused(lambda own=own: raw.client.publish(own, b""))
        assert not await raw.refused(lambda: raw.client.subscribe("baton.worker.decode-0"))


async def test_nobody_connects_without_a_user(deployment: Deployment, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("decode-0:guessed\n")
    for credentials in (None, wrong):
        settings = NatsSettings(url=deployment.nats.address, credentials=credentials)
        assert "guessed" not in await refusal(settings, r"refuses .* --nats-credentials")


async def test_a_job_goes_from_a_gateway_to_its_worker_and_is_acknowledged(deployment: Deployment) -> None:
    """The worker comes first: its queue opens once the gateway has made the stream."""
    async with connect_bus(deployment.settings("prefill-0"), name="prefill-0", owns_streams=False) as worker:
        queue = await worker.jobs("prefill-0")
        async with connect_bus(deployment.settings("gateway-0"), name="gateway-0") as gateway:
            await gateway.publish_job("prefill-0", a_job())
            [delivery] = await eventually(lambda: queue.fetch(8, expires_s=0.5))
            await delivery.in_progress()
            await delivery.ack()
            given_up = a_job("given-up")
            sequence = await gateway.publish_job("prefill-0", given_up)
            await gateway.delete_job(sequence, given_up)
            assert await queue.fetch(8, expires_s=0.05) == []


async def test_requests_are_answered_between_users_whose_inboxes_are_their_own(deployment: Deployment) -> None:
    async def known(message: ToWorker) -> WorkerReply:
        return Ack(known=isinstance(message, Cancel))

    async with (
        connect_bus(deployment.settings("gateway-0"), name="gateway-0") as gateway,
        connect_bus(deployment.settings("decode-0"), name="decode-0", owns_streams=False) as worker,
    ):
        await worker.serve(subjects.order("decode-0", subjects.ANY), to_worker_decoder, known)
        cancel = Cancel(request_id="request", attempt=1, gateway="gateway-0")

        async def answered() -> bool:
            with contextlib.suppress(UnavailableError):  # the server may not know the subscription yet
                answer = await gateway.request(
                    subjects.order("decode-0", "gateway-0"), cancel, worker_reply_decoder, timeout_s=LIMIT_S
                )
                return answer == Ack(known=True)
            return False

        for _ in range(3):  # the right to answer is given anew with each request
            assert await eventually(answered)


async def test_a_job_delivered_too_often_becomes_a_dead_letter_under_permissions(deployment: Deployment) -> None:
    limits = QueueLimits(ack_wait_s=0.2, max_deliver=1)
    async with (
        connect_bus(deployment.settings("gateway-0"), name="gateway-0", limits=limits) as gateway,
        connect_bus(deployment.settings("decode-0"), name="decode-0", limits=limits, owns_streams=False) as worker,
    ):
        queue = await worker.jobs("decode-0")
        await gateway.publish_job("decode-0", a_job("poison"))
        assert await eventually(lambda: queue.fetch(8, expires_s=0.5))

        async def moved() -> bool:
            await queue.fetch(8, expires_s=0.1)
            return gateway.dead_letters > 0

        assert await eventually(moved)
