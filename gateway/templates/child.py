"""The child process for templates not known to be cheap: `python -m gateway.templates.child`.

It reads frames from stdin and writes one to stdout for each. It ends with its gateway, or by SIGPROF after too much processor
time.
"""

from __future__ import annotations

import json
import sys

import msgspec

from common.errors import InvalidRequestError
from gateway.children.frames import bound_memory, processor_time, read_frame, write_frame
from gateway.templates.apart import Conversation, Opening, Rendered
from gateway.templates.shade import Shade
from gateway.templates.template import ChatTemplate, TooLongError

MEMORY_BYTES = 512 << 20  # limit of a conversation


def main() -> None:
    asked, told = sys.stdin.buffer, sys.stdout.buffer
    opening = msgspec.msgpack.decode(read_frame(asked), type=Opening)
    template = ChatTemplate(
        opening.source, opening.special_tokens, opening.tool_source, Shade(opening.literals), name=opening.name
    )
    write_frame(told, Rendered())
    bound_memory(MEMORY_BYTES)
    while raw := read_frame(asked):
        with processor_time(opening.most_s):
            rendered = _rendered(template, raw, opening.name)
        write_frame(told, rendered)


def _rendered(template: ChatTemplate, raw: bytes, name: str) -> Rendered:
    try:
        conversation = msgspec.msgpack.decode(raw, type=Conversation)
        options = json.loads(conversation.options)
        text = template.shaded_here(json.loads(conversation.messages), **options)
        return Rendered(raw=text.encode("utf-8", "surrogatepass"))
    except TooLongError as error:
        return Rendered(problem=error.what, is_too_long=True)
    except InvalidRequestError as error:
        return Rendered(problem=error.message, param=error.param)
    except MemoryError:
        where = f" ({name})" if name else ""
        return Rendered(problem=f"messages: the chat template{where} took too much memory for them", param="messages")


if __name__ == "__main__":
    main()
