"""A chat in the terminal: `baton chat`. Thoughts are folded to one line; calls of functions ask for their results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx

from cli.chat.settings import ChatSettings
from cli.chat.turn import Turn
from cli.reach import Gateway
from common.settings import ConfigError, fail, load_settings

SHOW_THOUGHTS = "/thoughts"


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(ChatSettings, command="chat", arguments=sys.argv[1:])
        gateway = settings.gateway()
        return chat(settings, gateway, _tools(settings.tools))
    except (ConfigError, ValueError) as error:
        return fail(error)
    except httpx.HTTPError as error:
        return fail(gateway.silent(error))


def chat(settings: ChatSettings, gateway: Gateway, tools: list[Any]) -> int:
    """Read lines, stream answers, until the end of the input or an empty Ctrl-C."""
    history: list[dict[str, Any]] = [{"role": "system", "content": settings.system}] if settings.system else []
    with gateway.client(timeout_s=600) as client:
        body = _asked(settings, tools, _model(client))
        print(f"{body['model']} at {gateway.url}. Empty line or Ctrl-D leaves.", file=sys.stderr)
        turn = Turn()
        while line := _line("you> "):
            if line == SHOW_THOUGHTS:
                print(turn.thoughts.strip() or "(no thoughts)")
                continue
            history.append({"role": "user", "content": line})
            turn = _answer(client, body | {"messages": history})
            history.append(turn.as_message())
            while turn.calls:
                history += _results(turn)
                turn = _answer(client, body | {"messages": history})
                history.append(turn.as_message())
        return 0


def _asked(settings: ChatSettings, tools: list[Any], model: str) -> dict[str, Any]:
    """What every request of the chat has."""
    body: dict[str, Any] = {"model": model, "temperature": settings.temperature, "stream": True}
    if settings.max_tokens:
        body["max_tokens"] = settings.max_tokens
    if tools:
        body["tools"] = tools
    if settings.think:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return body


def _tools(path: str) -> list[Any]:
    """The functions of a file. Raises ConfigError."""
    if not path:
        return []
    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tools: {path}: {error}") from None
    if not isinstance(tools, list):
        raise ConfigError(f"tools: {path}: a list of tools is needed, as in OpenAI's `tools`")
    return tools


def _line(prompt: str) -> str:
    """What the person types; "" at the end."""
    try:
        return input(prompt if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _results(turn: Turn) -> list[dict[str, Any]]:
    """Show each call; the person says what came of it."""
    messages = []
    for _, call in sorted(turn.calls.items()):
        print(f"-> {call.name}({call.arguments})")
        content = _line(f"result of {call.name}> ")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return messages


def _model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise ConfigError(f"{client.base_url}: {_message(response.content)}")
    return str(response.json()["data"][0]["id"])


def _answer(client: httpx.Client, body: dict[str, Any]) -> Turn:
    """Stream one answer to the terminal."""
    turn = Turn()
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                print(f"({_message(response.read())})")
                return turn
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    print(f"\n({chunk['error']['message']})", end="")
                    break
                if chunk["choices"]:
                    _show(turn, chunk["choices"][0]["delta"])
    except KeyboardInterrupt:
        print(" (stopped)", end="")
        turn.calls.clear()  # half a call can't be answered
    print()
    return turn


def _show(turn: Turn, delta: dict[str, Any]) -> None:
    """Print the delta's text; before the first, that there were thoughts."""
    folded = turn.thoughts and not turn.text
    text = turn.take(delta)
    if text.strip() and folded:
        print(f"(thought {len(turn.thoughts.split())} words; {SHOW_THOUGHTS} shows them)")
        text = text.lstrip()
    print(text, end="", flush=True)


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
