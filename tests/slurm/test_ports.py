"""On which interface MPI listens: a fact of docs/network.md."""

from __future__ import annotations

import importlib.util
import ipaddress
import time
from pathlib import Path

import pytest

from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm import local, submit
from libra_hpc.slurm.launch import Launch, job_request
from tests.slurm.scripts import MEETS

LISTENING = """
own = {os.readlink(path) for path in pathlib.Path(f"/proc/{link.pid}/fd").iterdir() if os.path.lexists(path)}
lines = [line.split() for line in pathlib.Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
listening = [fields[1].split(":")[0] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own]
(folder / f"listens-{owner.rank}").write_text(" ".join(listening))
owner.gather(b"")
os._exit(0)
"""


def test_the_mpi_process_of_a_rank_listens_on_the_named_interface_alone(tmp_path: Path) -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    (tmp_path / "world.py").write_text(MEETS + LISTENING)
    run = RunDir.create(tmp_path, "run")
    config = validate({"components": {"hybrid": {"nodes": 0}, "rollout": {"nodes": 0}}, "slurm": {"interface": "lo"}})
    run.write_config(config.as_data())
    local.start(Launch(job_request(config), run, 1, arguments=[str(tmp_path / "world.py"), str(run.path)]))
    while not submit.state(run).state.ended:
        time.sleep(0.05)
    found = [word for path in sorted(run.path.glob("listens-*")) for word in path.read_text().split()]
    assert len(list(run.path.glob("listens-*"))) == 2, [path.read_text() for path in run.logs(1).glob("*.log")]
    assert [str(ipaddress.ip_address(bytes.fromhex(word)[::-1])) for word in found] == ["127.0.0.1"] * 2
