"""CUDA driver calls that torch lacks: sharing an allocation with another process of this host."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_PORTABLE, _ON_DEVICE = 1, 2
# Flags: a stream waits for at least a number, and writes behind a fence.
_REACHED, _BEHIND_ALL = 0, 0


class CudaDriverError(Exception):
    """A call failed; the message names it and the driver's reason."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The means to map an address in another process: the allocation's IPC handle and the offset in it."""

    handle: bytes
    offset: int


def share(address: int) -> SharedMemory:
    """Return the handle of the allocation around `address`. Raises CudaDriverError, also for memory that can't be shared."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return SharedMemory(handle=bytes(memoryview(handle)), offset=address - base.value)


def open_shared(memory: SharedMemory) -> int:
    """Map another process's allocation for the current device; return the address shared."""
    if len(memory.handle) != HANDLE_BYTES:
        raise CudaDriverError(f"a handle has {HANDLE_BYTES} bytes, not {len(memory.handle)}")
    base, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(memory.handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
    return base.value + memory.offset


def close_shared(address: int, memory: SharedMemory) -> None:
    """Unmap an address that `open_shared` returned."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address - memory.offset))


def use_device(index: int) -> None:
    """Make a device's context the calling thread's; the driver's calls need one."""
    _call("cuCtxSetCurrent", _primary_context(index))


@lru_cache(maxsize=16)
def _primary_context(index: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(index))
    return context


def launch_graph(graph: int, stream: int) -> None:
    """Launch an instantiated CUDA graph on a stream of this thread's device."""
    _call("cuGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))


def pin(address: int, num_bytes: int) -> int:
    """Pin memory of the host that every context reaches; return where the current device has it."""
    found = ctypes.c_uint64()
    pointer, flags = ctypes.c_void_p(address), ctypes.c_uint(_PORTABLE | _ON_DEVICE)
    _call("cuMemHostRegister_v2", pointer, ctypes.c_size_t(num_bytes), flags)
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), pointer, ctypes.c_uint(0))
    return found.value


def unpin(address: int) -> None:
    """Undo `pin`, before the memory is unmapped: what is mapped there next could not be pinned."""
    _call("cuMemHostUnregister", ctypes.c_void_p(address))


def wait_for_word(stream: int, address: int, number: int) -> None:
    """Have a stream wait until the 32 bits at a device's address are `number`, or up to 2**31 - 1 further on."""
    _of_word("cuStreamWaitValue32_v2", stream, address, number, _REACHED)


def write_word(stream: int, address: int, number: int) -> None:
    """Have a stream write 32 bits at a device's address, behind everything that it did before."""
    _of_word("cuStreamWriteValue32_v2", stream, address, number, _BEHIND_ALL)


def _of_word(name: str, stream: int, address: int, number: int, flags: int) -> None:
    _call(name, ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(number), ctypes.c_uint(flags))


def _call(name: str, *arguments: object) -> None:
    result = getattr(_library(), name)(*arguments)
    if result != 0:
        text = ctypes.c_char_p()
        _library().cuGetErrorName(result, ctypes.byref(text))
        raise CudaDriverError(f"{name}: {(text.value or b'error').decode()} ({result})")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaDriverError(f"no CUDA driver: {error}") from None
