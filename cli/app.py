"""The `libra-hpc` command: all verbs, and the place where errors become a line on stderr and an exit code.

Exit codes: 0 good; 1 the operation failed; 2 wrong usage or run file; 3 Slurm unreachable; 130 interrupted.
"""

from __future__ import annotations

import codecs
import gc
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import typer.core

from libra_hpc.errors import OperationError, UserError, error_text

from .output import KEY, no_option, print_error, print_line

INTERRUPTED = 130
"""128 + SIGINT, as a shell reports it."""


def print_version(wanted: bool) -> None:
    """Print the version and exit, if ``wanted``."""
    if wanted:
        from importlib import metadata

        from libra_hpc import compiled

        print_line(
            f"libra-hpc {metadata.version('libra-hpc')} (scheduler"
            f" {'compiled' if compiled.in_use() else 'interpreted'})"
        )
        raise typer.Exit


class Verb(NamedTuple):
    """One verb: its help, and where it is.

    The function has no docstring of its own: the help of all verbs is shown without importing them.
    """

    help: str
    function: str
    """``module.function``; of a group of verbs its ``typer.Typer``."""
    example: str
    """Words after the verb."""
    page: str
    """Name of a file of ``docs``."""

    def epilog(self, name: str) -> str:
        """Last lines of its help."""
        return f"Example: libra-hpc {name} {self.example}\n\nPage: docs/{self.page}.md"


VERBS = {
    "submit": Verb(
        "Queue a run as one heterogeneous job.", "submit.submit", "run.toml -o optimizer.lr=1e-6 --wait", "runs"
    ),
    "status": Verb(
        "Show a run: job, stages, nodes, queue, the planner's last decision; an ended one's summary, with a picture.",
        "status.status",
        "RUN --watch",
        "planner",
    ),
    "logs": Verb("Print the end of a run's log files.", "logs.logs", "RUN --process host", "faults"),
    "cancel": Verb("Have a run save at its next step boundary and stop.", "cancel.cancel", "RUN", "runs"),
    "join": Verb("Give a running job more engines: idle nodes, from any allocation.", "join.join", "RUN", "borrow"),
    "lend": Verb(
        "Start a server whose idle GPU time is lent to runs; list and revoke those that lend.",
        "lend.app",
        "list",
        "borrow",
    ),
    "list": Verb("List runs, oldest first.", "list_runs.list_runs", "--runs DIR", "runs"),
    "sweep": Verb(
        "Queue a run for every combination of some values.",
        "sweep.sweep",
        "run.toml --over optimizer.lr=1e-6,3e-6",
        "runs",
    ),
    "show": Verb(
        "Print the text of the policy: trajectories of a step, with tool results and rewards.",
        "show.show",
        "RUN --step 40 --worst 3",
        "runs",
    ),
    "eval": Verb(
        "Evaluate a checkpoint or a model folder on a task, in a job without trainers.",
        "evaluate.evaluate",
        "RUN --task math --step best --wait",
        "tasks",
    ),
    "adapter": Verb(
        "Write the low-rank adapters of a checkpoint as a PEFT folder, for the model with which the run began.",
        "adapter.adapter",
        "RUN models/mine-adapter --step best",
        "models",
    ),
    "report": Verb(
        "Write one page about a run for others: plots, decisions, failures, configuration.",
        "report.report",
        "RUN --out page.html",
        "runs",
    ),
    "check": Verb(
        "Find mistakes in a run file: schema, model, task, memory, and the cluster's limits.",
        "check.check",
        "run.toml -o rollout.tp=2",
        "models",
    ),
    "plan": Verb(
        "Show the best plans for a run: split, parallelism, stage times, memory; needs no GPU.",
        "plan.plan",
        "run.toml -o task.work.trace=RUN",
        "plan",
    ),
    "simulate": Verb(
        "Replay a trace on simulated engines under several scheduling policies.",
        "simulate.simulate",
        "RUN/trajectories.jsonl --policy cmlfq,least_loaded",
        "scheduler",
    ),
    "init": Verb(
        "Write a site profile from what Slurm lists of this cluster.",
        "init.init",
        "--python .venv-cuda/bin/python",
        "site",
    ),
    "doctor": Verb(
        "Examine this site: Slurm, its plugins and partitions, interpreter, folders.",
        "doctor.doctor",
        "--submit",
        "site",
    ),
    "calibrate": Verb(
        "Measure engine steps or training steps of a model, in a job.",
        "calibrate.app",
        "train --model MODEL --tp 4 -o speed.json",
        "plan",
    ),
    "make-policy": Verb(
        "Make a tiny policy that can learn a task of few words.",
        "make_policy.make_policy",
        "models/tiny --task examples/keychain.py:KeyChain",
        "quickstart",
    ),
    "cluster": Verb("The embedded Slurm on this machine.", "cluster.app", "up", "quickstart"),
    "config": Verb(
        "Show the merged configuration of a run; explain keys.",
        "config_show.app",
        "explain rollout.tp",
        "configuration",
    ),
    "env": Verb(
        "Boxes of environments: which kind works on this machine, and on a node.",
        "env_verbs.app",
        "probe run.toml --partition cpu",
        "agents",
    ),
    "task": Verb(
        "Try a task: one episode, with the turns of a script or of a policy.", "task_try.app", "try run.toml", "tasks"
    ),
    "trace": Verb(
        "Recorded trajectories: inspect, generate; nodes of a run: layouts.",
        "trace.app",
        "inspect RUN/trajectories.jsonl",
        "scheduler",
    ),
}
"""In the order of the help.  Only the verb that is called is imported: cold, all of them take a second."""
ASCII = "libra-hpc"
"""Name of `in_ascii` among Python's ways to handle an error of encoding."""
SIMILAR = str.maketrans("━─▁▂▃▄▅▆▇█→…", "#-_.:-=+*#>.")
"""Characters of bars, curves and screens, and one of ASCII for each, so that columns stay in line."""
HELP = frozenset(("-h", "--help"))
COMPLETING = "_LIBRA_HPC_COMPLETE"
"""Variable with which a shell asks for completions; what has been typed is in the next two."""
TYPED = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")


