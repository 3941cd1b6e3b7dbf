"""Stand-ins on loopback of a bucket by S3's protocol, a container registry with tokens, and ModelScope."""

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
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

TOKEN = "a-token-of-a-test"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass
class Store:
    """The files below `models/demo` of the bucket `bucket`, of the artifact `team/demo`, and of ModelScope's `org/demo`."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)  # the next answer ends halfway
    wrong: set[str] = field(default_factory=set)  # one byte differs
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    multipart: set[str] = field(default_factory=set)  # S3 tells no MD5
    tokens_last: int = 1 << 30  # requests of the registry, each
    uses_left: dict[str, int] = field(default_factory=dict)  # of each token that it gave
    index: bool = False  # the registry has an index of one manifest
    url: str = ""

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    def ranges(self, part: str) -> list[str]:
        return [one for method, path, one in self.requests if method == "GET" and part in path]

    def tag(self, name: str) -> str:
        digest = hashlib.md5(self.files[name], usedforsecurity=False).hexdigest()
        return f"{digest}-2" if name in self.multipart else digest


@contextlib.contextmanager
def stores_served() -> Iterator[Store]:
    """All three at one address."""
    store = Store()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            path, query = unquote(parts.path), {name: one[0] for name, one in parse_qs(parts.query).items()}
            store.requests.append((self.command, self.path, self.headers.get("Range", "")))
            if path.startswith("/v2/"):
                self._registry(path)
            elif path == "/token":
                store.uses_left[token := f"{TOKEN}-{len(store.uses_left)}"] = store.tokens_last
                self._say(200, json.dumps({"token": token}).encode())
            elif path.startswith("/api/v1/models/org/demo/repo"):
                self._model_scope(path, query)
            elif path.rstrip("/") == "/bucket" and "list-type" in query:
                self._listed(query.get("prefix", ""))
            elif path.startswith("/bucket/models/demo/"):
                name = path.removeprefix("/bucket/models/demo/")
                if name in store.files:
                    self._file(name, {"ETag": f'"{store.tag(name)}"', "Last-Modified": "Sun, 29 Nov 2026 00:00:00 GMT"})
                else:
                    self._say(404)
            else:
                self._say(404)

        def _listed(self, prefix: str) -> None:
            keys = [f"models/demo/{name}" for name in sorted(store.files) if f"models/demo/{name}".startswith(prefix)]
            contents = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(store.files[key[12:]])}</Size>"
                f"<ETag>&quot;{store.tag(key[12:])}&quot;</ETag><LastModified>2026-11-29T00:00:00.000Z</LastModified>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
                for key in keys
            )
            body = (
                '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
                f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys)}</KeyCount><MaxKeys>1000</MaxKeys>"
                f"<IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
            )
            self._say(200, body.encode(), {"Content-Type": "application/xml"})

        def _registry(self, path: str) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            store.uses_left[token] = store.uses_left.get(token, 0) - 1
            if store.uses_left[token] < 0:
                store.uses_left.pop(token, None)
                realm = f'Bearer realm="{store.url}/token",service="registry",scope="repository:team/demo:pull"'
                self._say(401, b"{}", {"WWW-Authenticate": realm})
                return
            layers = [
                {
                    "mediaType": "application/octet-stream",
                    "digest": f"sha256:{hashlib.sha256(content).hexdigest()}",
                    "size": len(content),
                    "annotations": {"org.opencontainers.image.title": name},
                }
                for name, content in store.files.items()
            ]
            manifest = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": layers}).encode()
            digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
            index = {
                "schemaVersion": 2,
                "manifests": [{"mediaType": MANIFEST, "digest": digest, "size": len(manifest)}],
            }
            if path == "/v2/team/demo/manifests/v1":
                self._say(200, json.dumps(index).encode() if store.index else manifest)
            elif path == f"/v2/team/demo/manifests/{digest}":
                self._say(200, manifest)
            elif blob := re.match(r"/v2/team/demo/blobs/sha256:([0-9a-f]{64})\Z", path):
                by_digest = {hashlib.sha256(content).hexdigest(): name for name, content in store.files.items()}
                self._file(by_digest[blob[1]], {})
            else:
                self._say(404)

        def _model_scope(self, path: str, query: dict[str, str]) -> None:
            if query.get("Revision") != "master":
                self._say(404)
            elif path.endswith("/files"):
                files = [
                    {"Path": name, "Size": len(content), "Type": "blob", "Sha256": hashlib.sha256(content).hexdigest()}
                    for name, content in store.files.items()
                ]
                body = {"Code": 200, "Data": {"Files": [{"Path": "figures", "Size": 0, "Type": "tree"}, *files]}}
                self._say(200, json.dumps(body).encode())
            else:
                self._file(query["FilePath"], {})

        def _file(self, name: str, headers: dict[str, str]) -> None:
            content, status = store.files[name], 200
            if name in store.wrong:
                content = content[:-1] + bytes([content[-1] ^ 1])
            headers = headers | {"Accept-Ranges": "bytes"}
            asked = re.match(r"bytes=(\d+)-(\d*)\Z", self.headers.get("Range", ""))
            if asked:
                begin, end = int(asked[1]), int(asked[2] or len(content) - 1)
                headers["Content-Range"] = f"bytes {begin}-{min(end, len(content) - 1)}/{len(content)}"
                content, status = content[begin : end + 1], 206
            is_cut = name in store.cut and self.command == "GET"
            store.cut -= {name} if is_cut else set()
            self._say(status, content, headers, sent=len(content) // 2 if is_cut else None)

        def _say(
            self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, sent: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:sent])
            self.close_connection = self.close_connection or sent is not None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
