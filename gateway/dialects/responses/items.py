"""Items of a conversation, as clients write them and as answers return in them.

Clients leave out what is no news here: `type` of a message, `id`, `status`. The model's template gets messages: whatever an
assistant's turn holds (reasoning, text, calls) is one of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, StrictStr, Tag, field_validator

from gateway.answers.ask import thoughts_as
from gateway.dialects.openai.messages import CalledFunction, Id, text_of
from gateway.dialects.responses.custom_input import as_arguments
from gateway.dialects.responses.sealed import COMPACTION, REASONING, unsealed
from gateway.dialects.responses.tools import full_name
from gateway.http.fields import LenientFields, StrictFields
from gateway.http.problem import Json, NotKeptError

MAX_ITEMS = 8_192
SHORTENED = "The conversation up to here was shortened to this:\n\n"
_TEMPLATE_ROLES = {"developer": "system"}
_PARTS: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
Role = Literal["system", "developer", "user", "assistant"]


@dataclass(slots=True)
class Turns:
    """Messages for the chat template, built from items in order."""

    messages: list[Json] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)  # call id -> function name

    def say(self, role: str, text: str) -> None:
        if role == "assistant":
            self._answer("content", "tool_calls")["content"] = text
        else:
            self.messages.append({"role": _TEMPLATE_ROLES.get(role, role), "content": text})

    def think(self, text: str) -> None:
        turn = self._answer("content", "tool_calls", "thinking")
        turn |= thoughts_as(text)

    def call(self, call_id: str, function: Json) -> None:
        self._names[call_id] = function["name"]
        turn = self._answer()
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def give(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        named = {"name": self._names[call_id]} if call_id in self._names else {}
        self.messages.append({"role": "tool", "content": text, "tool_call_id": call_id} | named)

    def _answer(self, *beginning: str) -> Json:
        """The assistant's turn: a new one if the present one has any of the fields in `beginning`."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in beginning):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message, with its type."""

    type: str
    text: str

    @property
    def told(self) -> Json:
        name = "refusal" if self.type == "refusal" else "text"
        more: Json = {"annotations": []} if self.type == "output_text" else {}
        return {"type": self.type, name: self.text} | more


def _parts(content: Any) -> list[Part]:
    """Raises ValueError."""
    if isinstance(content, str):
        return [Part("", content)]
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of parts")
    return [Part(part["type"], text) for part in content if (text := text_of(part))]


Parts = Annotated[list[Part], BeforeValidator(_parts)]


def joined(parts: list[Part]) -> str:
    return "".join(part.text for part in parts)


class MessageItem(LenientFields):
    """A message of any role."""

    schemas: ClassVar[dict[str, Json]] = {"content": _PARTS}

    type: Literal["message"] = "message"
    id: Id | None = None
    role: Role
    content: Parts

    def tell(self, turns: Turns) -> None:
        turns.say(self.role, joined(self.content))

    def told(self) -> Json:
        """The item as it is listed."""
        kind = "output_text" if self.role == "assistant" else "input_text"
        parts = [Part(part.type if part.type not in ("", "text") else kind, part.text).told for part in self.content]
        return {"type": self.type, "id": self.id, "role": self.role, "status": "completed", "content": parts}


class FunctionCallItem(CalledFunction):
    """A function call by the model."""

    type: Literal["function_call"]
    id: Id | None = None
    call_id: Id
    namespace: StrictStr | None = None

    def tell(self, turns: Turns) -> None:
        named = {"name": full_name(self.name, self.namespace)}
        turns.call(self.call_id, self.as_template_input() | named)

    def told(self) -> Json:
        arguments = json.dumps(self.arguments or {}, ensure_ascii=False)
        return _told(self, name=self.name, arguments=arguments) | _within(self.namespace)


class CustomCallItem(LenientFields):
    """A call with a text input."""

    type: Literal["custom_tool_call"]
    id: Id | None = None
    call_id: Id
    name: StrictStr
    namespace: StrictStr | None = None
    input: StrictStr

    def tell(self, turns: Turns) -> None:
        turns.call(self.call_id, {"name": full_name(self.name, self.namespace), "arguments": as_arguments(self.input)})

    def told(self) -> Json:
        return _told(self, name=self.name, input=self.input) | _within(self.namespace)


