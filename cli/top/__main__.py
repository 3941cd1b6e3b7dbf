"""Workers and gateways, live in the terminal: `baton top`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

import httpx

from cli.top.settings import TopSettings
from cli.top.view import parse_metrics, picture, worker_row
from common import subjects
from common.bus import Bus, connect_bus
from common.errors import UnavailableError
from common.messages import GatewayState, gateway_state_decoder
from common.peers import Peers
from common.settings import ConfigError, fail, load_settings

LISTEN_S = 1.5  # gateways beat every second, so all were heard by then
GATEWAY_SILENT_S = 5.0
CONNECT_S = 5.0
WRONG_KEY = "a key is needed: --api-key, or BATON_API_KEY; the admin key where there is one"
CLEAR, HOME, LINE_END, REST = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor


class Watch:
    """What is heard on the bus, and a gateway's metrics."""

    def __init__(self, settings: TopSettings) -> None:
        self._url = settings.url.rstrip("/")
        self._headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self.refused = ""  # why the gateway gives no metrics
        self.peers = Peers()
        self._gateways: dict[str, float] = {}

    async def start(self, bus: Bus) -> None:
        await self.peers.start(bus)
        await bus.subscribe(subjects.ALL_GATEWAY_HEARTBEATS, gateway_state_decoder, self._saw_gateway)

    def workers(self) -> list[dict[str, Any]]:
        contested = self.peers.contested
        return [worker_row(state, contested=name in contested) for name, state in sorted(self.peers.states.items())]

    def gateways(self) -> list[str]:
        """Names of the gateways heard lately."""
        now = time.monotonic()
        return sorted(name for name, at in self._gateways.items() if now - at < GATEWAY_SILENT_S)

    async def metrics(self) -> dict[str, float] | None:
        """The gateway's figures: None without --url, empty when it does not answer."""
        if not self._url:
            return None
        try:
            async with httpx.AsyncClient(timeout=1.0, headers=self._headers) as client:
                answer = await client.get(f"{self._url}/metrics")
        except httpx.HTTPError:
            self.refused = "no answer"
            return {}
        self.refused = WRONG_KEY if answer.status_code == 401 else f"status {answer.status_code}"
        return parse_metrics(answer.text) if answer.status_code == 200 else {}

    def _saw_gateway(self, state: GatewayState) -> None:
        self._gateways[state.gateway] = time.monotonic()


def main() -> int:
    """Entry point; returns the exit code."""
    logging.basicConfig(level=logging.CRITICAL)  # log lines would tear the picture
    try:
        return asyncio.run(top(load_settings(TopSettings, command="top", arguments=sys.argv[1:])))
    except (ConfigError, UnavailableError, ValueError) as error:
        return fail(error)
    except KeyboardInterrupt:
        return 0


async def top(settings: TopSettings) -> int:
    """Show the live view, or with --once or --json one picture. Raises UnavailableError without NATS."""
    nats = dataclasses.replace(settings.nats(), connect_timeout_s=CONNECT_S)
    async with connect_bus(nats, name="top", owns_streams=False) as bus:
        watch = Watch(settings)
        await watch.start(bus)
        try:
            if settings.once or settings.print_json or not sys.stdin.isatty() or not sys.stdout.isatty():
                await asyncio.sleep(LISTEN_S)
                print(await _one(watch, settings))
            else:
                await _live(watch, settings)
        finally:
            await watch.peers.close()
    return 0


async def _one(watch: Watch, settings: TopSettings) -> str:
    metrics = await watch.metrics()
    if settings.print_json:
        return json.dumps({"workers": watch.workers(), "gateways": watch.gateways(), "metrics": metrics}, indent=2)
    return "\n".join(picture(watch.workers(), watch.gateways(), metrics, columns=1_000, refused=watch.refused))


async def _live(watch: Watch, settings: TopSettings) -> None:
    """Draw until q or Ctrl-C; at once when the window's size changes."""
    loop = asyncio.get_running_loop()
    done, redraw = asyncio.Event(), asyncio.Event()

    def ended() -> None:
        done.set()
        redraw.set()

    loop.add_signal_handler(signal.SIGINT, ended)
    loop.add_signal_handler(signal.SIGTERM, ended)
    loop.add_signal_handler(signal.SIGWINCH, redraw.set)
    with _screen():
        loop.add_reader(sys.stdin, lambda: ended() if sys.stdin.read(1) in ("q", "Q", "") else None)
        try:
            while not done.is_set():
                redraw.clear()
                _draw(watch, await watch.metrics())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(redraw.wait(), settings.interval_s)
        finally:
            loop.remove_reader(sys.stdin)


def _draw(watch: Watch, metrics: dict[str, float] | None) -> None:
    size = shutil.get_terminal_size()
    shown = picture(watch.workers(), watch.gateways(), metrics, columns=size.columns, refused=watch.refused)
    lines = [*shown[: size.lines - 2], "", "q ends"]
    sys.stdout.write(HOME + f"{LINE_END}\r\n".join(lines[: size.lines]) + LINE_END + REST)
    sys.stdout.flush()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The alternate screen with keys read one by one; restores the terminal."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    sys.stdout.write(ENTER + CLEAR)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write(LEAVE)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
