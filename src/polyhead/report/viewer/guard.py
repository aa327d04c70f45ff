"""Access control of the viewer: requests from this machine, with the token, from the viewer's own page only.

The server listens on loopback only, but any page in a browser can send requests there. Requests without the token are
rejected, as are requests under another host name (DNS rebinding) or from another origin.
"""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polyhead.report.viewer.endpoint import error_response
from polyhead.report.viewer.failures import RequestError

HOSTS = ("127.0.0.1", "localhost", "[::1]")
# The page may load its own script and style and generated images, and send requests to this server.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI middleware: check access, strip `/TOKEN` from the path, and add the security headers to every response."""

    def __init__(self, app: ASGIApp, *, token: str, policy: str = _POLICY) -> None:
        self.app = app
        self.token = token.encode()
        self.headers = {**_SECURITY_HEADERS, "Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # websockets are not supported
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self.headers)
            await send(message)

        error = self.refusal(scope)
        if error is not None:
            await error_response(error)(scope, receive, send_with_headers)
            return
        path = "/" + scope["path"].lstrip("/").partition("/")[2]
        await self.app({**scope, "path": path, "raw_path": path.encode()}, receive, send_with_headers)

    def refusal(self, scope: Scope) -> RequestError | None:
        """Return the reason for which a request is rejected; None if it is accepted."""
        headers = Headers(scope=scope)
        hosts = _hosts(scope)
        host = headers.get("host", "").lower()
        if host not in hosts:
            return _forbidden(f"The viewer is served at {hosts[0]}; the request has another host name.", 421)
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"{scope['scheme']}://{host}":
            return _forbidden("The viewer accepts requests of its own page only, not another origin.")
        token, slash, rest = scope["path"].removeprefix("/").partition("/")
        # A link to the page may be on any site, but it must open the page itself, as a top-level document.
        is_link = not rest and scope["method"] == "GET" and headers.get("sec-fetch-dest") == "document"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_link:
            return _forbidden("The viewer accepts requests of its own page only, not another site.")
        if not secrets.compare_digest(token.encode(errors="surrogateescape"), self.token) or not slash:
            return _forbidden("The address must contain the token that `polyhead view` printed; copy all of it.")
        return None


def _forbidden(message: str, status: int = 403) -> RequestError:
    return RequestError(status, "forbidden", message)


def _hosts(scope: Scope) -> list[str]:
    port = (scope.get("server") or ("", None))[1]
    return [name if port in (None, 80) else f"{name}:{port}" for name in HOSTS]
