"""A stand-in of the hub on loopback: its paths, headers, redirects and errors, as huggingface_hub's own client meets them.

Large files are redirected to another host, the CDN. Faults are set by a test before they are met.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

PIECE_BYTES = 1 << 16
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)\Z")
_CACHED = re.compile(r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)\Z")
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)\Z")


def blob_id(content: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class Repository:
    """A model, one commit of it under each revision's name."""

    commits: dict[str, dict[str, bytes]]
    revisions: dict[str, str]
    is_gated: bool = False
    is_private: bool = False


@dataclass
class Faults:
    """Faults of the CDN, by the file's name."""

    cut_after: dict[str, list[int]] = field(default_factory=dict)  # bytes of each answer, then the connection ends
    wrong: set[str] = field(default_factory=set)  # one byte differs
    changed: dict[str, bytes] = field(default_factory=dict)  # the content at the hub is another one now
    no_ranges: set[str] = field(default_factory=set)
    busy: dict[str, int] = field(default_factory=dict)  # so many answers are 503
    hold: dict[str, threading.Event] = field(default_factory=dict)  # half of it comes, then it waits


class Hub:
    """The two hosts. `requests`: method, host, path, Authorization and Range of all that came."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults = Faults()
        self.token = ""
        self.requests: list[dict[str, str]] = []
        self.halfway = threading.Event()
        self.url = self.cdn = ""

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main", **facts: bool) -> str:
        """Put files at a revision; returns the commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()
        there = self.repositories.setdefault(repo, Repository({}, {}))
        there.commits[commit] = files
        there.revisions |= {revision: commit, commit: commit}
        for name, value in facts.items():
            setattr(there, name, value)
        return commit

    def asked(self, method: str, part: str) -> list[dict[str, str]]:
        return [one for one in self.requests if one["method"] == method and part in one["path"]]


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin", ".model")) or name == "tokenizer.json"


@contextlib.contextmanager
def hub_served() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            host = str(self.headers.get("Host"))
            told = {"method": self.command, "host": host, "path": self.path}
            told |= {name: self.headers.get(name, "") for name in ("Authorization", "Range")}
            hub.requests.append(told)
            path = unquote(urlsplit(self.path).path)
            if path.startswith("/cdn/"):
                self._cdn(path)
            elif info := _INFO.match(path):
                self._info(*info.groups())
            elif file := _RESOLVE.match(path) or _CACHED.match(path):
                self._resolve(*file.groups(), is_cached=path.startswith("/api"))
            else:
                self._say(404, {})

        def _known(self, repo: str, revision: str) -> dict[str, bytes] | None:
            there, key = hub.repositories.get(repo), f"Bearer {hub.token}"
            is_me = bool(hub.token) and self.headers.get("Authorization") == key
            if self.headers.get("Authorization") and not is_me:
                self._say(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
            elif there is None or (there.is_private and not is_me):
                message = "Repository not found" if is_me else "Invalid username or password."
                self._say(404 if is_me else 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": message})
            elif (commit := there.revisions.get(revision)) is None:
                message = f"Invalid rev id: {revision}"
                self._say(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": message})
            else:
                self._commit, self._is_me = commit, is_me
                return there.commits[commit]
            return None

        def _info(self, repo: str, revision: str) -> None:
            if (files := self._known(repo, revision)) is None:
                return
            siblings = []
            for name, content in files.items():
                lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
                one = {"rfilename": name, "size": len(content), "blobId": blob_id(content)}
                siblings.append(one | ({"lfs": lfs} if is_lfs(name) else {}))
            body = {
                "_id": "0",
                "id": repo,
                "modelId": repo,
                "sha": self._commit,
                "private": False,
                "siblings": siblings,
            }
            body |= {"tags": [], "downloads": 0, "likes": 0}
            self._say(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

        def _resolve(self, repo: str, revision: str, name: str, *, is_cached: bool) -> None:
            if (files := self._known(repo, revision)) is None:
                return
            commit = {"X-Repo-Commit": self._commit}
            if hub.repositories[repo].is_gated and not self._is_me:
                self._say(
                    401, commit | {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {repo} is restricted."}
                )
            elif name not in files:
                self._say(404, commit | {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            elif is_lfs(name):
                content = hub.faults.changed.get(name, files[name])
                digest = hashlib.sha256(content).hexdigest()
                linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
                self._say(302, commit | linked | {"Location": f"{hub.cdn}/cdn/{repo}/{self._commit}/{name}"})
            elif not is_cached:  # as the hub sends small files since 2025
                self._say(307, commit | {"Location": f"/api/resolve-cache/models/{repo}/{self._commit}/{name}"})
            else:
                self._say(200, commit | {"ETag": f'"{blob_id(files[name])}"'}, files[name])

        def _cdn(self, path: str) -> None:
            owner, model, commit, name = path.removeprefix("/cdn/").split("/", 3)
            content, faults = hub.repositories[f"{owner}/{model}"].commits[commit][name], hub.faults
            if faults.busy.get(name, 0):
                faults.busy[name] -= 1
                self._say(503, {})
                return
            if name in faults.wrong:
                content = content[:-1] + bytes([content[-1] ^ 1])
            begin, status, extra = 0, 200, dict[str, str]()
            asked = re.match(r"bytes=(\d+)-\Z", self.headers.get("Range", ""))
            if asked and name not in faults.no_ranges:
                begin, status = int(asked[1]), 206
                extra["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            cuts = faults.cut_after.get(name)
            self._say(status, extra, content[begin:], cut=cuts.pop(0) if cuts else None, hold=faults.hold.get(name))

        def _say(
            self,
            status: int,
            headers: dict[str, str],
            body: bytes = b"",
            cut: int | None = None,
            hold: threading.Event | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if hold is not None and not hold.is_set():
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                hub.halfway.set()
                hold.wait(60)
                self.close_connection = True
                return
            self.wfile.write(body if cut is None else body[:cut])
            self.close_connection = self.close_connection or cut is not None

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    hub.url, hub.cdn = f"http://127.0.0.1:{servers[0].server_port}", f"http://localhost:{servers[1].server_port}"
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
