"""A chat in the terminal: `baton chat`. Thoughts are folded to one line; tool calls ask for their results."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

import httpx

from cli.chat.commands import AskAgainError, LeaveError, is_command, names, run, switch
from cli.chat.screen import Screen, screen
from cli.chat.settings import ChatSettings
from cli.chat.talk import Talk, read_tools
from cli.chat.turn import Turn
from cli.chat.typed import HISTORY, Typed, editing
from cli.reach import Gateway
from cli.said import message_of
from common.settings import ConfigError
from services.runtime.loading import fail, load_settings

ANSWER_S = 600.0  # longest silence
TEMPERATURE = "0.7"
NEXT_NAME = re.compile(r",(?=\s*\w+\s*=|$)")  # other commas belong to a system message


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(ChatSettings, command="chat", arguments=sys.argv[1:])
        gateway = settings.gateway()
        return chat(settings, gateway)
    except (ConfigError, ValueError) as error:
        return fail(error)
    except httpx.HTTPError as error:
        return fail(gateway.silent(error))


def chat(settings: ChatSettings, gateway: Gateway) -> int:
    """Read texts, run commands and stream answers, until the end of the input or `/bye`."""
    with gateway.client(timeout_s=ANSWER_S) as client:
        talk = talk_of(settings, _models(client))
        typed, shown = Typed(), screen()
        print(f"{talk.model} at {gateway.url}. /help says what there is, Ctrl-D leaves.", file=sys.stderr)
        if not typed.is_terminal:
            converse(client, talk, typed, shown)
            return 0
        with editing(names(), HISTORY, keeps=lambda: talk.switches.keeps_history):
            converse(client, talk, typed, shown)
        return 0


def talk_of(settings: ChatSettings, models: Mapping[str, Collection[str]]) -> Talk:
    """A new conversation. `models`: names, and each one's capabilities. Raises ConfigError."""
    talkers = [name for name, able in models.items() if "chat" in able]
    model = settings.served_model_name or next(iter(talkers or models))
    able = models.get(model, ("chat",))
    if "completion" in able and "chat" not in able:
        raise ConfigError(f"{model} has no chat template: it continues text, at /v1/completions, and can't chat")
    if "chat" not in able:
        raise ConfigError(f"{model} makes no text, and can't chat: it has {', '.join(able) or 'no capability'}")
    talk = Talk(model=model, models=talkers, system=settings.system)
    talk.option("temperature", TEMPERATURE)
    for pair in filter(None, NEXT_NAME.split(settings.set)):
        name, _, value = map(str.strip, pair.partition("="))
        if not value:
            raise ConfigError(f"--set {pair}: NAME=VALUE")
        if name == "think":
            talk.think = switch("--set think=", value)
        elif name == "system":
            talk.system = value
        else:
            talk.option(name, value)
    if settings.tools:
        talk.tools = read_tools(settings.tools)
    return talk


def converse(client: httpx.Client, talk: Talk, typed: Typed, shown: Screen) -> None:
    """Run the dialogue until the person leaves."""
    while True:
        try:
            text = typed.read()
            if is_command(text):
                shown.note(run(text, talk))
                continue
            if not text:
                continue
            talk.messages.append({"role": "user", "content": text})
        except (EOFError, LeaveError):
            return
        except KeyboardInterrupt:
            if not typed.is_terminal:
                return
            shown.note("\n(Ctrl-D or /bye leaves)")
            continue
        except ConfigError as error:
            shown.note(f"({error})")
            continue
        except AskAgainError:
            pass
        shown.draws = talk.switches.draws_markdown
        answer(client, talk, typed, shown)


def answer(client: httpx.Client, talk: Talk, typed: Typed, shown: Screen) -> None:
    """Stream an answer, and further ones while the model calls functions whose results the person types."""
    while True:
        turn = stream(client, talk.body(), shown)
        talk.heard(turn)
        if talk.switches.shows_pace and shown.is_terminal and (pace := turn.pace()):
            shown.note(pace)
        if not turn.calls:
            return
        try:
            talk.messages += _results(turn, typed, shown)
        except (EOFError, KeyboardInterrupt):  # a call without its result can't be part of the next request
            talk.take_back()
            return


def stream(client: httpx.Client, body: dict[str, Any], shown: Screen) -> Turn:
    """Stream one answer. Ctrl-C stops it and keeps the text so far."""
    turn = Turn(asked_at=time.monotonic())
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                turn.error = message_of(response.read())
            else:
                _read(response, turn, shown)
    except KeyboardInterrupt:
        turn.error = "stopped"
        turn.calls.clear()  # a partial call can't be answered
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        turn.error = f"the answer broke off: {error or type(error).__name__}"
        turn.calls.clear()
    if turn.thoughts and not turn.text:
        shown.unfold()
        shown.note(f"(thought {len(turn.thoughts.split())} words and said nothing; /thoughts shows them)")
    elif turn.text:
        shown.end()
    if turn.error:
        shown.note(f"({turn.error})")
    return turn


def _read(response: httpx.Response, turn: Turn, shown: Screen) -> None:
    for line in response.iter_lines():
        if not line.startswith("data:") or line == "data: [DONE]":
            continue
        is_folded = bool(turn.thoughts) and not turn.text
        show(turn, turn.chunk(json.loads(line.removeprefix("data:")), time.monotonic()), shown, is_folded=is_folded)
        if turn.error:
            return


def show(turn: Turn, text: str, shown: Screen, *, is_folded: bool) -> None:
    """Show a chunk's text; before the first, a note about thoughts."""
    if turn.thoughts and not turn.text:
        shown.fold(len(turn.thoughts.split()))
        return
    if text.strip() and is_folded:
        shown.unfold()
        shown.note(f"(thought {len(turn.thoughts.split())} words; /thoughts shows them)")
        text = text.lstrip()
    if text:
        shown.text(text)


def _results(turn: Turn, typed: Typed, shown: Screen) -> list[dict[str, Any]]:
    """Show each call and read its result. Raises EOFError and KeyboardInterrupt."""
    messages = []
    for _, call in sorted(turn.calls.items()):
        shown.note(f"-> {call.name}({call.arguments})")
        content = typed.read(f"result of {call.name}> ")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return messages


def _models(client: httpx.Client) -> dict[str, Collection[str]]:
    """Models, and each one's capabilities; servers that don't say are assumed to chat."""
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise ConfigError(f"{client.base_url}: {message_of(response.content)}")
    found = {str(model["id"]): model.get("capabilities", ("chat",)) for model in response.json()["data"]}
    if not found:
        raise ConfigError(f"{client.base_url} lists no model")
    return found


if __name__ == "__main__":
    sys.exit(main())
