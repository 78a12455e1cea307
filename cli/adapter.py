"""`libra-hpc adapter`: the adapters of a run with ``[lora]`` as a PEFT folder, beside its merged policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.config.load import load_resolved
from libra_hpc.errors import UserError, invalid
from libra_hpc.models.adapters import with_adapters
from libra_hpc.models.architecture import read_shape
from libra_hpc.state.saved_policies import LAST, chosen_policy
from libra_hpc.trainer.saved.shard_files import FOLDER, write_peft

from .output import print_line
from .runs import RUNS, RunsOption, find_run


def adapter(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run with lora.rank.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    step: Annotated[
        str, typer.Option("--step", metavar="N|best|last", help="Checkpoint of the run; default: last.")
    ] = LAST,
    runs: RunsOption = Path(RUNS),
) -> None:
    found = find_run(run, runs)
    config = load_resolved(found.readable_config)
    if not config.lora.rank:
        raise UserError(f"{found.name} trains all weights (lora.rank = 0): its policies are whole models.")
    number, policy = chosen_policy(found, "--step", step)
    if not (policy.parent / FOLDER).is_dir():
        raise invalid("--step", step, f"{policy} has no adapters beside it", "a step with a checkpoint")
    shape = with_adapters(read_shape(Path(config.model.path)), *config.lora.arguments)
    count = write_peft(policy.parent, shape, config.model.path, out)
    print_line(f"made {out}: {count} adapters of step {number}, rank {config.lora.rank}, for {config.model.path}")
