"""Guard the viewer's server: requests need the token and this machine's name, and every answer gets strict headers."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from histopipe.errors import MachineShort, MaskUnfit, UsageError
from histopipe.viewer.collection import ChangedMeanwhile

_LONGEST_PATH = 1000
"""Most characters of a path. Ours are far shorter; Python refuses to parse numbers of thousands of digits."""
_NAMES = ("127.0.0.1", "localhost", "[::1]")
_STYLE = "sha256-9xTiqzfwFaL2SGb1rmr8gysEwVVjIvqWAgmZgqFqpEE="
"""Hash of the style element that OpenSeadragon adds to the page."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
        f"style-src 'self' '{_STYLE}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class NotFound(UsageError):
    """The request names something that does not exist."""


class TooLarge(UsageError):
    """The body of a request is too large."""


class NotJson(UsageError):
    """The body of a request has another type than JSON, which only pages of this server can send."""


_STATUSES = {
    NotFound: 404,
    ChangedMeanwhile: 409,
    TooLarge: 413,
    NotJson: 415,
    MachineShort: 503,
    UsageError: 400,
    MaskUnfit: 400,
}
"""Status of the answer by error; the first one that matches. The first four are usage errors."""


class Guard:
    """Refuse requests without the token, or for another host, and add headers to all answers.

    With `local`, only requests for this machine's loopback names are answered. Otherwise, a page from elsewhere could
    reach the server by a host name that it controls. The guard is around the whole application, not one of its
    middlewares, so that answers to requests that fail by a bug get the headers, too.
    """

    def __init__(self, app: ASGIApp, token: str, *, local: bool) -> None:
        self._app, self._token, self._local = app, token.encode(), local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        if len(scope["path"]) > _LONGEST_PATH:
            return PlainTextResponse("not found", 404)
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._local and name not in _NAMES:
            return PlainTextResponse(f"wrong host {name[:100]!r}", 403)
        if origin is not None and origin.split("://")[-1] != host:
            return PlainTextResponse("requests of other pages are refused", 403)
        token = scope["path"].split("/")[1].encode() if "/" in scope["path"] else b""
        if not secrets.compare_digest(token, self._token):
            return PlainTextResponse(
                "wrong token: open the address that histopipe view printed. A token is valid until the server ends.\n",
                403,
            )
        return None


async def answer_error(_: Request, error: Exception) -> Response:
    """Return the answer to a request that failed."""
    status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), 500)
    return JSONResponse({"error": str(error)}, status)


async def read_json_body(request: Request, most: int) -> bytearray:
    """Return the body of a request.

    Raises:
        NotJson: its type is not JSON.
        TooLarge: it has more than `most` bytes.
    """
    if request.headers.get("content-type") != "application/json":
        raise NotJson("content-type", expected="application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise TooLarge("the request is too large", expected=f"at most {most:,} bytes")
    return body
