"""`python -m tests.chaos.replica ADDRESS PORT`: streams numbers, as a replica of a model would."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAUSE_S = 0.005


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._begin("text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._begin("text/event-stream")
        for number in range(body["max_tokens"]):
            choice = {"index": 0, "text": f"{body['prompt'][:8]}{number} "}
            self.wfile.write(b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode())
            time.sleep(PAUSE_S)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass

    def _begin(self, content_type: str) -> None:
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.end_headers()


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # a burst


if __name__ == "__main__":
    Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
