"""The `libra-hpc` command: all verbs, and the place where errors become a line on stderr and an exit code.

Exit codes: 0 good; 1 the operation failed; 2 wrong usage or run file; 3 Slurm unreachable; 130 interrupted.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from libra_hpc import compiled
from libra_hpc.errors import OperationError, UserError

from . import (
    calibrate,
    cancel,
    check,
    cluster,
    config_show,
    doctor,
    init,
    list_runs,
    logs,
    make_policy,
    plan,
    repartition,
    simulate,
    status,
    submit,
    summary,
    trace,
)
from .output import print_error, print_line

INTERRUPTED = 130
"""128 + SIGINT, as a shell reports it."""


def print_version(wanted: bool) -> None:
    """Print the version and exit, if ``wanted``."""
    if wanted:
        print_line(
            f"libra-hpc {metadata.version('libra-hpc')} (scheduler"
            f" {'compiled' if compiled.in_use() else 'interpreted'})"
        )
        raise typer.Exit


app = typer.Typer(
    name="libra-hpc",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("submit")(submit.submit)
app.command("status")(status.status)
app.command("logs")(logs.logs)
app.command("cancel")(cancel.cancel)
app.command("repartition")(repartition.repartition)
app.command("list")(list_runs.list_runs)
app.command("summary")(summary.summary)
app.command("check")(check.check)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("init")(init.init)
app.command("doctor")(doctor.doctor)
app.command("calibrate")(calibrate.calibrate)
app.command("make-policy")(make_policy.make_policy)
app.add_typer(cluster.app, name="cluster")
app.add_typer(config_show.app, name="config")
app.add_typer(trace.app, name="trace")


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=print_version,
            help="Print the version, and whether the scheduler is compiled.",
        ),
    ] = False,
) -> None:
    """Agentic RL post-training on Slurm: one run file, one heterogeneous job."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        code = app(args=list(arguments), prog_name="libra-hpc", standalone_mode=False)
    except (UserError, OperationError) as error:
        print_error(str(error))
        return error.exit_code
    except typer.TyperException as error:
        # Wrong usage; without a message (no command given) the help has been printed.
        message = error.format_message()
        if message:
            print_error(f"{message.rstrip('.')}.")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def main() -> None:
    """Console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character gets a question mark for it.
            stream.reconfigure(errors="replace")
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has ended: no error.  Without stdout the interpreter's flush at exit is quiet.
        sys.stdout = None
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    main()
