"""A web server on loopback whose answers can be broken: cut, slow, wrong, refused."""

from __future__ import annotations

import hashlib
import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

Fault = Callable[[str, str], "str | int | None"]
"""Returns the fault of a request, given its method and its path without the query.

"cut": half of the body is sent; "slow": the answer comes late; "flip": one byte is wrong; "short": the file seems
shorter; "whole": ranges are ignored; a number: this status code; None: the answer is right.
"""


def always(fault: str | int | None) -> Fault:
    """Return the same fault for every request."""
    return lambda *_: fault


@dataclass
class FaultyServer:
    """Serves the files of a folder, or forwards requests to another server. `requests` are the methods and paths."""

    folder: Path | None = None
    upstream: str = ""
    fault: Fault = lambda *_: None
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if self.upstream:
            upstream = http.client.HTTPConnection(urlsplit(self.upstream).netloc, timeout=60)
            with closing(upstream) as connection:
                connection.request(method, target, body, headers)
                response = connection.getresponse()
                content = response.read()
            kept = {
                k: v
                for k, v in response.getheaders()
                if k.lower() not in ("connection", "transfer-encoding")
            }
            return response.status, kept, content
        assert self.folder is not None
        path = self.folder / unquote(urlsplit(target).path).lstrip("/")
        if not path.is_file():
            return 404, {}, b""
        content = path.read_bytes()
        response_headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
            "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if "Range" in headers:
            first, _, last = headers["Range"].removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
            response_headers["Content-Range"] = (
                f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            )
            return 206, response_headers, part
        return 200, response_headers, content


@contextmanager
def serving(server: FaultyServer) -> Iterator[FaultyServer]:
    """Run a server on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            path = urlsplit(self.path).path
            server.requests.append((self.command, path))
            headers = dict(self.headers.items())
            sent = int(headers.get("Content-Length", 0))
            body = self.rfile.read(sent)
            if len(body) < sent:  # the client was killed; the upstream would wait for the rest
                self.close_connection = True
                return
            fault = server.fault(self.command, path)
            if fault == "whole":
                headers.pop("Range", None)
            if fault == "slow":
                time.sleep(0.05)
            if isinstance(fault, int):
                status, response_headers, content = fault, dict[str, str](), b""
            else:
                status, response_headers, content = server.answer(
                    self.command, self.path, headers, body
                )
            length = int(response_headers.pop("Content-Length", len(content)))
            if fault == "short":
                length -= 100
                content = content[: max(0, length)]
            if fault == "flip" and content:
                place = len(content) // 2
                content = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            self.send_response(status)
            for name, value in response_headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)
            if fault == "cut":
                self.close_connection = True

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http_server.daemon_threads = True
    server.url = f"http://127.0.0.1:{http_server.server_port}"
    thread = threading.Thread(target=http_server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http_server.shutdown()
        http_server.server_close()
        thread.join()


def sometimes(seed: int, *faults: str | int, share: float = 0.25) -> Fault:
    """Return faults at random, never two in a row for one path."""
    numbers, last = random.Random(seed), dict[str, bool]()

    def fault(method: str, path: str) -> str | int | None:
        broken = not last.get(path) and numbers.random() < share
        last[path] = broken
        return numbers.choice(faults) if broken else None

    return fault
