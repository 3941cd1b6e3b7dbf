"""The child process that builds grammars to check them: `python -m gateway.grammars.child`.

It reads frames from stdin and writes one to stdout for each. It ends with its gateway, or of a grammar
that takes too much memory (SIGABRT) or processor time (SIGPROF).
"""

from __future__ import annotations

import sys

import msgspec
from llguidance import LLTokenizer

from gateway.children.frames import bound_memory, processor_time, read_frame, write_frame
from gateway.grammars.forms import check, text_of
from gateway.grammars.wanted import Form

MEMORY_BYTES = 256 << 20  # memory limit of a grammar
LONGEST_CPU_S = 5.0  # processor time of a grammar; pauses don't count


class Opening(msgspec.Struct, frozen=True):
    """The first frame: the tokenizer and limits. Answered by a `Verdict` on the tokenizer."""

    tokenizer: str  # a tokenizer.json's text
    vocab_size: int
    eos_ids: list[int]
    specials: list[str]
    cpu_s: float = LONGEST_CPU_S  # a grammar may use


class Question(msgspec.Struct, frozen=True):
    form: Form


class Verdict(msgspec.Struct, frozen=True):
    """llguidance's text, or the reason against it."""

    text: str = ""
    problem: str = ""
    is_lasting: bool = True  # the library would repeat it


def main() -> None:
    asked, told = sys.stdin.buffer, sys.stdout.buffer
    opening = msgspec.msgpack.decode(read_frame(asked), type=Opening)
    try:
        tokenizer = LLTokenizer(opening.tokenizer, n_vocab=opening.vocab_size, eos_token=opening.eos_ids or None)
    except Exception as error:  # the library has no narrower exception
        write_frame(told, Verdict(problem=f"no grammar can be made for this model's tokenizer: {error}"))
        return
    write_frame(told, Verdict())
    specials = frozenset(opening.specials)
    bound_memory(MEMORY_BYTES)
    while raw := read_frame(asked):
        form = msgspec.msgpack.decode(raw, type=Question).form
        with processor_time(opening.cpu_s):
            verdict = _verdict(form, tokenizer, specials)
        write_frame(told, verdict)


def _verdict(form: Form, tokenizer: LLTokenizer, specials: frozenset[str]) -> Verdict:
    try:
        text = text_of(form, specials)
        if text:
            check(text, tokenizer)
    except (ValueError, TypeError) as error:
        return Verdict(problem=str(error))
    except (RecursionError, MemoryError):
        return Verdict(problem="is too deep or too large")
    return Verdict(text=text)


if __name__ == "__main__":
    main()
