"""`libra-hpc archive`: keep what is known of a run, without what it needed to go on.

- Kept: run file, configuration, events, metrics, status, result, and the report, summary and picture as of now.
- As options: the exported policy, logs, trajectories, decisions.
- The archive is complete once it has its name; summary, report, compare and list read it as any run.
- ``--remove`` -> the run's folder goes, under the run's lease, after the archive is there.
"""

from __future__ import annotations

import contextlib
import json as json_text
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from libra_hpc.errors import OperationError, UserError, error_text, invalid
from libra_hpc.facts import series
from libra_hpc.facts.columns import as_json
from libra_hpc.facts.rundir import PRIVATE, RunDir
from libra_hpc.facts.summary import summarise
from libra_hpc.files import write_atomic
from libra_hpc.owner.claim import HeldLease
from libra_hpc.state.saved_policies import BEST, LAST, chosen_policy

from . import jobs, register
from .disk_use import PARTS, in_words, use
from .output import busy, print_json, print_line, print_note
from .register import RegisterLine
from .runs import RUNS, JsonOption, RunArgument, RunsOption, find_run, job_id

ARCHIVES = "archive"
"""Folder of archives beside the runs, by default."""
POLICIES = ("none", LAST, BEST)
KEEP = ("logs", "trajectories", "decisions")


def archive(
    run: RunArgument = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="Parent of the archive; default: archive/ beside the run."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="|".join(POLICIES),
            help="Keep this exported policy, too; best: by checkpoint.best, or by reward.",
        ),
    ] = None,
    keep: Annotated[
        list[str], typer.Option("--keep", metavar="|".join(KEEP), help="Keep this part, too; repeatable.")
    ] = [],  # noqa: B006
    remove: Annotated[bool, typer.Option("--remove", help="Then remove the run's folder.")] = False,
    json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    if remove and policy is None:
        raise UserError(
            "--remove needs --policy last, best or none: all weights of the run but these are removed, too."
        )
    for option, value, valid in (("--policy", policy or "none", POLICIES), *(("--keep", one, KEEP) for one in keep)):
        if value not in valid:
            raise invalid(option, value, "unknown value", valid)
    found = find_run(run, runs)
    found.resolved()
    refuse_if_alive(found)
    place = new_place(found, found.path.parent / ARCHIVES if to is None else to)
    kept = None if policy in (None, "none") else chosen_policy(found, "--policy", policy)
    step, weights = kept or (None, None)
    with held(found) if remove else contextlib.nullcontext():
        # Somebody may have resumed it just before.
        refuse_if_alive(found)
        with busy("archiving"):
            before = use(found)["total"]
            facts = {"run": found.name, "from": str(found.path), "before": before, "policy_step": step}
            write(found, place, keep, weights, facts)
        after = use(place)["total"]
        if remove:
            removed(found, place)
    if json:
        print_json({**facts, "path": str(place.path), "after": after, "removed": remove})
        return
    gone = "the run's folder is removed" if remove else f"{found.path} stays (--remove removes it)"
    weights_of = "" if step is None else f" with the policy of step {step}"
    print_line(f"{found.name}: {in_words(before)} -> {in_words(after)} in {place.path}{weights_of}; {gone}")


def refuse_if_alive(run: RunDir) -> None:
    """Raise `UserError` unless it is known that nothing goes on with the run."""
    state = jobs.state(run)
    if not state.over:
        reason = f" ({state.reason})" if state.state == "unknown" and state.reason else ""
        why = f"its job {job_id(run)} is {state.words}{reason}"
        raise invalid("RUN", run.name, why, f"a run that has ended (libra-hpc cancel {run.name} ends it)")


def new_place(run: RunDir, parent: Path) -> RunDir:
    """Where the archive will be; raises `UserError` where it cannot."""
    place = RunDir(parent / run.name)
    if register.real(place).is_relative_to(register.real(run)):
        raise invalid("--to", str(parent), "it is inside the run", "another folder")
    if place.path.exists():
        raise invalid("--to", str(parent), f"{place.path} exists", "a folder without an archive of this run")
    return place


def write(run: RunDir, place: RunDir, keep: list[str], weights: Path | None, facts: dict[str, Any]) -> None:
    """Write the archive under another name and rename it; raises `OperationError` when that fails."""
    unfinished = RunDir(place.path.with_name(f".{place.name}.unfinished"))
    try:
        shutil.rmtree(unfinished.path, ignore_errors=True)
        unfinished.path.mkdir(mode=PRIVATE, parents=True)
        for path in kept_files(run, keep, weights):
            inner = path.relative_to(run.path)
            if weights is not None and path.is_relative_to(weights):
                inner = Path(run.policy.name) / path.relative_to(weights)
            copy(path, unfinished.path / inner)
        write_views(run, unfinished)
        unfinished.write_json(unfinished.archive, facts | msgspec.to_builtins(register.of_run(run)))
        shutil.copymode(run.path, unfinished.path)
        unfinished.path.rename(place.path)
    except OSError as error:
        shutil.rmtree(unfinished.path, ignore_errors=True)
        raise OperationError(f"The archive {place.path} cannot be written: {error_text(error)}.") from error


def kept_files(run: RunDir, keep: list[str], weights: Path | None) -> Iterator[Path]:
    """Files of the run that stay: those beside the folders, without the parts that are not to be kept."""
    left = {name for part, names in PARTS.items() if part not in keep for name in names}
    for path in sorted(run.path.iterdir()):
        if path.is_file() and path.name not in left and not path.name.startswith("."):
            yield path
    folders = [run.path / "logs"] if "logs" in keep else []
    for folder in (*folders, *([weights] if weights is not None else [])):
        yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def copy(path: Path, new: Path) -> None:
    """Copy a file, and have it on the disk."""
    new.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, new)
    with new.open("rb") as file:
        os.fsync(file.fileno())


def write_views(run: RunDir, place: RunDir) -> None:
    """Report, summary and picture of the whole run: the archive has no trajectories to make them from."""
    from libra_hpc.pictures.report_page import page
    from libra_hpc.pictures.run_picture import plot

    from .report import ending

    write_atomic(place.report, page(run, ending(run), time.time()).encode(), 0o600)
    summary = msgspec.structs.replace(summarise(run), state=jobs.state(run).state)
    write_atomic(place.path / "summary.json", json_text.dumps(as_json(summary), indent=1).encode() + b"\n")
    if series.steps(run):
        try:
            plot(run, place.summary_picture)
        except UserError as error:
            print_note(f"no picture: {error}")


def held(run: RunDir) -> HeldLease:
    """The run's lease; imports what queues runs, which an archive alone needs not."""
    from .submit import claimed

    return claimed(run, "RUN")


def removed(run: RunDir, place: RunDir) -> None:
    """Remove a run's folder, and give its tags and notes in the register to the archive."""
    known, folder, new = register.of_run(run), register.real(run), str(register.real(place))
    going = folder.with_name(f".{folder.name}.removed")
    lines = [RegisterLine(new), *(RegisterLine(new, "tag", tag) for tag in known.tags)]
    lines += [RegisterLine(new, "note", note.text, note.t) for note in known.notes]
    try:
        folder.rename(going)
        register.note_down([*lines, RegisterLine(str(folder), "forget")])
        if run.path.is_symlink():
            run.path.unlink()
        shutil.rmtree(going)
    except OSError as error:
        raise OperationError(
            f"The archive {place.path} is complete, but {going if going.exists() else folder} cannot be removed:"
            f" {error_text(error)}."
        ) from error