class Words:
    """Coerces words of a command line; typer would import pydantic for them, a fifth of the time of `submit`."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        kind, many = param.type_descriptor.annotation, param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        if kind == list[str]:
            return list(value)
        if isinstance(kind, type) and isinstance(value, kind):
            return value
        if kind is Path:
            return Path(value)
        # A number, or one of some words.
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def plain(params: list[Any]) -> list[Any]:
    """Parameters with plain help, no type of a switch, whose values `Words` coerces."""
    for param in params:
        if getattr(param, "_runtime_param", plain) is None:
            # Another version of typer has no such attribute.
            param._runtime_param = Words()
        if isinstance(param, typer.core.TyperOption) and param.is_flag and param.metavar is None:
            param.metavar = ""
    return params


class Verbs(typer.core.TyperGroup):
    """The command line, or a verb with verbs of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        return plain(super().get_params(ctx))


class Command(typer.core.TyperCommand):
    """A verb, whose required arguments the help shows without braces."""

    def get_params(self, ctx: Any) -> list[Any]:
        return plain(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


def build(arguments: Sequence[str]) -> typer.Typer:
    """The command line with the verb that ``arguments`` call."""
    app = typer.Typer(
        name="libra-hpc",
        cls=Verbs,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": sorted(HELP)},
    )
    app.callback()(options)
    if COMPLETING in os.environ:
        # Program, verb, and so on.  A shell waits for the answer, so the other verbs are not imported here either.
        arguments = next((os.environ[name] for name in TYPED if name in os.environ), "").split()[1:]
    called = next((argument for argument in arguments if not argument.startswith("-")), "")
    for name, verb in VERBS.items():
        if name != called:
            app.command(name, help=verb.help)(_not_loaded)
            continue
        module, _, attribute = verb.function.partition(".")
        try:
            found = getattr(import_module(f".{module}", __package__), attribute)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("libra_hpc"):
                raise
            missing = elsewhere(name, error.name)
            if HELP.isdisjoint(arguments):
                raise missing from None
            app.command(name, help=f"{verb.help} {missing}", epilog=verb.epilog(name))(_not_loaded)
            continue
        if isinstance(found, typer.Typer):
            for command in found.registered_commands:
                command.cls = Command
            app.add_typer(found, name=name, help=verb.help, epilog=verb.epilog(name))
        else:
            app.command(name, help=verb.help, epilog=verb.epilog(name), cls=Command)(found)
    return app


def elsewhere(verb: str, package: str | None) -> UserError:
    """Why a verb does not work here: some run on the nodes alone, and a login node has less."""
    from libra_hpc.config.site import site_profile

    python = site_profile().get("compute", {}).get("python", "")
    where = f"{Path(python).with_name('libra-hpc')} {verb}" if python else "compute.python of the site profile"
    return UserError(f"{verb} needs {package}, which this environment lacks; that of the nodes has it: {where}.")


def _not_loaded() -> None:
    """Stands for a verb that is not called."""


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
        code = build(arguments)(args=list(arguments), prog_name="libra-hpc", standalone_mode=False)
    except (UserError, OperationError) as error:
        print_error(str(error))
        return error.exit_code
    except typer.TyperException as error:
        # Wrong usage; without a message (no command given) the help has been printed.
        message = sentence(error, arguments)
        if message:
            print_error(f"{message.rstrip('.')}.")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as error:
        # Of a file system, of memory or processes: no defect of a verb, and no mistake of its user.
        print_error(f"{error.filename or 'a file'}: {error_text(error)}.")
        return OperationError.exit_code
    return code if isinstance(code, int) else 0


def sentence(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """Typer's message as the others are: option, value, what is valid; the nearest name in parentheses."""
    if found := re.search(rf"extra argument\S* \(({KEY.pattern}\S*?)[ )]", error.format_message()):
        return str(no_option(found[1]))
    options = () if getattr(error, "param", None) is None else error.param.opts  # type: ignore[attr-defined]
    for name, value in pairwise([*arguments, ""]):
        given, mark, after = name.partition("=")
        if isinstance(error, typer.BadParameter) and given in options:
            return f"{given} = {(after if mark else value)!r}: {error.message[:1].lower()}{error.message[1:]}"
    what, mark, name = re.sub(r"^Invalid value for '([^']+)'", r"\1", error.format_message()).partition(
        ". Did you mean "
    )
    return f"{what} (did you mean {name})" if mark else what


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """What a terminal gets for characters that it cannot show."""
    assert isinstance(error, UnicodeEncodeError)
    return error.object[error.start : error.end].translate(SIMILAR).encode("ascii", "replace").decode(), error.end


def main() -> None:
    """Console script."""
    codecs.register_error(ASCII, in_ascii)
    # Imports and simulations make hundreds of thousands of objects that stay: looking for garbage took a tenth.
    gc.set_threshold(100_000)
    # `>&-` leaves no stream, and a verb writes all the same.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ASCII)
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
