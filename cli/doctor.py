"""`libra-hpc doctor`: whether this site has what a run needs, with a way out of each fault."""

from __future__ import annotations

import typer
from rich.table import Table

from libra_hpc.config.load import validate
from libra_hpc.config.site import places, site_profile
from libra_hpc.errors import SlurmUnreachable
from libra_hpc.slurm.doctor import examine
from libra_hpc.slurm.site import slurm_environment

from .output import say, say_json, show
from .runs import JsonOption

MARKS = {"good": "ok", "warning": "?", "bad": "no"}


def doctor(json: JsonOption = False) -> None:
    """Examine this site: Slurm, its plugins and partitions, the nodes' interpreter, the shared folder."""
    profile = site_profile()
    config = validate(profile.values)
    why = ""
    try:
        environment = slurm_environment()
    except SlurmUnreachable as error:
        environment, why = None, str(error).rstrip(".")
    found = examine(config, environment, why)
    bad = any(finding.state == "bad" for finding in found)
    files = [str(path) for path in places() if path.exists()]
    if json:
        say_json({"good": not bad, "site_files": files, "findings": [finding._asdict() for finding in found]})
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("", "what", "found", "to do"):
            table.add_column(column, overflow="fold")
        for finding in found:
            table.add_row(MARKS[finding.state], finding.subject, finding.found, finding.fix)
        show(table)
        say(f"site profile: {', '.join(files) or 'none (libra-hpc init writes one)'}")
    if bad:
        raise typer.Exit(1)
