"""Answers of a model without servers: `from baton import LLM`. The engine runs in a process of its own.

    llm = LLM("Qwen/Qwen3-0.6B")
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
        print(output.outputs[0].text)

Needs the standard library alone; names and values of parameters are vLLM's, as the HTTP API takes them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

__all__ = ["LLM", "BatonError", "Completion", "Pooled", "PoolingOutput", "RequestOutput", "SamplingParams"]

Output = TypeVar("Output")

FOLDER = Path(__file__).resolve().parent
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, SCORE, CLASSIFY = "/v1/embeddings", "/score", "/classify"
MAX_TOKENS = 16  # vLLM's default
TEXTS, MESSAGES = "a text, its token ids, or a list of such", "a list of messages, or a list of such"
END_S = 10.0  # for the engine's process to end when told, before it is killed


class BatonError(Exception):
    """The model could not be loaded, or a request was refused. The message says why."""


class SamplingParams(dict[str, Any]):
    """Parameters of a request, as `SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)`.

    All fields of the HTTP API are taken: `n`, `stop`, `seed`, `min_p`, `logprobs`, `response_format`, `guided_regex`, …
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str
    logprobs: Any = None
    message: Mapping[str, Any] = field(default_factory=dict)  # of a chat: content, reasoning, tool calls


@dataclass(frozen=True)
class RequestOutput:
    """A prompt's answers."""

    request_id: str
    prompt: Any
    outputs: Sequence[Completion]
    usage: Mapping[str, Any]


@dataclass(frozen=True)
class Pooled:
    """A vector, a score, or the shares of labels: what was asked for."""

    embedding: Sequence[float] = ()
    score: float = 0.0
    probs: Sequence[float] = ()
    label: str = ""


@dataclass(frozen=True)
class PoolingOutput:
    """One text's answer by a model of vectors or scores."""

    prompt: Any
    outputs: Pooled
    usage: Mapping[str, Any]


