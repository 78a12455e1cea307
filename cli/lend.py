"""`libra-hpc lend`: start a server whose GPU is lent to runs while its users leave it.

- Everything is checked before anything starts.
- The lender is started as a process of its own; then the server's command takes the place of this one, so that it is
  the job's main process and outlives the lender.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from libra_hpc.annexes.lend import lender, lender_record
from libra_hpc.annexes.lend.beside_server import libra_hpc_serving as serving
from libra_hpc.annexes.lend.hours import Hours
from libra_hpc.annexes.lend.terms import Give, LendTerms, Slo, memory_mib
from libra_hpc.errors import OperationError, error_text, invalid
from libra_hpc.gate.page import Page
from libra_hpc.process.agent_folders import PREFIX

from .output import print_note
from .runs import WeightsOption

MIDDLEWARE = "libra_hpc_serving.Watch"
GIVES: tuple[Give, ...] = ("idle", "slack")


def lend(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The server's command.")] = None,
    slo: Annotated[str, typer.Option("--slo", metavar="LIMITS", help="Such as ttft=500ms,tpot=150ms.")] = "",
    give: Annotated[str, typer.Option("--give", metavar="WHAT", help="idle, or slack: also beside users.")] = "idle",
    hours: Annotated[str, typer.Option("--hours", metavar="FROM-TO", help="Such as 20-08; default: always.")] = "",
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help="Of each GPU, such as 30GiB.")] = "",
    headroom: Annotated[
        float, typer.Option("--headroom", min=0.0, max=0.49, metavar="SHARE", help="Of the server's KV, to stay free.")
    ] = 0.0,
    tp: Annotated[int, typer.Option("--tp", min=0, metavar="N", help="GPUs of an engine; default: the run's.")] = 0,
    engines: Annotated[int, typer.Option("--engines", min=1, metavar="N", help="Engines of a guest.")] = 1,
    weights_mb_s: WeightsOption = 0.0,
    runs: Annotated[Path | None, typer.Option("--runs", metavar="DIR", help="Folder of runs that may borrow.")] = None,
) -> None:
    if not slo:
        raise invalid("--slo", slo, "not given", "ttft=TIME,tpot=TIME, such as ttft=500ms,tpot=150ms")
    limits = Slo.parse(slo)
    if give not in GIVES:
        raise invalid("--give", give, "unknown value", GIVES)
    Hours.parse(hours)
    terms = LendTerms(
        limits.ttft_s, limits.tpot_s, give, hours, memory_mib(memory), tp, engines, headroom, weights_mb_s
    )
    if runs is None or not runs.is_dir():
        raise invalid("--runs", str(runs or ""), "no such folder", "the folder of the runs that may borrow")
    if not command:
        raise invalid("COMMAND", "", "not given", "the server's command after --")
    if shutil.which(command[0]) is None:
        raise invalid("COMMAND", command[0], "no such program", "the server's command after --")
    page = start_lender(terms, runs.absolute())
    environment = {**os.environ, serving.VARIABLE: str(page), "PYTHONPATH": _python_path()}
    command = [*command, *watched(command)]
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise OperationError(f"{command[0]} cannot be started: {error_text(error)}.") from error


def start_lender(terms: LendTerms, runs: Path) -> Path:
    """Start the lender of this process; returns its page."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    try:
        place = lender_record.folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        page = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base)) / "page"
        Page.create(page)
    except OSError as error:
        raise OperationError(f"Nothing can be lent: {error.filename}: {error_text(error)}.") from error
    job = os.environ.get("SLURM_JOB_ID") or os.getpid()
    name = re.sub(r"[^\w.-]", "-", f"{socket.gethostname().partition('.')[0]}-{job}")
    settings = lender.LendSettings(name, terms, str(runs), str(page), os.getpid())
    argv = [sys.executable, "-m", "libra_hpc.annexes.lend.lender", msgspec.json.encode(settings).decode()]
    # A session of its own: Ctrl-C ends the server, and the lender follows in order.
    subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    print_note(f"lender {name}: what it gives is in `libra-hpc lenders`")
    return page


def watched(command: list[str]) -> list[str]:
    """Arguments by which a server counts its requests; says how where it is not known."""
    words = [os.path.basename(word) for word in command]
    if ("vllm" in words and "serve" in words) or "vllm.entrypoints.openai.api_server" in words:
        return ["--middleware", MIDDLEWARE]
    print_note(f"this server lends nothing until its ASGI app is wrapped: app = {MIDDLEWARE}(app)")
    return []


def _python_path() -> str:
    beside = str(Path(serving.__file__).parent)
    return os.pathsep.join(filter(None, (beside, os.environ.get("PYTHONPATH", ""))))