class OutputItem(LenientFields):
    """The output of a call."""

    schemas: ClassVar[dict[str, Json]] = {"output": _PARTS}

    type: Literal["function_call_output", "custom_tool_call_output"]
    id: Id | None = None
    call_id: Id
    output: Parts

    def tell(self, turns: Turns) -> None:
        turns.give(self.call_id, joined(self.output))

    def told(self) -> Json:
        return _told(self, output=joined(self.output))


class ReasoningItem(LenientFields):
    """The model's reasoning: sealed, or in plain text."""

    type: Literal["reasoning"]
    id: Id | None = None
    summary: list[Any] = Field(default_factory=list)
    content: list[Any] | None = None
    encrypted_content: StrictStr | None = None

    @field_validator("encrypted_content")
    @classmethod
    def _ours(cls, content: str | None) -> str | None:
        if content is not None:
            unsealed(REASONING, content)
        return content

    def tell(self, turns: Turns) -> None:
        if text := self.text:
            turns.think(text)

    @property
    def text(self) -> str:
        if self.encrypted_content is not None:
            return unsealed(REASONING, self.encrypted_content)
        shown = self.content or self.summary
        return "\n".join(part["text"] for part in shown if isinstance(part, dict) and isinstance(part.get("text"), str))

    def told(self) -> Json:
        item: Json = {"type": self.type, "id": self.id, "summary": self.summary, "content": self.content or []}
        return item | ({} if self.encrypted_content is None else {"encrypted_content": self.encrypted_content})


class CompactionItem(LenientFields):
    """A compacted conversation."""

    type: Literal["compaction"]
    id: Id | None = None
    encrypted_content: StrictStr

    @field_validator("encrypted_content")
    @classmethod
    def _ours(cls, content: str) -> str:
        unsealed(COMPACTION, content)
        return content

    def tell(self, turns: Turns) -> None:
        turns.say("user", SHORTENED + unsealed(COMPACTION, self.encrypted_content))

    def told(self) -> Json:
        return {"type": self.type, "id": self.id, "encrypted_content": self.encrypted_content}


class CompactionTrigger(LenientFields):
    """A request to compact the conversation, instead of an answer."""

    type: Literal["compaction_trigger"]
    id: Id | None = None

    def tell(self, turns: Turns) -> None:
        """No-op: not part of the conversation."""

    def told(self) -> Json:
        return {"type": self.type, "id": self.id}


def no_item(item_id: str) -> NotKeptError:
    return NotKeptError(f"input: no item {item_id[:100]!r} is kept here: send the item itself", param="input")


class ItemReference(LenientFields):
    """A reference to a stored item, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: Id

    def tell(self, turns: Turns) -> None:
        raise no_item(self.id)

    def told(self) -> Json:
        return {"type": self.type, "id": self.id}


def _told(item: FunctionCallItem | CustomCallItem | OutputItem, **fields: Any) -> Json:
    return {"type": item.type, "id": item.id, "status": "completed", "call_id": item.call_id, **fields}


def _within(namespace: str | None) -> Json:
    return {} if namespace is None else {"namespace": namespace}


KINDS = (
    "message", "function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output", "reasoning",
    "compaction", "compaction_trigger", "item_reference",
)  # fmt: skip


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None:
        return "item_reference" if "role" not in item and "id" in item else "message"
    return "function_call_output" if kind == "custom_tool_call_output" else str(kind)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[CompactionTrigger, Tag("compaction_trigger")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
]


def checked_items(given: Any) -> Any:
    """`input` as a list of items of known types. Raises ValueError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ValueError("must be a text or a list of items")
    if len(given) > MAX_ITEMS:
        raise ValueError(f"at most {MAX_ITEMS} items are allowed")
    for index, item in enumerate(given):
        if isinstance(item, LenientFields):
            continue  # one of ours
        if not isinstance(item, dict):
            raise ValueError(f"item {index} must be an object")
        kind = item.get("type")
        if kind is not None and kind not in KINDS:
            raise ValueError(f"item {index}: items of type {str(kind)[:64]!r} are not served: leave it out")
    return given


class KeptItems(StrictFields):
    """Items as a store returns them."""

    input: list[Item]
