"""The nursery of `baton up`: a process that imports once what CPU workers need, and is forked for each.

They share its memory until they write to it: what was imported and, where there are several, the weights. It has one thread
and opens nothing: no loop, no socket but the one on its standard input, no pool of threads, no device. So a fork has all that
there was.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

import msgspec

from services.nursery.birth import MAX_BYTES, REFUSED, Birth
from services.runtime.linux import be_called, die_with_parent
from services.runtime.memory import importing, keep_what_is_loaded

GO = b"1"
ALONE_S = 5.0
OF_GPUS = ("cuda.bindings", "pynvml")  # modules that torch probes for


def main() -> int:
    """Import; then answer each `Birth` on standard input with a new process, until the input ends."""
    caller = os.getppid()
    # A garbage collection in a worker would write to every object it visits, and unshare its page.
    with importing(*OF_GPUS):
        from engine.processor import settle
        from services.worker.judging import said
        from services.worker.process import build_lender
        from services.worker.process import main as work
    settle()
    link, lenders, suits = socket.socket(fileno=os.dup(0)), {}, set[str]()
    while asked := link.recv(MAX_BYTES):
        birth = msgspec.json.decode(asked, type=Birth)
        model = birth.variables.get("BATON_MODEL", "")
        if model not in suits and (why := said(birth.variables)):
            link.send(REFUSED + why.encode()[: MAX_BYTES - len(REFUSED)])
            continue
        suits.add(model)
        if birth.has_twins and model not in lenders:
            lenders[model] = build_lender(birth.service, birth.variables)
            keep_what_is_loaded()
        if not is_alone():
            return 1
        if forked(caller, link):
            try:
                begin(birth)
            except OSError:
                link.send(b"")  # as the nursery does when it exits
                raise
            link.send(str(os.getpid()).encode())
            link.close()
            return work(birth.service, lenders.get(model))
    return 0


def is_alone() -> bool:
    """True if no other thread runs; loading threads may need a moment to exit."""
    give_up_at = time.monotonic() + ALONE_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.001)
    return True


def forked(caller: int, link: socket.socket) -> bool:
    """Fork; return True in the new process. It is a child of the caller, as if started by it, and dies with it.

    A process between the two ends at once, so that the caller gets the orphan: see `services.runtime.linux.adopt_orphans`.
    The caller is told its pid first, so that it notices an early death; nothing if there is no memory for another process.
    """
    told, tell = os.pipe()
    born, bear = os.pipe()
    between = os.fork()
    if between:
        os.close(told)
        os.close(bear)
        pid = os.read(born, MAX_BYTES)
        os.close(born)
        os.waitpid(between, 0)
        link.send(pid)
        with contextlib.suppress(BrokenPipeError):  # the child is dead already
            os.write(tell, GO)
        os.close(tell)
        return False
    is_new = False
    try:
        os.close(tell)
        pid_of_new = os.fork()
        is_new = pid_of_new == 0
        if not is_new:
            os.write(bear, str(pid_of_new).encode())
    finally:
        if not is_new:
            os._exit(0)
    os.close(born)
    os.close(bear)
    went_on = os.read(told, len(GO)) == GO  # otherwise the nursery was stopped meanwhile
    os.close(told)
    die_with_parent()
    if not went_on or os.getppid() != caller:
        os._exit(1)
    return True


def begin(birth: Birth) -> None:
    """Set up this process as if it had been started by itself: session, log, variables, name."""
    os.setsid()
    log = os.open(birth.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(log, os.pread(2, MAX_BYTES, 0))  # output of the imports
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    os.close(nothing)
    os.close(log)
    os.environ.update(birth.variables)
    sys.argv = sys.argv[:1]
    be_called([*sys.orig_argv[:1], "-m", f"services.{birth.service}"])


if __name__ == "__main__":
    sys.exit(main())
