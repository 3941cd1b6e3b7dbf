"""Triton's interpreter forgets the carry when it rounds to 8-bit floats: 127 becomes 64. Here torch rounds for it, as GPUs do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch


@contextmanager
def rounds_as_a_gpu() -> Iterator[None]:
    """Within, the interpreter's conversions to e4m3 are right."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(target) != "fp8e4nv":
            return convert(data, source, target, rounding)
        wide = convert(data, source, _float32(), rounding).view(np.float32) if str(source) != "fp32" else data
        values = torch.from_numpy(np.ascontiguousarray(wide, dtype=np.float32))
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(data.shape)

    with mock.patch.object(interpreter, "_convert_float", converted):
        yield


def _float32() -> Any:
    import triton.language as tl

    return tl.float32
