"""A proxy between a client and a real server that does to requests what networks do."""

import http.client
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("429", "500", "503", "refused", "reset", "silence", "truncated", "slow", "nonsense")
ONE_BY_ONE = tuple(each for fault in FAULTS for each in (fault, "ok"))
"""For requests that are sent one at a time: no one of them suffers all."""


class FaultProxy(ThreadingHTTPServer):
    """Forwards to `upstream`; the n-th POST suffers the n-th of `plan`, "ok" behind its end."""

    daemon_threads = True

    def __init__(self, upstream: str, plan: Sequence[str], silence: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream)
        self.plan = list(plan)
        self.silence = silence
        self.suffered: list[str] = []
        self._count = threading.Lock()

    def handle_error(self, *_arguments: object) -> None:
        """A client that is gone is what this is about."""

    def next_fault(self) -> str:
        with self._count:
            fault = self.plan.pop(0) if self.plan else "ok"
            self.suffered.append(fault)
            return fault


class _Handler(BaseHTTPRequestHandler):
    server: FaultProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._forward("ok")

    def do_POST(self) -> None:
        fault = self.server.next_fault()
        if fault in ("429", "500", "503"):
            self._body()
            said = b'{"error": {"message": "injected"}}'
            self.send_response(int(fault))
            if fault == "429":
                self.send_header("Retry-After", "0.3")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)
        elif fault == "refused":
            self._body()
            self._hang_up()
        elif fault == "silence":
            self._body()
            time.sleep(self.server.silence)
            self._hang_up()
        elif fault == "nonsense":
            self._body()
            said = b"<html>gateway</html>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)
        else:
            self._forward(fault)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def _forward(self, fault: str) -> None:
        upstream = http.client.HTTPConnection(
            self.server.upstream.hostname or "", self.server.upstream.port, timeout=120
        )
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
        try:
            upstream.request(self.command, self.path, self._body() or None, headers)
            answer = upstream.getresponse()
            body = answer.read()
        except OSError:
            self._hang_up()
            return
        finally:
            upstream.close()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type") or "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "reset":
            self.wfile.write(body[: len(body) // 2])
            self._hang_up()
        elif fault == "truncated":
            # The connection stays, the rest never comes.
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            time.sleep(self.server.silence)
            self._hang_up()
        elif fault == "slow":
            for start in range(0, len(body), max(1, len(body) // 20)):
                self.wfile.write(body[start : start + max(1, len(body) // 20)])
                self.wfile.flush()
                time.sleep(0.02)
        else:
            self.wfile.write(body)


@contextmanager
def fault_proxy(
    upstream: str, plan: Sequence[str], *, silence: float = 3.0
) -> Iterator[tuple[str, FaultProxy]]:
    """The proxy's URL, and the proxy."""
    proxy = FaultProxy(upstream, plan, silence)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}", proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
