"""Types of numpy arrays that parts of the engine exchange."""

from __future__ import annotations

from typing import Any

import numpy as np

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Longs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger[Any]]]
