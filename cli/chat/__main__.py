"""A chat in the terminal: `baton chat`."""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx

from cli.chat.settings import ChatSettings
from common.settings import ConfigError, fail, load_settings


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(ChatSettings, command="chat", arguments=sys.argv[1:])
        return chat(settings)
    except (ConfigError, ValueError) as error:
        return fail(error)
    except httpx.HTTPError as error:
        return fail(f"no answer from {settings.url}: {error}; is `baton up` running?")


def chat(settings: ChatSettings) -> int:
    """Read lines, stream answers, until the end of the input or an empty Ctrl-C."""
    headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    history: list[dict[str, str]] = [{"role": "system", "content": settings.system}] if settings.system else []
    with httpx.Client(base_url=settings.url, headers=headers, timeout=httpx.Timeout(600, connect=5)) as client:
        model = _model(client)
        print(f"{model} at {settings.url}. Empty line or Ctrl-D leaves.", file=sys.stderr)
        while True:
            try:
                line = input("you> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                return 0
            if not line:
                return 0
            history.append({"role": "user", "content": line})
            body = {"model": model, "messages": history, "temperature": settings.temperature, "stream": True}
            if settings.max_tokens:
                body["max_tokens"] = settings.max_tokens
            history.append({"role": "assistant", "content": _answer(client, body)})


def _model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise ConfigError(f"{client.base_url}: {_message(response.content)}")
    return str(response.json()["data"][0]["id"])


def _answer(client: httpx.Client, body: dict[str, Any]) -> str:
    pieces: list[str] = []
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                print(f"({_message(response.read())})")
                return ""
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    print(f"\n({chunk['error']['message']})", end="")
                    break
                piece = chunk["choices"][0]["delta"].get("content") or "" if chunk["choices"] else ""
                pieces.append(piece)
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    print()
    return "".join(pieces)


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
