"""Batches from the command line: `baton batch submit FILE | run FILE | list | watch ID | cancel ID | get ID | errors ID`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from cli.batch.settings import BatchSettings
from cli.batch.view import OVER, Batch, ended, is_good, progress, table
from cli.said import message_of
from common.settings import ConfigError
from services.runtime.loading import fail, load_settings

LOOK_EVERY_S = 1.0
LISTED = 20
TIMEOUT_S = 300.0  # a file upload
MAX_LINE = 16 << 20  # characters
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def main() -> int:
    """Entry point; 1 when lines failed, 2 when nothing could be done."""
    try:
        settings = load_settings(BatchSettings, command="batch", arguments=sys.argv[1:])
        gateway = settings.gateway()
        with gateway.client(timeout_s=TIMEOUT_S) as client:
            return Batches(client, settings).do()
    except KeyboardInterrupt:
        return 130
    except (ConfigError, ValueError) as error:
        return fail(error)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except httpx.HTTPError as error:
        return fail(gateway.silent(error))


class Batches:
    """A client of a gateway's batches. All methods raise ConfigError with the gateway's message, and httpx.HTTPError."""

    def __init__(self, client: httpx.Client, settings: BatchSettings) -> None:
        self._client, self._settings = client, settings

    def do(self) -> int:
        """Run the action; return the exit code."""
        action = self._settings.action
        if action in ("submit", "run"):
            return self._submit(stays=action == "run")
        if action == "list":
            return self._list()
        batch = self._batch(self._settings.name or self._newest())
        if action == "watch":
            return self._watch(batch)
        return self._cancel(batch) if action == "cancel" else self._get(batch)

    def _submit(self, *, stays: bool) -> int:
        if not self._settings.name:
            raise ConfigError(f"baton batch {self._settings.action} FILE: which file?")
        path = Path(self._settings.name)
        endpoint = endpoint_of(path)
        with path.open("rb") as file:
            sent = {"file": (path.name, file, "application/jsonl")}
            uploaded = self._told(self._client.post("/v1/files", data={"purpose": "batch"}, files=sent))
        asked = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "24h"}
        batch = self._told(self._client.post("/v1/batches", json=asked))
        if stays:
            return self._watch(batch)
        self._print(batch, f"{batch['id']}\n  baton batch watch {batch['id']}")
        return 0

    def _list(self) -> int:
        told = self._told(self._client.get("/v1/batches", params={"limit": LISTED}))
        self._print(told, table(told["data"]))
        return 0

    def _watch(self, batch: Batch) -> int:
        """Wait until the batch ends; on a terminal with a progress bar, else a line for each status."""
        began, before = time.monotonic(), _done(batch)
        shows, said = sys.stderr.isatty(), ""
        while batch["status"] not in OVER:
            line = progress(batch, time.monotonic() - began, before)
            if shows:
                print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
            elif batch["status"] != said:
                print(line, file=sys.stderr, flush=True)
            said = batch["status"]
            time.sleep(LOOK_EVERY_S)
            batch = self._batch(batch["id"])
        if shows:
            print("\r\x1b[K", end="", file=sys.stderr)
        self._print(batch, ended(batch))
        return 0 if is_good(batch) else 1

    def _cancel(self, batch: Batch) -> int:
        batch = self._told(self._client.post(f"/v1/batches/{batch['id']}/cancel"))
        self._print(batch, f"{batch['id']} {batch['status']}")
        return 0

    def _get(self, batch: Batch) -> int:
        """Write the answers, or the failed lines, to the requested place."""
        kind, what = (
            ("error_file_id", "line that failed") if self._settings.action == "errors" else ("output_file_id", "answer")
        )
        if not batch.get(kind):
            raise ConfigError(f"{batch['id']} is {batch['status']} and has no {what}")
        with self._client.stream("GET", f"/v1/files/{batch[kind]}/content") as answer:
            if answer.status_code != 200:
                raise ConfigError(message_of(answer.read()))
            if not self._settings.output:
                for chunk in answer.iter_bytes():
                    sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
                return 0
            _save(answer, Path(self._settings.output))
        return 0

    def _newest(self) -> str:
        found = self._told(self._client.get("/v1/batches", params={"limit": 1}))["data"]
        if not found:
            raise ConfigError("no batch yet: baton batch submit FILE")
        return str(found[0]["id"])

    def _batch(self, name: str) -> Any:
        if not name.replace("_", "").replace("-", "").isalnum():
            raise ConfigError(f"{name[:80]!r} is not the id of a batch: see `baton batch list`")
        return self._told(self._client.get(f"/v1/batches/{name}"))

    def _told(self, answer: httpx.Response) -> Any:
        if answer.status_code != 200:
            raise ConfigError(f"{self._client.base_url}: {message_of(answer.content)}")
        return answer.json()

    def _print(self, told: Any, text: str) -> None:
        print(json.dumps(told, indent=2) if self._settings.print_json else text, flush=True)


def endpoint_of(path: Path) -> str:
    """The `url` of a file's first line. Raises ConfigError if the file is no batch input."""
    try:
        with path.open(encoding="utf-8") as file:
            url = json.loads(file.readline(MAX_LINE)).get("url")
    except OSError as error:
        raise ConfigError(f"submit {path}: {error.strerror}") from None
    except (ValueError, AttributeError):
        url = None
    if url not in ENDPOINTS:
        line = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'
        raise ConfigError(f"submit {path}: each line is {line}")
    return str(url)


def _done(batch: Batch) -> int:
    return int(batch["request_counts"]["completed"] + batch["request_counts"]["failed"])


def _save(answer: httpx.Response, path: Path) -> None:
    """Write the whole file or nothing. Raises ConfigError."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            for chunk in answer.iter_bytes():
                file.write(chunk)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
