"""System messages where a chat template refuses them, moved or rewritten for templates that allow one only at the beginning.

Agents' clients put reminders between other messages. Moved to the beginning they would change the prompt's prefix with each turn,
and no cache would find it: each stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BETWEEN = "\n\n"
Messages = Sequence[Mapping[str, Any]]


def with_reminders(messages: Messages) -> Messages:
    """Messages with one system message at most, the first: further ones there are joined to it, later ones are a user's words."""
    if not any(message["role"] == "system" for message in messages[1:]):
        return messages
    told: list[dict[str, Any]] = []
    for message in messages:
        is_system = message["role"] == "system"
        if is_system and told and told[-1]["role"] != "system":
            message, is_system = {**message, "role": "user", "content": reminder(message["content"])}, False
            is_joined = told[-1]["role"] == "user"
        else:
            is_joined = bool(told) and (is_system or _is_reminder(told[-1])) and told[-1]["role"] == message["role"]
        if is_joined:
            told[-1]["content"] += BETWEEN + message["content"]
        else:
            told.append(dict(message))
    return told


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


def _is_reminder(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "user" and message["content"].endswith("</system-reminder>"))
