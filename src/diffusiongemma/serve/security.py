"""Who may ask, from where, and how much: keys, hosts, origins, sizes, and the headers that guard a browser.

All of it happens before a body is parsed, in one middleware around the whole application.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusiongemma.serve.errors import ApiError
from diffusiongemma.serve.settings import Settings

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
OPEN = ("/", "/health", "/ready", "/favicon.ico")  # what needs no key; the studio asks for one
OPEN_FOLDER = "/studio/"
DISCARDED = 256 << 20  # bytes of a body that is too large that are read away, so that the answer arrives


class Keys:
    """Only digests are kept; each is compared, so the time tells nothing."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, key: str) -> str | None:
        """The name of the client that has this key."""
        given, found = _digest(key), None
        for i, digest in enumerate(self._digests):
            if hmac.compare_digest(given, digest):
                found = f"key-{i + 1}"
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


class Shield:
    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings, self._keys = app, settings, Keys(settings.keys)
        self._hosts = {"localhost", "127.0.0.1", "::1", settings.host.strip("[]").lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        guarded = _with_headers(send)
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            self._check_origin(headers)
            self._check_key(scope, headers)
            body = await self._check_body(scope, headers, receive)
        except ApiError as error:
            if error.status_code != 499:
                await error.response()(scope, receive, guarded)
            return
        await self._app(scope, body, guarded)

    def _check_host(self, headers: Headers) -> None:
        """Without keys, a page of a foreign name that points here (DNS rebinding) must not be served."""
        host = headers.get("host")
        if not self._keys and host is not None and _name(host) not in self._hosts:
            raise ApiError(403, "this server answers to the names of this machine only", code="foreign_host")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or origin in self._settings.cors_origins:
            return
        if urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            raise ApiError(403, "this origin may not use this server", code="foreign_origin")

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"]
        if not self._keys or path in OPEN or path.startswith(OPEN_FOLDER) or scope["method"] == "OPTIONS":
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        client = self._keys.find(key.strip()) if scheme.lower() == "bearer" else None
        if client is None:
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        scope["client_name"] = client

    async def _check_body(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Read a body within its limit before anything is done with it."""
        limit = int(self._settings.max_body)
        declared = headers.get("content-length", "0")
        too_large = ApiError(
            413, f"the body is larger than {limit} bytes", code="too_large", headers={"Connection": "close"}
        )
        size = int(declared) if declared.isdecimal() and len(declared) < 19 else DISCARDED + 1
        if size > limit and (size > DISCARDED or "expect" in headers):
            raise too_large
        chunks, total = list[bytes](), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client went away")
            total += len(message.get("body", b""))
            if total <= limit:
                chunks.append(message.get("body", b""))
            elif total > DISCARDED:
                raise too_large
            else:
                chunks.clear()
            if not message.get("more_body", False):
                break
        if total > limit:
            raise too_large
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # Browsers send other kinds to any server without asking it first.
        if scope["method"] == "POST" and kind != "application/json":
            raise ApiError(415, "Content-Type must be application/json", code="unsupported_media_type")
        return _replay(b"".join(chunks), receive)


def _name(host: str) -> str:
    """localhost:8000 -> localhost, [::1]:8000 -> ::1"""
    return (urlsplit(f"//{host}").hostname or "") if host.count("@") == 0 else ""


def _replay(body: bytes, receive: Receive) -> Receive:
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _with_headers(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return guarded
