"""The grammars of one model: child processes build each of them first, with limits on time and memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from common.errors import InvalidRequestError, UnavailableError
from common.messages import MAX_GRAMMAR_CHARS, Grammar
from gateway.grammars.checker import Checker, NotCheckedError
from gateway.grammars.checks import Checks
from gateway.grammars.child import Opening, Verdict
from gateway.grammars.wanted import Wanted

CHILDREN = 2
KEPT = 256  # verdicts
MAX_FORM_BYTES = 16 * MAX_GRAMMAR_CHARS  # limit of the client's form


class GrammarMaker:
    """Starts its children when grammars come. Any number of tasks of one event loop may ask."""

    def __init__(self, tokenizer: str, *, vocab_size: int, eos_ids: Sequence[int], specials: Sequence[str]) -> None:
        """`tokenizer`: a tokenizer.json's text; `specials`: the texts of its special tokens."""
        opening = Opening(tokenizer, vocab_size, list(eos_ids), list(specials))
        self._checks = Checks([Checker(opening) for _ in range(CHILDREN)])
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # by hash of the form

    async def make(self, wanted: Wanted, tenant: str) -> Grammar:
        """Make a grammar, in the tenant's turn. Raises InvalidRequestError with the library's message, OverloadedError, or
        UnavailableError for a grammar that could not be checked, which is not cached.
        """
        verdict = await self._verdict(wanted, tenant)
        if verdict.problem:
            raise _refused(wanted, verdict.problem)
        after = None if wanted.after is None else list(wanted.after)
        return Grammar(text=verdict.text, after=after, budget=wanted.budget)

    async def _verdict(self, wanted: Wanted, tenant: str) -> Verdict:
        try:
            written = msgspec.msgpack.encode(wanted.form)
        except (OverflowError, RecursionError, UnicodeEncodeError):
            raise _refused(wanted, "has a number, a depth or half a character that no grammar has") from None
        if len(written) > MAX_FORM_BYTES:
            raise _refused(wanted, f"is too large: {len(written)} bytes, {MAX_FORM_BYTES} are allowed")
        key = hashlib.blake2b(written, digest_size=32).digest()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
            return verdict
        try:
            verdict = await self._checks.verdict(tenant, key, wanted.form)
        except NotCheckedError:
            raise UnavailableError(f"{wanted.field}: could not be checked just now: ask again") from None
        if verdict.is_lasting:
            self._verdicts[key] = verdict
            while len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)
        return verdict

    def close(self) -> None:
        """Stop the children once started checks are done."""
        self._checks.close()


def _refused(wanted: Wanted, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{wanted.field}: {why}", param=wanted.field.partition(".")[0])
