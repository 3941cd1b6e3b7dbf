"""What a gateway's user may do on NATS is enough to keep responses, to follow them and to take those that wait."""

from __future__ import annotations

import time

from common.wire import connect
from gateway.responses.conversations import Conversations
from gateway.responses.records import Content, Events, ResponseLimits, ResponseRecord, new_response_id
from gateway.responses.store import ResponseStore, response_streams
from tests.integration.access.deployment import Deployment
from tests.integration.waiting import eventually


async def test_a_gateway_keeps_responses_as_its_user(deployment: Deployment) -> None:
    limits = ResponseLimits(store_bytes=16 << 20)
    async with connect(deployment.settings("gateway-0"), name="gateway-0") as wire:
        streams = response_streams(wire, limits)
        streams.open()
        store = ResponseStore(streams, limits)
        asked = ResponseRecord(id=new_response_id(), tenant="t", status="queued", created_at=int(time.time()))
        record = await store.keep(asked, Content(input=b"[]", object=b"{}"))
        [delivery] = await eventually(lambda: streams.fetch("run", 1))
        following = store.follow(record)
        await store.add_events(record, 0, Events(first=0, data=b"e\n\n", is_last=True))
        assert [events async for events in following] == [Events(first=0, data=b"e\n\n", is_last=True)]
        begun = await store.change("t", record.id, lambda now: now.to("in_progress", starts=1))
        assert await store.end(begun.to("completed"), Content(input=b"[]", object=b"1"))
        await delivery.done()
        conversations = Conversations(store)
        conversation = await conversations.create("t", {})
        await conversations.add("t", conversation.id, [{"type": "message"}])
        assert len(await conversations.items("t", conversation.id)) == 1
        await conversations.delete("t", conversation.id)
        await store.delete("t", record.id)
        await streams.close()
