"""How ranks find each other: real MPI ranks on this machine, and the sentence when they cannot go on."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from libra_hpc.mesh import world
from libra_hpc.mesh.folder_meeting import FolderMeeting
from libra_hpc.mesh.world import Endpoint, _reach, own_addresses
from tests.mesh.test_mesh import ranks

PROGRAM = """
import json, os, sys
from pathlib import Path
from libra_hpc.errors import OperationError
from libra_hpc.mesh import world
from libra_hpc.process.owner_link import OwnerLink
out, interface, problem = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def listening():
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)}
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
owner = OwnerLink()
rank = owner.rank
try:
    met = world.meet(owner, interface, problem if rank == 1 else "")
    facts = {"rank": met.rank, "addresses": [e.addresses for e in met.endpoints], "secret": met.secret.hex()}
    facts["listening"] = listening()
    facts["port"] = met.endpoints[rank].port
except world.NoWorld as error:
    facts = {"rank": error.rank, "problem": str(error)}
(out / f"{rank}.json").write_text(json.dumps(facts))
os._exit(0)
"""


def meet(tmp_path: Path, interface: str = "", problem: str = "") -> list[dict[str, object]]:
    """What two ranks saw."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks(2, tmp_path, program, str(tmp_path), interface, problem)
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_of_one_machine_listen_on_loopback_with_one_port_and_share_a_secret(tmp_path: Path) -> None:
    first, second = meet(tmp_path)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["addresses"] == second["addresses"] == [["127.0.0.1"], ["127.0.0.1"]]
    assert first["secret"] == second["secret"]
    assert len(str(first["secret"])) == 64
    for facts in (first, second):
        assert facts["listening"] == [facts["port"]], "and nothing else"


def test_an_interface_that_is_not_there_is_reported_by_every_rank(tmp_path: Path) -> None:
    for facts in meet(tmp_path, interface="ib7"):
        assert "slurm.interface = 'ib7'" in str(facts["problem"])
        assert "it has" in str(facts["problem"])


def test_a_problem_of_one_rank_is_the_answer_of_all(tmp_path: Path) -> None:
    assert [facts["problem"] for facts in meet(tmp_path, problem="the configuration is torn")] == [
        "the configuration is torn"
    ] * 2


def test_the_named_interface_alone_is_listened_on(tmp_path: Path) -> None:
    assert [facts["addresses"] for facts in meet(tmp_path, interface="lo")] == [[["127.0.0.1"], ["127.0.0.1"]]] * 2


def test_ranks_without_an_owner_meet_by_files_that_nobody_else_reads(tmp_path: Path) -> None:
    def met(rank: int, restart: str) -> world.World:
        slurm = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restart}
        return world.meet(FolderMeeting(tmp_path, slurm), "lo")

    secrets = set()
    with ThreadPoolExecutor() as pool:
        for restart in ("0", "1"):
            first, second = pool.map(met, range(2), [restart] * 2)
            assert (first.rank, second.rank, first.endpoints) == (0, 1, second.endpoints)
            secrets |= {first.secret, second.secret}
            first.listener.close()
            second.listener.close()
    assert len(secrets) == 2, "a job that is queued again has another"
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("7-*/*")} == {0o600}


def test_a_planner_out_of_reach_is_named_with_what_was_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        own = Endpoint("node-3", ("127.0.0.1",), 1)
        planner = Endpoint("node-0", ("127.0.0.1",), port)
        assert _reach(planner, own) == ""
        assert "node-3 has no network address" in _reach(planner, Endpoint("node-3", (), 1))
    why = "set slurm.interface to a network that all nodes share"
    assert _reach(planner, own) == f"node-3 cannot reach the planner's node node-0 (127.0.0.1 port {port}): {why}"


def test_a_planner_out_of_reach_is_waited_for_where_the_ranks_have_met_before() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        own, planner = (Endpoint(name, ("127.0.0.1",), server.getsockname()[1]) for name in ("node-3", "node-0"))
        assert "node-3 cannot reach" in _reach(planner, own, 0.2)
        back = threading.Timer(1.0, server.listen)
        back.start()
        assert _reach(planner, own, 30.0) == ""
        back.join()


def test_loopback_is_no_address_for_others_unless_it_is_named() -> None:
    assert not {"127.0.0.1", "::1"} & set(own_addresses())
    assert "127.0.0.1" in own_addresses("lo")


ALONE = "ip link set lo up; ip addr del 127.0.0.1/8 dev lo; exec "


def test_ranks_of_a_machine_without_ipv4_meet(tmp_path: Path) -> None:
    net = ["unshare", "--map-root-user", "--net", "sh", "-ec"]
    if subprocess.run([*net, f"{ALONE} true"], capture_output=True).returncode:
        pytest.skip("no network without IPv4 can be made here")
    (tmp_path / "program.py").write_text(PROGRAM)
    ranks = f"{sys.executable} -m tests.mesh.local_ranks 2 {tmp_path}"
    program = f"{sys.executable} {tmp_path}/program.py {tmp_path} '' ''"
    subprocess.run([*net, f"{ALONE} {ranks} {program}"], check=True, timeout=120)
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["addresses"] for one in facts] == 2 * [[["::1"], ["::1"]]]
