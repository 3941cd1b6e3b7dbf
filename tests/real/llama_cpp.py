"""llama.cpp, the referee of real models: its shared library through ctypes, of one version whose hash is known.

Only what the tests ask: a file decoded to float32, tokens of a text, a chat's text, logprobs of every position. Weights, keys
and values are float32, so that nothing is rounded which Baton's float32 keeps. Structs of parameters are bytes: the callee
reads as many as it knows. The few fields that are set have known places, which `set_field` checks by their defaults.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 1  # llama.cpp's threads spin while they wait for each other
_BATCH = 128  # positions that one call computes: Gemma's logprobs of them are 0.3 GB
_CONTEXT = 1024


class _Parameters(ctypes.Structure):
    """Any struct of parameters: more bytes than it has."""

    _fields_ = [("data", ctypes.c_uint8 * 512)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class _Message(ctypes.Structure):
    _fields_ = [("role", ctypes.c_char_p), ("content", ctypes.c_char_p)]


class LlamaCpp:
    """One model in llama.cpp. `folder`: of its shared libraries."""

    def __init__(self, folder: Path, file: Path) -> None:
        """Load `file`. Raises RuntimeError where llama.cpp can't."""
        self._library = library = library_of(folder)
        self._model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp can't load {file}")
        self._vocabulary = library.llama_model_get_vocab(self._model)
        self.bos = int(library.llama_vocab_bos(self._vocabulary))
        self.vocab_size = int(library.llama_vocab_n_tokens(self._vocabulary))
        parameters = library.llama_context_default_params()
        set_field(parameters, 0, "I", 512, _CONTEXT)  # n_ctx
        set_field(parameters, 4, "I", 2048, _BATCH)  # n_batch
        set_field(parameters, 8, "I", 512, _BATCH)  # n_ubatch
        set_field(parameters, 52, "i", -1, 0)  # flash_attn_type: off
        set_field(parameters, 104, "i", 1, 0)  # type_k: F32
        set_field(parameters, 108, "i", 1, 0)  # type_v: F32
        self._context = library.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context for {file}")
        library.llama_set_n_threads(self._context, THREADS, THREADS)

    def close(self) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def tokenize(self, text: str, *, special: bool, bos: bool = False) -> list[int]:
        """The ids of a text. `special`: control tokens that are written in it are tokens; `bos`: the model's own before it."""
        data = text.encode()
        room = len(data) + 8
        ids = (ctypes.c_int32 * room)()
        found = self._library.llama_tokenize(self._vocabulary, data, len(data), ids, room, bos, special)
        assert found >= 0, (text, found)
        return list(ids[:found])

    def rendered(self, messages: Sequence[tuple[str, str]]) -> str:
        """The text of a chat, by llama.cpp's own rules for the file's template, with the beginning of an answer."""
        template = self._library.llama_model_chat_template(self._model, None)
        chat = (_Message * len(messages))(*(_Message(role.encode(), content.encode()) for role, content in messages))
        room = sum(len(content.encode()) for _, content in messages) * 2 + 4096
        written = ctypes.create_string_buffer(room)
        length = self._library.llama_chat_apply_template(template, chat, len(messages), True, written, room)
        assert 0 <= length <= room, "llama.cpp doesn't know this template"
        return written.raw[:length].decode()

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Of every next token at every position: [positions, vocabulary]."""
        library, length = self._library, len(token_ids)
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        rows = list[np.ndarray[Any, np.dtype[np.float64]]]()
        for start in range(0, length, _BATCH):
            some = token_ids[start : start + _BATCH]
            count = len(some)
            batch = Batch(
                n_tokens=count,
                token=(ctypes.c_int32 * count)(*some),
                pos=(ctypes.c_int32 * count)(*range(start, start + count)),
                logits=(ctypes.c_int8 * count)(*[1] * count),
            )
            assert library.llama_decode(self._context, batch) == 0
            logits = np.ctypeslib.as_array(library.llama_get_logits(self._context), (count, self.vocab_size))
            rows.append(_normal(logits.astype(np.float64)))
        return np.concatenate(rows)


def decoded(folder: Path, file: Path, into: Path) -> Path:
    """Write `file` with all weights as float32. Raises RuntimeError."""
    library = library_of(folder)
    parameters = library.llama_model_quantize_default_params()
    set_field(parameters, 4, "i", 7, 0)  # ftype: F32
    set_field(parameters, 16, "?", False, True)  # allow_requantize
    if library.llama_model_quantize(str(file).encode(), str(into).encode(), ctypes.byref(parameters)):
        raise RuntimeError(f"llama.cpp can't decode {file}")
    return into


def _normal(logits: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def set_field(parameters: _Parameters, at: int, form: str, default: object, value: object) -> None:
    """Write the field at this place, where the default must stand now: else the struct is another version's."""
    data = memoryview(parameters.data).cast("B")
    (found,) = struct.unpack_from(form, data, at)
    assert found == default, f"llama.cpp's parameters have {found} at {at} where this version has {default}"
    struct.pack_into(form, data, at, value)


def library_of(folder: Path) -> Any:
    """libllama with the types of what is called; a process loads it once. Its log is not shown."""
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    (ggml,) = folder.glob("libggml.v*.so")
    backends = ctypes.CDLL(str(ggml), mode=ctypes.RTLD_GLOBAL)
    (llama,) = folder.glob("libllama.v*.so")
    library = ctypes.CDLL(str(llama))
    text, pointer, number = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32
    types: dict[str, tuple[Any, list[Any]]] = {
        "llama_log_set": (None, [pointer, pointer]),
        "llama_model_default_params": (_Parameters, []),
        "llama_context_default_params": (_Parameters, []),
        "llama_model_quantize_default_params": (_Parameters, []),
        "llama_model_load_from_file": (pointer, [text, _Parameters]),
        "llama_model_quantize": (ctypes.c_uint32, [text, text, pointer]),
        "llama_model_free": (None, [pointer]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_bos": (number, [pointer]),
        "llama_vocab_n_tokens": (number, [pointer]),
        "llama_model_chat_template": (text, [pointer, text]),
        "llama_chat_apply_template": (number, [text, pointer, ctypes.c_size_t, ctypes.c_bool, text, number]),
        "llama_tokenize": (number, [pointer, text, number, pointer, number, ctypes.c_bool, ctypes.c_bool]),
        "llama_init_from_model": (pointer, [pointer, _Parameters]),
        "llama_set_n_threads": (None, [pointer, number, number]),
        "llama_free": (None, [pointer]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
        "llama_decode": (number, [pointer, Batch]),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [pointer]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    base.ggml_log_set(_SILENT, None)
    library.llama_log_set(_SILENT, None)
    if not backends.ggml_backend_reg_count():
        backends.ggml_backend_load_all_from_path(str(folder).encode())
    return library


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)
