"""Servers that are lent to the runs of a test: any command, and a small server that only counts its requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from libra_hpc.annexes.lend import lender_record as records
from tests.cluster.runs import Case

SMALL = '''
"""Answers each request for tokens with one, after as many seconds as its body says; writes its port to a file."""
import asyncio, json, os, socket, sys
import uvicorn
from libra_hpc_serving import Watch
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body = json.loads((await receive())["body"] or b"{}")
    await asyncio.sleep(body.get("seconds", 0))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"token"})
listener = socket.create_server(("127.0.0.1", 0))
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(listener.getsockname()[1]))
os.rename(sys.argv[1] + ".new", sys.argv[1])
uvicorn.Server(uvicorn.Config(Watch(app), log_level="warning", lifespan="on")).run(sockets=[listener])
'''


class Lent:
    """A server that lends to the runs of a case."""

    def __init__(self, case: Case, command: Sequence[str]) -> None:
        self.case, self.place = case, case.folder / "lenders"
        # Also for what the test asks of it.
        os.environ[records.VARIABLE] = str(self.place)
        self.log = case.folder / "server.log"
        lend = [str(sys.executable), "-m", "libra_hpc_cli.app", "lend", "serve", "--slo", "ttft=500ms"]
        with self.log.open("w") as log:
            runs = str(case.folder / "runs")
            self.server = subprocess.Popen([*lend, "--runs", runs, "--", *command], stdout=log, stderr=log)

    def records(self) -> list[dict[str, Any]]:
        return json.loads(self.case.cli("lend", "list", "--json").stdout)  # type: ignore[no-any-return]

    def wait(self, state: str) -> dict[str, Any]:
        """The record of a lender, once it has this state."""
        found: list[dict[str, Any]] = []

        def reached() -> bool:
            found[:] = [one for one in self.records() if one["state"] == state]
            return bool(found)

        wait(reached, f"a lender that {state}")
        return found[0]

    def post(self, port: int, body: dict[str, Any]) -> bytes:
        """What the server answers to a request for a completion."""
        url, data = f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return bytes(answer.read())

    def end(self) -> None:
        os.environ.pop(records.VARIABLE, None)
        if self.server.poll() is None:
            self.server.kill()
        self.server.wait()


class SmallServer(Lent):
    def __init__(self, case: Case) -> None:
        self._port, script = case.folder / "port", case.folder / "server.py"
        script.write_text(SMALL)
        self._port.unlink(missing_ok=True)
        super().__init__(case, [sys.executable, str(script), str(self._port)])

    def answers(self) -> bool:
        """Whether it serves."""
        wait(self._port.exists, "the server's port")
        return self.post(int(self._port.read_text()), {}) == b"token"


def wait(condition: Callable[[], object], what: str, limit_s: float = 120.0) -> None:
    """Also after the run has ended."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
