"""A script that prints the GPUs visible to CUDA's driver as JSON, name and bytes; standard library alone."""

from __future__ import annotations

import ctypes
import json

DRIVER = "libcuda.so.1"
MAX_NAME_BYTES = 256


def ask_driver() -> list[tuple[str, int]]:
    """Return the GPUs; None without a driver, or if it finds none."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_described(driver, index) for index in range(count.value)]


def _described(driver: ctypes.CDLL, index: int) -> tuple[str, int]:
    device, total, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(MAX_NAME_BYTES)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, MAX_NAME_BYTES, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    return name.value.decode(errors="replace"), total.value


if __name__ == "__main__":
    print(json.dumps(ask_driver()))
