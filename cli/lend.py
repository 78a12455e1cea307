"""`libra-hpc lend`: start a server whose GPU is lent to runs while its users leave it; list and revoke what is lent.

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
from typing import Annotated, Any

import msgspec
import typer

from libra_hpc.annexes.lend import lender
from libra_hpc.annexes.lend import lender_record as records
from libra_hpc.annexes.lend.beside_server import libra_hpc_serving as serving
from libra_hpc.annexes.lend.lender_record import Hours, LenderRecord, LendTerms, first_token_s, memory_mib
from libra_hpc.errors import OperationError, error_text, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.series import duration
from libra_hpc.facts.status import read_status, short_count
from libra_hpc.gate.page import Page
from libra_hpc.process.agent_folders import PREFIX

from .output import narrow_table, print_json, print_line, print_note, show
from .runs import JsonOption, WeightsOption

MIDDLEWARE = "libra_hpc_serving.Watch"


app = typer.Typer(no_args_is_help=True)


@app.command("serve", help="Start a server whose idle GPU time is lent to runs.")
def serve(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The server's command.")] = None,
    slo: Annotated[str, typer.Option("--slo", metavar="LIMITS", help="Such as ttft=500ms.")] = "",
    hours: Annotated[str, typer.Option("--hours", metavar="FROM-TO", help="Such as 20-08; default: always.")] = "",
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help="Of each GPU, such as 30GiB.")] = "",
    tp: Annotated[int, typer.Option("--tp", min=0, metavar="N", help="GPUs of an engine; default: the run's.")] = 0,
    engines: Annotated[int, typer.Option("--engines", min=1, metavar="N", help="Engines of a guest.")] = 1,
    weights_mb_s: WeightsOption = 0.0,
    runs: Annotated[Path | None, typer.Option("--runs", metavar="DIR", help="Folder of runs that may borrow.")] = None,
) -> None:
    ttft_s = first_token_s(slo)
    Hours.parse(hours)
    terms = LendTerms(ttft_s, hours, memory_mib(memory), tp, engines, weights_mb_s)
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
        place = records.folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        records.remove_ended(place)
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
    print_note(f"lender {name}: what it gives is in `libra-hpc lend list`")
    return page


def watched(command: list[str]) -> list[str]:
    """Arguments by which a server counts its requests; explains how where it is not known."""
    words = [os.path.basename(word) for word in command]
    if ("vllm" in words and "serve" in words) or "vllm.entrypoints.openai.api_server" in words:
        return ["--middleware", MIDDLEWARE]
    print_note(f"this server lends nothing until its ASGI app is wrapped: app = {MIDDLEWARE}(app)")
    return []


def _python_path() -> str:
    beside = str(Path(serving.__file__).parent)
    return os.pathsep.join(filter(None, (beside, os.environ.get("PYTHONPATH", ""))))


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A lender of `lend list`.")]


@app.command("list", help="List servers that lend: to which runs, for what price, what they gave, and why not now.")
def list_lenders(as_json: JsonOption = False) -> None:
    found = [facts(name, *known) for name, known in records.all_records(records.folder()).items()]
    if as_json:
        print_json(found)
    elif not found:
        print_note("nobody lends; `libra-hpc lend serve` starts a server that does")
    else:
        made = narrow_table(
            "lender~", "state~", "run~", "saves>", "price>", "lent>", "tokens>", "revoked>", "users ms>"
        )
        for one in found:
            made.add_row(*row(one))
        show(made)


@app.command("revoke", help="Have a lender give nothing from now on.")
def revoke(name: NameArgument, back: Annotated[bool, typer.Option("--return", help="It gives again.")] = False) -> None:
    place = records.folder()
    known = records.all_records(place)
    if name not in known:
        raise invalid("NAME", name, "no such lender", sorted(known) or "there are none")
    file = records.revoked_file(place, name)
    try:
        file.unlink(missing_ok=True) if back else file.touch(mode=0o600)
    except OSError as error:
        raise OperationError(f"{place} cannot be written: {error_text(error)}.") from error
    print_line(f"{name} gives again" if back else f"{name} gives nothing from now on; its guest frees the GPU")


def facts(name: str, record: LenderRecord | None, gone: bool) -> dict[str, Any]:
    """Facts for JSON, without what identifies its process."""
    if record is None:
        return {"name": name, "state": "gone" if gone else "unknown", "why": "its record cannot be read"}
    known = msgspec.to_builtins(record) | {"offers": [] if gone else [priced(name, run) for run in record.offers]}
    for private in ("boot", "ticks"):
        del known[private]
    return {**known, "state": "gone", "why": "its lender has ended", "borrower": ""} if gone else known


def priced(name: str, run: str) -> dict[str, Any]:
    """What a run saves with a lender over its remaining steps, and must save to take it; None: not evaluated."""
    status = read_status(RunDir(Path(run)), 0)
    worth = status.decision.lenders.get(name) if status is not None and status.decision is not None else None
    saves_s, price_s = worth or (None, None)
    return {"run": run, "saves_s": saves_s, "price_s": price_s}


def row(fact: dict[str, Any]) -> list[str]:
    """Cells of one lender, with a line for each run that it is offered to."""
    offers = fact.get("offers", [])
    why = f": {fact['why']}" if fact["why"] else ""
    each = [[Path(one["run"]).name, *map(_seconds, (one["saves_s"], one["price_s"]))] for one in offers]
    lent, tokens = duration(fact.get("lent_s", 0.0)), short_count(fact.get("tokens", 0))
    cells = ["\n".join(column) for column in zip(*each, strict=True)] or ["-"] * 3
    alone, beside = fact.get("alone_ms", 0.0), fact.get("beside_ms", 0.0)
    harm = f"{alone:.0f} → {beside:.0f}" if alone and beside else "-"
    return [fact["name"], f"{fact['state']}{why}", *cells, lent, tokens, str(fact.get("revoked", 0)), harm]


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:,.0f} s"
