"""`libra-hpc env`: boxes of this machine and of the cluster's nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.boxes.box_probe import TriedBox, tried_all
from libra_hpc.config.load import with_values
from libra_hpc.errors import OperationError, UserError

from .check import load, site_config
from .job_wait import on_a_node
from .output import print_json, show, table
from .runs import JsonOption

HERE = "this machine"
NODE = {"components.env.nodes": 1, "components.env.cpus": 1, "components.env.mem": "1G", "components.env.gpus": 0}
"""What the trial needs of a node."""
TIME_LIMIT = "00:05:00"

app = typer.Typer(no_args_is_help=True)


@app.command("probe", help="Try boxes: which kind works, what a start and a command cost, and why others do not work.")
def probe_boxes(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN_FILE", help="Its [env]. Default: that of the site profile.")
    ] = None,
    partition: Annotated[
        list[str], typer.Option("--partition", metavar="NAME", help="On a node of it, in a job; repeatable.")
    ] = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    config = site_config() if run_file is None else load(run_file, [])
    rows: list[tuple[str, TriedBox]] = []
    for name in partition:
        there = with_values(config, NODE | {"components.env.partition": name})
        try:
            found = on_a_node(
                tried_all, config.env, config=there, component="env", name="libra-boxes", time_limit=TIME_LIMIT
            )
        except (UserError, OperationError) as error:
            found = [("-", str(error), 0.0, 0.0)]
        rows += [(name, TriedBox(*one)) for one in found]
    if not partition:
        rows = [(HERE, TriedBox(*one)) for one in tried_all(config.env)]
    if json:
        print_json([{"where": where, "works": not one.why, **one._asdict()} for where, one in rows])
        return
    made = table("where", "box", "works", "~", box=None)
    for where, one in rows:
        made.add_row(where, one.sandbox, "no" if one.why else "yes", one.why or one.cost)
    show(made)
