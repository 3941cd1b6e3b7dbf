"""The page's files, read once, with headers that allow no other sources and scripts."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request, Response

FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"
MAX_DEPTH = 8  # depth of a page's address: /console/requests/ID/, and wrong ones
_LINK = b'"console/static/'
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # a model's words never become markup
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated each time, usually with a 304
    "vary": "accept-encoding",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file with its response headers."""

    body: bytes
    zipped: bytes
    media_type: str
    etag: str

    def response(self, request: Request, *, status_code: int = 200) -> Response:
        """The file, or 304 if the client has it."""
        headers = _HEADERS | {"etag": self.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known and status_code == 200:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers, body = headers | {"content-encoding": "gzip"}, self.zipped
        else:
            body = self.body
        return Response(body, status_code=status_code, headers=headers, media_type=self.media_type)


def load_assets() -> dict[str, Asset]:
    """The files by their paths below `FOLDER`."""
    paths = [path for path in sorted(FOLDER.rglob("*")) if path.suffix in _TYPES]
    return {path.relative_to(FOLDER).as_posix(): _asset(path.suffix, path.read_bytes()) for path in paths}


def load_pages() -> list[Asset]:
    """The page by the depth of its address: its links are relative, so a proxy may put it below a path."""
    page = (FOLDER / PAGE).read_bytes()
    return [_asset(".html", page.replace(_LINK, b'"' + b"../" * depth + _LINK[1:])) for depth in range(MAX_DEPTH + 1)]


def _asset(suffix: str, body: bytes) -> Asset:
    return Asset(
        body=body,
        zipped=gzip.compress(body, mtime=0),
        media_type=_TYPES[suffix],
        etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    )
