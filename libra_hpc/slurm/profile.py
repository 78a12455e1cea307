"""The text of a site profile, from what Slurm lists of its partitions: pure."""

from __future__ import annotations

from collections.abc import Sequence

from libra_hpc.config.node_groups import STAGES
from libra_hpc.slurm.queue.query import Partition

TEXT = """\
# Facts of this cluster, for every run: a run file wins over what stands here.
# All keys: libra-hpc config explain; where else a profile may stand: docs/site.md.

[run]
# dir = "/shared/$USER/runs"          # a folder that every node sees

[slurm]
{device}
{account}
# gpu_option = "--gres=gpu:{{type}}:{{gpus}}"  # "none": whole nodes are given; libra-hpc doctor tries others
# mem_option = "--mem"                # or "--mem-per-cpu", "--mem-per-gpu", "none"
# mail = "me@site.org"

[compute]
{python}
# setup = ["module load cuda"]        # lines of the batch script, before the agents start
# container = "apptainer"             # or "pyxis"
# image = "/shared/images/libra.sif"
# binds = ["/shared"]
# local_dir = "/scratch/$USER"
# cache_dir = "/shared/$USER/compiled"  # compiled code, for all nodes and later jobs

[compute.env]
# NCCL_IB_HCA = "mlx5"
"""


NO_GPUS = """\
# Slurm lists no GPUs.  Where nodes with GPUs are given whole: gpu_option = "none", and gpus of each component.
# device = "cuda\""""


def profile_text(known: Sequence[Partition], python: str = "", account: str = "") -> str:
    """A profile for these partitions.  GPU components get the partition with the most GPUs; the planner one without
    GPUs, where there is one."""
    up = [part for part in known if part.state == "up"]
    # Of several with the same nodes, the default one: others may preempt.
    largest = min(
        up, key=lambda part: (-part.nodes * sum(part.whole_gpus.values()), not part.default, part.name), default=None
    )
    lines = TEXT.format(
        device='device = "cuda"' if largest is not None and largest.gpus else NO_GPUS,
        account=f'account = "{account}"' if account else '# account = ""',
        python=f'python = "{python}"' if python else '# python = "/shared/libra/bin/python"',
    ).splitlines()
    plain = next((part for part in up if not part.gpus), None)
    planner = plain or largest
    if planner is not None:
        lines += ["", "[components.planner]", f'partition = "{planner.name}"']
    if largest is not None:
        for name in STAGES:
            lines += ["", f"[components.{name}]", f'partition = "{largest.name}"']
            if largest.gpus:
                kind, count = max(largest.whole_gpus.items(), key=lambda item: item[1])
                lines += [f"gpus = {count}", *([f'gpu_type = "{kind}"'] if kind else [])]
    return "\n".join(lines) + "\n"
