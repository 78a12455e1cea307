"""What compute nodes are asked by `libra-hpc doctor --submit`: one task a node.

Each question gets a `Finding`.  A node that cannot answer one goes on with the next, except that nodes which do not
meet cannot try a collective.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from libra_hpc.slurm.doctor import Finding, proxies
from libra_hpc.slurm.queue.cause import telling_line

PACKAGES = ("torch", "megatron.core", "vllm")
MPI = """
from libra_hpc.mesh.mpi_library import mpich_chosen
with mpich_chosen():
    from mpi4py import MPI
print(MPI.Get_library_version().split(chr(10))[0])
"""
REDUCED_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}
"""Size of one all-reduce: enough to be bound by the links, and 2 s on a link of 100 MB/s."""
REDUCTIONS = 5
MEET_S = 60.0
CHILD_S = 600.0
"""Limit of one import or engine start: longer than any that works."""
SLOW_S = 20.0
"""An import that takes this long comes from a cold or overloaded file system: 5 s from a node's own disk."""
ON_DISK = "envs/install.py SET --venv DIR --to-node, and compute.python = DIR/bin/python-on-node; or a container"


def probe(device: str, interface: str, local_dir: str, meeting: str) -> list[tuple[str, str, str, str]]:
    """Answer for this node; ``meeting``: a fresh folder that all nodes see.  Returns plain tuples of `Finding`, which
    the login node's interpreter can read whatever it has installed."""
    host = socket.gethostname()
    found = [Finding("node", "good", f"{host}: Python {sys.version.split()[0]}, {os.cpu_count()} CPUs")]
    found += [finding._replace(subject=f"{host}: {finding.subject}") for finding in proxies(os.environ)]
    found += [_asked(f"{host}: {name}", partial(_import, name)) for name in PACKAGES]
    found.append(_asked(f"{host}: MPI", lambda: (_child(MPI), "")))
    found.append(_asked(f"{host}: temporary folder", partial(_folder, local_dir)))
    world: Any = None

    def meet() -> tuple[str, str]:
        nonlocal world
        from libra_hpc.mesh.folder_meeting import FolderMeeting
        from libra_hpc.mesh.world import meet

        world = meet(FolderMeeting(Path(meeting), os.environ), interface)
        return f"{world.size} ranks, this one at {', '.join(world.endpoints[world.rank].addresses)}", ""

    found.append(_asked(f"{host}: meeting", meet))
    if world is not None:
        found.append(_asked(f"{host}: all-reduce", lambda: _all_reduce(world.rank, world.size, device, meeting)))
    if world is None or world.rank == 0:
        found.append(_asked(f"{host}: vLLM engine", partial(_engine, device)))
    return [(finding.subject, finding.state, finding.found, finding.fix) for finding in found]


def _asked(subject: str, question: Callable[[], tuple[str, str]]) -> Finding:
    """The answer to a question; ``question`` returns what was found and, if that is not good, what to do."""
    try:
        found, fix = question()
    except Exception as error:
        return Finding(subject, "bad", f"{type(error).__name__}: {error}"[:400], "docs/faults.md")
    return Finding(subject, "warning" if fix else "good", found, fix)


def _child(program: str, *arguments: str) -> str:
    """Last line that a Python process of its own prints: what crashes there, crashes alone."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CHILD_S,
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode:
        code = f"exit code {done.returncode}"
        raise RuntimeError(telling_line([(code, lines)]) or f"{code}: {lines[-1] if lines else 'no output'}")
    return lines[-1] if lines else ""


def _import(name: str) -> tuple[str, str]:
    began = time.monotonic()
    version = _child(
        "import importlib, sys; print(getattr(importlib.import_module(sys.argv[1]), '__version__', ''))", name
    )
    seconds = time.monotonic() - began
    return f"{version} imported in {seconds:.0f} s", ON_DISK if seconds > SLOW_S else ""


def _folder(local_dir: str) -> tuple[str, str]:
    place = Path(os.path.expandvars(local_dir) if local_dir else tempfile.gettempdir())
    place.mkdir(parents=True, exist_ok=True)
    free = [shutil.disk_usage(folder).free / 1e9 for folder in (place, Path("/dev/shm"))]
    found = f"{place}: {free[0]:.0f} GB free, /dev/shm: {free[1]:.0f} GB free"
    return found, "weights pass through /dev/shm: ask for more memory" if free[1] < 1.0 else ""


def _all_reduce(rank: int, size: int, device: str, meeting: str) -> tuple[str, str]:
    import datetime

    import torch
    import torch.distributed as dist

    from libra_hpc.trainer.device import backend, file_store

    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    dist.init_process_group(
        backend(place),
        store=file_store(f"{meeting}/store", size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=MEET_S),
    )
    count = REDUCED_BYTES[device]
    tensor = torch.ones(count // 4, device=place)
    dist.all_reduce(tensor)
    if float(tensor[-1]) != size:
        raise RuntimeError(f"the sum of {size} ones is {float(tensor[-1]):g}")
    seconds = []
    for _ in range(REDUCTIONS):
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    dist.destroy_process_group()
    sent = 2.0 * (size - 1) / size * count / sorted(seconds)[REDUCTIONS // 2]
    names = f" ({torch.cuda.get_device_name()})" if device == "cuda" else ""
    return f"{sent / 1e9:.2f} GB/s between {size} nodes{names}", ""


def _engine(device: str) -> tuple[str, str]:
    code = "import sys; from libra_hpc.agent.node_probe import try_engine; print(try_engine(sys.argv[1]))"
    return _child(code, device), ""


def try_engine(device: str) -> str:
    """Start an engine with a tiny policy of random weights and have it generate; in a process that has not imported
    torch or vLLM yet."""
    from libra_hpc.engine.offline import OfflineEngine
    from libra_hpc.engine.settings import alone
    from libra_hpc.protocol.codec import pack_i32
    from libra_hpc.protocol.engine import Generate
    from libra_hpc.tasks.tiny_policy import write_folder

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        policy = str(Path(folder) / "policy")
        write_folder(policy, ())
        sizes = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_mb": 64}
        config = alone(policy, device, dtype="float32" if device == "cpu" else "bfloat16", rollout=sizes)
        with OfflineEngine(config) as engine:
            (answer,) = engine.generate([Generate("0", pack_i32([1, 2, 3]), 8)])
    return f"started and generated {len(answer.tokens) // 4} tokens in {time.monotonic() - began:.0f} s"
