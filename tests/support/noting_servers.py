"""Small OpenAI servers, a thread each, that note what they are asked and answer what a test says."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GIVEN: Mapping[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_request_id": "r",
    "remote_block_ids": [[3, 1], []],
    "remote_host": "10.0.0.7",
    "remote_port": 7766,
    "kvd_lease_seconds": 30.0,
    "kvd_more": {"a": [1.5, None, True, 1 << 40]},
}
"""What a prefiller answers, with all that JSON has."""
ABSENT = "absent"
"""As `Noting.params`: the answer has no entry kv_transfer_params at all."""


@dataclass
class Noting:
    """A server: ``bodies`` and ``headers`` of the requests that it got, ``status`` and ``params`` of its answers."""

    url: str = ""
    status: int = 200
    params: Any = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def forget(self) -> None:
        """As it was when it started."""
        self.status, self.params = 200, None
        self.bodies.clear()
        self.headers.clear()

    def answer(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """Content type and text of the answer to a request."""
        if self.status != 200:
            return "application/json", json.dumps({"error": {"message": "no"}})
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "text": "said"}
        if "messages" in body:
            choice["delta" if body.get("stream") else "message"] = {"content": "said", "role": "assistant"}
        whole = {"id": "x", "object": "o", "created": 1, "model": "tiny", "choices": [choice]}
        if self.params != ABSENT:
            whole["kv_transfer_params"] = self.params
        if body.get("stream"):
            return "text/event-stream", f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n"
        return "application/json", json.dumps(whole)


@contextlib.contextmanager
def noting() -> Iterator[Noting]:
    """A server that runs."""
    made = Noting()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._say(200, "application/json", "{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.bodies.append(body)
            made.headers.append({name.lower(): value for name, value in self.headers.items()})
            self._say(made.status, *made.answer(body))

        def _say(self, status: int, kind: str, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Nothing: the log would stand among the tests' output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
