"""Prompts that are computed where they decode, of which a peer has the beginning."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec

from decode.role import DecodeRole
from engine.engine import Chunk
from tests.fakes.device import settled
from tests.fakes.worker import BLOCK, claim, new_job
from tests.unit.worker.pulls.ends import PROMPT, Ends, running_ends

FULL = len(PROMPT) // BLOCK * BLOCK


async def step(ends: Ends, role: DecodeRole) -> list[Chunk]:
    """Run a pass; return what it computed."""
    chunks = role.plan(400)
    role.apply(list(zip(chunks, ends.receiver.engine.launch(chunks).wait(), strict=True)))
    await settled()
    return chunks


async def test_a_local_prompt_is_pulled_while_others_are_computed() -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)
        context = ends.receiver.context
        role = DecodeRole(replace(context, cache=replace(context.cache, puller=ends.puller)))
        ends.receiver.roles.attach(role, active=True)
        sequence, gateway = ends.offered(), ends.receiver.gateway
        ends.puller.left(sequence)
        job = new_job("r", PROMPT, sequence.sampling)
        held = {"hash_root": sequence.hash_root, "holder": "d", "holder_blocks": FULL // BLOCK}
        job = msgspec.structs.replace(job, **held)
        await role.start(claim(job, gateway))
        await role.start(claim(new_job("other", [7] * 9, sequence.sampling), gateway))
        first = await step(ends, role)
        assert [chunk.sequence.request_id for chunk in first] == ["other"]
        chunks = [*first]
        while role.scheduler.running or role.scheduler.waiting:
            chunks += await step(ends, role)
            await asyncio.sleep(0.001)
        begun = next(chunk for chunk in chunks if chunk.sequence.request_id == "r")
        assert (begun.start, begun.num_tokens) == (FULL, len(PROMPT) - FULL)
        assert gateway.streams["r"] == ends.expected(sequence)
        await role.close()
