"""Workers and gateways, live in the terminal: `baton top`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Any

import httpx

from cli.top.settings import TopSettings
from cli.top.view import parse_metrics, picture, worker_row
from common.settings import ConfigError
from services.runtime.loading import fail, load_settings

TIMEOUT_S = 5.0
WRONG = {
    401: "a key is needed: --api-key, or BATON_API_KEY; the admin key where there is one",
    404: "it has no console: it may run with --no-console",
}
CLEAR, HOME, LINE_END, REST = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor


class Watch:
    """What a gateway says of the fleet."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.workers: list[dict[str, Any]] = []
        self.gateways: list[str] = []
        self.metrics: dict[str, float] = {}
        self.refused = ""  # why there are no new figures

    async def look(self) -> None:
        """Ask once. Raises ConfigError when the gateway answers otherwise than with figures."""
        try:
            state, metrics = await asyncio.gather(self._client.get("/console/state"), self._client.get("/metrics"))
        except httpx.HTTPError as error:
            self.metrics, self.refused = {}, f"no answer: {error}"
            return
        for answer in (state, metrics):
            if answer.status_code != 200:
                raise ConfigError(f"{self._client.base_url}: {WRONG.get(answer.status_code, answer.text[:200])}")
        told = state.json()
        self.workers = [worker_row(worker) for worker in told["workers"]]
        self.gateways = [gateway["id"] for gateway in told["gateways"]]
        self.metrics, self.refused = parse_metrics(metrics.text), ""


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        return asyncio.run(top(load_settings(TopSettings, command="top", arguments=sys.argv[1:])))
    except (ConfigError, ValueError) as error:
        return fail(error)
    except KeyboardInterrupt:
        return 0


async def top(settings: TopSettings) -> int:
    """Show the live view, or with --once or --json one picture. Raises ConfigError without a gateway."""
    gateway = settings.gateway(admin=True)
    verify = gateway.trusted or True
    async with httpx.AsyncClient(
        base_url=gateway.url, headers=gateway.headers, verify=verify, timeout=TIMEOUT_S
    ) as client:
        watch = Watch(client)
        await watch.look()
        if watch.refused:
            raise ConfigError(gateway.silent(watch.refused))
        if settings.once or settings.print_json or not sys.stdin.isatty() or not sys.stdout.isatty():
            print(_one(watch, settings))
        else:
            await _live(watch, settings)
    return 0


def _one(watch: Watch, settings: TopSettings) -> str:
    if settings.print_json:
        return json.dumps({"workers": watch.workers, "gateways": watch.gateways, "metrics": watch.metrics}, indent=2)
    return "\n".join(picture(watch.workers, watch.gateways, watch.metrics, columns=1_000))


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
                _draw(watch)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(redraw.wait(), settings.interval_s)
                await watch.look()
        finally:
            loop.remove_reader(sys.stdin)


def _draw(watch: Watch) -> None:
    size = shutil.get_terminal_size()
    shown = picture(watch.workers, watch.gateways, watch.metrics, columns=size.columns, refused=watch.refused)
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
