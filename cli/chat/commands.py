"""Slash commands: handled by the chat, not sent to the model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from cli.chat.talk import OPTIONS, Talk, read_tools
from common.settings import ConfigError

COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)  # a path has a second slash and is no command
LEAVING = ("bye", "exit", "quit")
ON = {"on": True, "off": False}


class LeaveError(Exception):
    """The person leaves."""


class AskAgainError(Exception):
    """The last question is to be answered again."""


def is_command(line: str) -> bool:
    return COMMAND.fullmatch(line) is not None


def run(line: str, talk: Talk) -> str:
    """Run a command line; return the text to show. Raises ConfigError for a bad one, LeaveError and AskAgainError."""
    found = COMMAND.fullmatch(line)
    assert found is not None
    name, rest = found[1], (found[2] or "").strip()
    if name in LEAVING:
        raise LeaveError
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise ConfigError(f"no command /{name}" + (f" (did you mean /{near[0]}?)" if near else "; /help lists them"))
    return COMMANDS[name][0](talk, rest)


def names() -> list[str]:
    """All commands with their slashes, for completion."""
    return sorted(f"/{name}" for name in (*COMMANDS, *LEAVING) if name != "?")


def _help(talk: Talk, rest: str) -> str:
    lines = [f"  {said:<22} {what}" for name, (_, said, what) in COMMANDS.items() if name != "?"]
    lines += [
        f"  {'/bye':<22} leave; so does Ctrl-D",
        '  """                    begins and ends a text of several lines',
        "  Ctrl-C                 stops an answer",
    ]
    return "\n".join(lines)


def _system(talk: Talk, rest: str) -> str:
    if rest:
        talk.system = "" if rest == "off" else rest
    return f"system message: {talk.system or '(none)'}"


def _set(talk: Talk, rest: str) -> str:
    name, _, value = rest.partition(" ")
    if name == "system":  # as Ollama's users type it
        return _system(talk, value.strip())
    if value.strip():
        talk.option(name, value.strip())
    elif name:
        raise ConfigError(f"/set {name} VALUE, or /set {name} default")
    return "\n".join(f"  {option:<20} {talk.options.get(option, '(default)')}" for option in OPTIONS)


def _stats(talk: Talk, rest: str) -> str:
    if rest:
        talk.switches.shows_pace = switch("/stats", rest)
        return f"speed after each answer: {rest}"
    return f"last answer: {talk.last.pace() or 'none yet'}\nall: {talk.turns} answers, {talk.tokens} tokens"


def _markdown(talk: Talk, rest: str) -> str:
    if rest:
        talk.switches.draws_markdown = switch("/markdown", rest)
    return f"Markdown is {'drawn, where rich is installed' if talk.switches.draws_markdown else 'shown as it comes'}"


def _history(talk: Talk, rest: str) -> str:
    if rest:
        talk.switches.keeps_history = switch("/history", rest)
    return f"what is typed here is {'kept' if talk.switches.keeps_history else 'not kept'} for the next chat"


def _save(talk: Talk, rest: str) -> str:
    talk.save(_needed("/save", rest))
    return f"{len(talk.messages)} messages saved in {rest}"


def _load(talk: Talk, rest: str) -> str:
    talk.load(_needed("/load", rest))
    return f"{len(talk.messages)} messages from {rest}"


def _clear(talk: Talk, rest: str) -> str:
    talk.messages.clear()
    return "forgotten"


def _model(talk: Talk, rest: str) -> str:
    if rest:
        if rest not in talk.models:
            raise ConfigError(f"no model {rest!r}: {', '.join(talk.models)}")
        talk.model = rest
    return "\n".join(f"{'*' if name == talk.model else ' '} {name}" for name in talk.models)


def _tools(talk: Talk, rest: str) -> str:
    if rest:
        talk.tools = [] if rest == "off" else read_tools(rest)
    found = [tool.get("function", tool) for tool in talk.tools]
    return "\n".join(f"  {one.get('name', '?'):<20} {one.get('description', '')}" for one in found) or "no functions"


def _think(talk: Talk, rest: str) -> str:
    if rest:
        talk.think = switch("/think", rest)
    return f"thinking: {'as the model does' if talk.think is None else 'on' if talk.think else 'off'}"


def _thoughts(talk: Talk, rest: str) -> str:
    return talk.last.thoughts.strip() or "(no thoughts)"


def _retry(talk: Talk, rest: str) -> str:
    if not talk.ask_again():
        raise ConfigError("nothing was asked yet")
    raise AskAgainError


def switch(command: str, text: str) -> bool:
    """Read on or off. Raises ConfigError."""
    if text not in ON:
        raise ConfigError(f"{command} on, or {command} off")
    return ON[text]


def _needed(command: str, text: str) -> str:
    if not text:
        raise ConfigError(f"{command} FILE")
    return text


COMMANDS: dict[str, tuple[Callable[[Talk, str], str], str, str]] = {
    "help": (_help, "/help", "this list"),
    "?": (_help, "/?", "this list"),
    "system": (_system, "/system [TEXT|off]", "the system message"),
    "set": (_set, "/set [NAME VALUE]", "sampling: /set temperature 0, /set seed default"),
    "stats": (_stats, "/stats [on|off]", "speed of the last answer; a line after each"),
    "retry": (_retry, "/retry", "answer the last question again"),
    "thoughts": (_thoughts, "/thoughts", "what the model thought before its last answer"),
    "think": (_think, "/think [on|off]", "let the model think first, if it can"),
    "tools": (_tools, "/tools [FILE|off]", "functions that the model may call"),
    "markdown": (_markdown, "/markdown [on|off]", "draw Markdown"),
    "history": (_history, "/history [on|off]", "keep what is typed for the next chat"),
    "model": (_model, "/model [NAME]", "the models; choose one"),
    "save": (_save, "/save FILE", "keep the conversation"),
    "load": (_load, "/load FILE", "take one up again"),
    "clear": (_clear, "/clear", "forget what was said"),
}