class LLM:
    """A loaded model. Options are those of `baton worker`, as keywords: `max_model_len=8192`, `device="cuda"`.

    Raises BatonError. Close it, or use it as a context manager; the process that computes ends with this one in any case.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        paths = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.offline", f"--model={os.fspath(model)}", *arguments],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        told = self._read()
        if told is None or "ready" not in told:
            self.close()
            raise BatonError((told or {}).get("error") or "the engine's process ended; it said why above")
        self.model = str(told["ready"]["model"])
        self.max_model_len = int(told["ready"]["max_model_len"])
        self._max_line = int(told["ready"]["max_line"])
        self._next_id = 0
        self._lock = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    def close(self) -> None:
        """End the engine's process."""
        process = self._process
        process.terminate()  # before its pipes: a thread that still writes to it holds one of them
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text or token ids; answers are in the prompts' order. Raises BatonError."""
        several = _several("prompts", prompts, TEXTS, int)
        asked = [{"prompt": prompt} for prompt in several]
        return self._answers(COMPLETIONS, asked, several, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, by the model's chat template. Raises BatonError.

        `template`: `tools`, `chat_template_kwargs`, `continue_final_message` and the like.
        """
        several = _several("messages", messages, MESSAGES, Mapping)
        asked = [{"messages": one} | template for one in several]
        return self._answers(CHAT, asked, several, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        use_tqdm: bool = True,
        **fields: Any,
    ) -> list[PoolingOutput]:
        """The vector of each text, by a model of embeddings: `outputs.embedding`. Raises BatonError.

        `fields`: `dimensions`, `prompt_name`, `truncate_prompt_tokens`.
        """
        several = _several("prompts", prompts, TEXTS, int)
        bodies = [{"model": self.model, "input": one, **fields} for one in several]
        return self._pooled(EMBEDDINGS, bodies, several, use_tqdm)

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], *, use_tqdm: bool = True, **fields: Any
    ) -> list[PoolingOutput]:
        """The score of each pair; one query is compared with all documents: `outputs.score`. Raises BatonError."""
        right = [documents] if isinstance(documents, str) else list(documents)
        left = [queries] * len(right) if isinstance(queries, str) else list(queries)
        if len(left) != len(right):
            raise BatonError(f"{len(left)} queries for {len(right)} documents: give one, or one for each")
        pairs = list(zip(left, right, strict=True))
        bodies = [{"model": self.model, "text_1": one, "text_2": two, **fields} for one, two in pairs]
        return self._pooled(SCORE, bodies, pairs, use_tqdm)

    def classify(self, prompts: str | Sequence[str], *, use_tqdm: bool = True, **fields: Any) -> list[PoolingOutput]:
        """The labels' shares of each text: `outputs.probs`, `outputs.label`. Raises BatonError."""
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._pooled(
            CLASSIFY, [{"model": self.model, "input": one, **fields} for one in several], several, use_tqdm
        )

    def _pooled(
        self, url: str, bodies: Sequence[Mapping[str, Any]], prompts: Sequence[Any], use_tqdm: bool
    ) -> list[PoolingOutput]:
        def read(body: Mapping[str, Any], prompt: Any) -> PoolingOutput:
            told = body["data"][0]
            known = {name: told[name] for name in ("embedding", "score", "probs", "label") if name in told}
            return PoolingOutput(prompt=prompt, outputs=Pooled(**known), usage=body["usage"])

        return self._exchanged(url, bodies, prompts, use_tqdm, read)

    def _answers(
        self,
        url: str,
        asked: Sequence[Mapping[str, Any]],
        prompts: Sequence[Any],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params or {}] * len(asked)
        if len(params) != len(asked):
            raise BatonError(f"{len(params)} sampling_params for {len(asked)} prompts: give one, or one for each")
        bodies = [
            {"model": self.model, "max_tokens": MAX_TOKENS, "return_token_ids": True, **own, **one}
            for own, one in zip(params, asked, strict=True)
        ]
        return self._exchanged(url, bodies, prompts, use_tqdm, _output)

    def _exchanged(
        self,
        url: str,
        bodies: Sequence[Mapping[str, Any]],
        prompts: Sequence[Any],
        use_tqdm: bool,
        read: Callable[[Mapping[str, Any], Any], Output],
    ) -> list[Output]:
        with self._lock:
            if self._process.poll() is not None:
                raise BatonError("the engine's process ended, or was closed: load the model again")
            first, self._next_id = self._next_id, self._next_id + len(bodies)
            lines = [self._line(number, first, url, body) for number, body in enumerate(bodies, first)]
            writer = threading.Thread(target=self._write, args=(lines,), daemon=True)
            writer.start()
            try:
                found, refused = self._received(first, prompts, use_tqdm, read)
            except BaseException:
                self.close()  # answers that nobody reads would be taken for those of the next call
                raise
            writer.join()
        if refused:
            raise BatonError(refused)
        return [found[place] for place in range(len(bodies))]

    def _received(
        self, first: int, prompts: Sequence[Any], use_tqdm: bool, read: Callable[[Mapping[str, Any], Any], Output]
    ) -> tuple[dict[int, Output], str]:
        """Answers by their prompts' places, and the first refusal."""
        found: dict[int, Output] = {}
        refused = ""
        for done in _shown(range(len(prompts)), use_tqdm):
            told = self._read()
            if told is None or "id" not in told:
                why = (told or {}).get("error", "it said why above")
                raise BatonError(f"the engine's process ended, after {done} of {len(prompts)} answers: {why}")
            place = told["id"] - first
            if told["status"] == 200:
                found[place] = read(told["body"], prompts[place])
            elif not refused:
                refused = f"prompt {place}: {_message(told['body'])}"
        return found, refused

    def _line(self, number: int, first: int, url: str, body: Mapping[str, Any]) -> bytes:
        """A request as the engine's process reads it. Raises BatonError for what is no JSON, or too long."""
        try:
            text = json.dumps({"id": number, "url": url, "body": body}, ensure_ascii=False, allow_nan=False)
            line = text.encode() + b"\n"  # not so a lone surrogate
        except (TypeError, ValueError, RecursionError) as error:
            raise BatonError(f"prompt {number - first}: it and its parameters must be JSON: {error}") from None
        if len(line) > self._max_line:
            raise BatonError(f"prompt {number - first} has {len(line)} bytes of JSON: {self._max_line} are possible")
        return line

    def _write(self, lines: Sequence[bytes]) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.writelines(lines)
            pipe.flush()
        except (OSError, ValueError):
            pass  # the reader hears of the end

    def _read(self) -> dict[str, Any] | None:
        """The next line of the engine's process; None at its end."""
        pipe = self._process.stdout
        assert pipe is not None
        line = pipe.readline()
        return json.loads(line) if line.endswith(b"\n") else None


def _several(name: str, given: Any, wanted: str, part: type) -> list[Any]:
    """Return a list of what was given, which is one if it has parts of this type, as token ids. Raises BatonError."""
    if isinstance(given, str) and part is int:
        return [given]
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise BatonError(f"{name}: {wanted} is needed, not {given!r:.60}")
    listed = list(given)
    return [listed] if listed and isinstance(listed[0], part) else listed


def _output(body: Mapping[str, Any], prompt: Any) -> RequestOutput:
    choices = body["choices"]
    return RequestOutput(
        request_id=body["id"],
        prompt=prompt,
        outputs=[
            Completion(
                index=choice["index"],
                text=choice["text"] if "text" in choice else choice["message"].get("content") or "",
                token_ids=choice.get("token_ids") or [],
                finish_reason=choice["finish_reason"],
                logprobs=choice.get("logprobs"),
                message=choice.get("message") or {},
            )
            for choice in choices
        ],
        usage=body["usage"],
    )


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _shown(steps: Iterable[int], use_tqdm: bool) -> Iterable[int]:
    """The steps with a bar, on a terminal and where tqdm is installed."""
    if use_tqdm and sys.stderr.isatty():
        try:
            from tqdm import tqdm

            return tqdm(steps, desc="Processed prompts")
        except ImportError:
            pass
    return steps
