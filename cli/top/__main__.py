"""Workers, requests, tenants and events, live in the terminal: `baton top`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import time

from cli.top.feed import Feed
from cli.top.keys import Chosen
from cli.top.settings import TopSettings
from cli.top.state import State
from cli.top.tables import worker_rows
from cli.top.terminal import draw, keys, screen
from cli.top.view import frame, painted, picture
from common.settings import ConfigError
from services.runtime.loading import fail, load_settings

SAMPLE_S = DRAW_S = 1.0
FIRST_S = 10.0  # a working gateway sends its first picture sooner
WIDE = 1_000  # columns of an unclipped picture


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        return asyncio.run(top(load_settings(TopSettings, command="top", arguments=sys.argv[1:])))
    except (ConfigError, ValueError) as error:
        return fail(error)
    except KeyboardInterrupt:
        return 0


async def top(settings: TopSettings) -> int:
    """Show the live view, or with --json, or without a terminal, one picture. Raises ConfigError without a gateway."""
    gateway, state, changed = settings.gateway(admin=True), State(), asyncio.Event()
    feed = Feed(gateway, state, changed.set)
    following = asyncio.create_task(feed.follow())
    following.add_done_callback(lambda task: changed.set())
    try:
        await _first(state, changed, following)
        if settings.print_json or not sys.stdin.isatty() or not sys.stdout.isatty():
            await _one(settings, state)
        else:
            await _live(state, following)
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConfigError):
            await following
        await feed.close()
    return 0


async def _first(state: State, changed: asyncio.Event, following: asyncio.Task[None]) -> None:
    """Wait for a complete picture. Raises ConfigError."""
    try:
        async with asyncio.timeout(FIRST_S):
            while not state.is_whole and not following.done():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        raise ConfigError(f"no data from the gateway within {FIRST_S:g} s") from None
    if following.done():
        following.result()
    state.sample(time.monotonic())


async def _one(settings: TopSettings, state: State) -> None:
    await asyncio.sleep(SAMPLE_S)  # rates need two samples
    state.sample(time.monotonic())
    if not settings.print_json:
        print("\n".join(picture(state, WIDE)))
        return
    gateways = [gateway["id"] for gateway in state.section("fleet")["gateways"]]
    told = {"workers": worker_rows(state), "gateways": gateways, "figures": state.section("figures")}
    print(
        json.dumps(
            told | {"requests": state.section("requests"), "events": state.section("log").get("log", [])}, indent=2
        )
    )


async def _live(state: State, following: asyncio.Task[None]) -> None:
    """Draw until the person leaves: every `DRAW_S`, and at once for a key. Raises ConfigError when refused meanwhile."""
    chosen, hurry = Chosen(), asyncio.Event()

    def pressed(key: str) -> None:
        chosen.key(key)
        hurry.set()

    sampling = asyncio.create_task(_sample(state))
    try:
        with screen(), keys(pressed, hurry.set):
            held: State | None = None
            while not chosen.left:
                if following.done():
                    following.result()
                hurry.clear()
                held = (held or state.copy()) if chosen.paused else None
                size = shutil.get_terminal_size()
                draw(painted(frame(held or state, chosen, size.columns, size.lines)))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(hurry.wait(), DRAW_S)
    finally:
        sampling.cancel()


async def _sample(state: State) -> None:
    while True:
        await asyncio.sleep(SAMPLE_S)
        state.sample(time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
