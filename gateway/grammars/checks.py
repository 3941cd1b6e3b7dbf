"""A queue of grammar checks, in turns of their tenants: one tenant's slow grammars delay no other."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from common.errors import OverloadedError
from gateway.grammars.checker import Checker, NotCheckedError
from gateway.grammars.child import Verdict
from gateway.grammars.wanted import Form

MOST_WAITING = 32  # grammars of a tenant; more are refused


@dataclass(slots=True, eq=False)
class _Check:
    """One grammar of a tenant. Any number of its requests may wait for the verdict; None: none yet."""

    tenant: str
    form: Form
    verdict: asyncio.Future[Verdict | None]
    num_asking: int = 0


class Checks:
    """As many checks at once as there are checkers, one for each tenant. For one event loop."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        # The last one is reused: a second child starts only if two tenants ask at once.
        self._idle = list(checkers)
        self._threads = ThreadPoolExecutor(len(checkers), thread_name_prefix="grammars")
        self._lines: OrderedDict[str, OrderedDict[bytes, _Check]] = OrderedDict()  # by tenant, in order of turns
        self._running: dict[str, tuple[bytes, _Check]] = {}  # by tenant

    async def verdict(self, tenant: str, key: bytes, form: Form) -> Verdict:
        """`key` is the form's. Raises OverloadedError for a tenant with too many grammars waiting, or NotCheckedError."""
        check = self._found(tenant, key) or self._queued(tenant, key, form)
        check.num_asking += 1
        self._begin()
        try:
            verdict = await asyncio.shield(check.verdict)
        finally:
            check.num_asking -= 1
            self._forget_unasked(check, key)
        if verdict is None:
            raise NotCheckedError
        return verdict

    def close(self) -> None:
        """Stop the children once started checks are done."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for checker in self._idle:
            checker.end()

    def _found(self, tenant: str, key: bytes) -> _Check | None:
        running = self._running.get(tenant)
        if running is not None and running[0] == key:
            return running[1]
        line = self._lines.get(tenant)
        return None if line is None else line.get(key)

    def _queued(self, tenant: str, key: bytes, form: Form) -> _Check:
        line = self._lines.get(tenant)
        if line is not None and len(line) >= MOST_WAITING:
            raise OverloadedError(f"{MOST_WAITING} grammars of yours wait for their check already")
        check = _Check(tenant, form, asyncio.get_running_loop().create_future())
        self._lines.setdefault(tenant, OrderedDict())[key] = check
        return check

    def _forget_unasked(self, check: _Check, key: bytes) -> None:
        """Remove a queued check that nobody awaits any more."""
        line = self._lines.get(check.tenant, OrderedDict())
        if not check.num_asking and line.get(key) is check:
            del line[key]
            self._drop_if_empty(check.tenant)

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]

    def _begin(self) -> None:
        while self._idle:
            tenant = next((one for one in self._lines if one not in self._running), None)
            if tenant is None:
                return
            key, check = self._lines[tenant].popitem(last=False)
            self._drop_if_empty(tenant)
            self._running[tenant] = key, check
            checker = self._idle.pop()
            judging = asyncio.get_running_loop().run_in_executor(self._threads, checker.verdict, check.form)
            judging.add_done_callback(partial(self._ended, check, checker))

    def _ended(self, check: _Check, checker: Checker, judging: asyncio.Future[Verdict]) -> None:
        self._idle.append(checker)
        del self._running[check.tenant]
        if check.tenant in self._lines:
            self._lines.move_to_end(check.tenant)
        error = None if judging.cancelled() else judging.exception()
        if error is None or isinstance(error, NotCheckedError):
            check.verdict.set_result(None if error or judging.cancelled() else judging.result())
        else:
            check.verdict.set_exception(error)
        self._begin()
