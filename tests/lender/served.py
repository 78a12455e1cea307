"""A small server that counts its requests, and the command that lends it."""

from __future__ import annotations

import sys
from pathlib import Path

LEND = [str(Path(sys.executable).with_name("libra-hpc")), "lend", "--slo", "ttft=500ms,tpot=150ms"]
SERVER = '''
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
