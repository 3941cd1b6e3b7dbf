"""System messages that a chat template refuses where they are stay there, as reminders."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from gateway.templates.template import ChatTemplate

ANYWHERE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
AT_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System first') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
ALTERNATING = (
    "{% set said = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in said %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception('Alternate') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
NOTE = "<system-reminder>\nnote\n</system-reminder>"


def said(*messages: str) -> list[dict[str, Any]]:
    return [{"role": message.split()[0], "content": message.split()[1]} for message in messages]


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(template, {}).render(messages)


@pytest.mark.parametrize("template", [AT_FIRST, ALTERNATING])
@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        (["user a", "assistant b", "user c"], "user: a\nassistant: b\nuser: c\n"),
        (["user a", "system note"], f"user: a\n\n{NOTE}\n"),
        (["user a", "system note", "user c"], f"user: a\n\n{NOTE}\n\nc\n"),
        (["user a", "assistant b", "system note", "system note"], f"user: a\nassistant: b\nuser: {NOTE}\n\n{NOTE}\n"),
        (["user a", "assistant b", "system note", "user c"], f"user: a\nassistant: b\nuser: {NOTE}\n\nc\n"),
    ],
)
def test_a_late_system_message_is_a_user_s_words_where_it_stands(
    template: str, messages: list[str], shown: str
) -> None:
    assert rendered(template, said(*messages)) == shown


def test_several_at_the_beginning_are_one() -> None:
    assert rendered(AT_FIRST, said("system a", "system b", "user c")) == "system: a\n\nb\nuser: c\n"


def test_a_template_that_takes_them_is_left_alone() -> None:
    assert rendered(ANYWHERE, said("user a", "system note", "user c")) == "user: a\nsystem: note\nuser: c\n"


def test_what_it_refuses_for_another_reason_stays_refused() -> None:
    with pytest.raises(InvalidRequestError, match="Alternate"):
        rendered(ALTERNATING, said("user a", "user b"))
    with pytest.raises(InvalidRequestError, match="Alternate"):
        rendered(ALTERNATING, said("assistant a", "system note"))
