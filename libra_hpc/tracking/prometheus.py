"""The newest step of a run as text for Prometheus, at ``/metrics``: ``libra_hpc_reward{run="NAME"} 0.5``.

A number of one task, ``dapo/reward``, is ``libra_hpc_reward{run="NAME",task="dapo"}``.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Prometheus:
    """Serves from the first step on; a port that is in use raises `OSError`, and is tried again later."""

    name, lasting = "prometheus", False

    def __init__(self, run: str, host: str, port: int) -> None:
        self._run, self._address, self._text = run, (host, port), b""
        self._server: ThreadingHTTPServer | None = None

    def send(self, step: int, values: Mapping[str, float]) -> None:
        self._text = exposition(self._run, values)
        if self._server is None:
            self._server = ThreadingHTTPServer(self._address, self._handler())
            threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        tracker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.partition("?")[0] == "/metrics"
                text = tracker._text if found else b"see /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", TYPE)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                """Scrapes are no news."""

        return Handler

    def again(self, step: int) -> bool:
        return True

    def flush(self) -> None:
        """The newest step is sent again by the next process."""

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def exposition(run: str, values: Mapping[str, float]) -> bytes:
    """The text of a step, with all lines of a metric together."""
    lines: dict[str, list[str]] = {}
    for name, value in values.items():
        if not math.isfinite(value):
            continue
        task, _, own = name.rpartition("/")
        metric = "libra_hpc_" + re.sub(r"\W", "_", own, flags=re.ASCII)
        labels = [f'{key}="{_escaped(text)}"' for key, text in (("run", run), ("task", task)) if text]
        lines.setdefault(metric, [f"# TYPE {metric} gauge"]).append(f"{metric}{{{','.join(labels)}}} {value!r}")
    return "".join(f"{line}\n" for group in lines.values() for line in group).encode()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
