"""The bind address of a UCX listener: the binding can neither report nor choose it, and listens on all of them.

So a filter on the socket lets the kernel drop what is for another address.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address

SO_ATTACH_FILTER = 26  # linux/socket.h
LOAD_BYTE, LOAD_WORD, SHIFT_RIGHT, IF_EQUAL, RETURN = 0x30, 0x20, 0x74, 0x15, 0x06  # linux/bpf_common.h
NETWORK_HEADER = 0x100000000 - 0x100000  # SKF_NET_OFF
DESTINATION = {4: 16, 6: 24}  # offset of the destination in the header, by IP version
PASS = 0xFFFFFFFF

Address = IPv4Address | IPv6Address


def own_address(host: str) -> Address | None:
    """The local address that `host` resolves to; None if it is another machine's, or none."""
    with contextlib.suppress(OSError, ValueError):
        for family, _, _, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
                trial.bind(where)
                found = ip_address(str(where[0]).partition("%")[0])
                return None if found.is_unspecified else found
    return None


def hear_only(port: int, address: Address) -> bool:
    """Restrict this process's listeners on `port` to `address`; return True on success."""
    found = list(_listeners(port))
    try:
        for listener in found:
            _attach(listener, address)
    except OSError:
        return False
    finally:
        for listener in found:
            listener.close()
    return bool(found)


def _listeners(port: int) -> Iterator[socket.socket]:
    """This process's listening sockets, duplicated."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not a socket
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
            if _listens(copy, port):
                yield copy
            else:
                copy.close()


def _listens(one: socket.socket, port: int) -> bool:
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return False
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and one.getsockname()[1] == port


def _attach(listener: socket.socket, address: Address) -> None:
    program = b"".join(struct.pack("<HBBI", *step) for step in _program(address))
    steps = ctypes.create_string_buffer(program, len(program))
    listener.setsockopt(
        socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(program) // 8, ctypes.addressof(steps))
    )


def _program(address: Address) -> list[tuple[int, int, int, int]]:
    """A BPF program (code, jump if true, jump if false, value) that passes packets to the address and drops others."""
    words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
    tests = [(LOAD_BYTE, NETWORK_HEADER), (SHIFT_RIGHT, 4), (IF_EQUAL, address.version)]
    for index, word in enumerate(words):
        tests += [(LOAD_WORD, NETWORK_HEADER + DESTINATION[address.version] + 4 * index), (IF_EQUAL, word)]
    last = len(tests) + 1  # the step that drops
    steps = [(code, 0, last - at - 1 if code == IF_EQUAL else 0, value) for at, (code, value) in enumerate(tests)]
    return [*steps, (RETURN, 0, 0, PASS), (RETURN, 0, 0, 0)]
