"""The relay between a rank and Slurm's pmi2 plugin: values fit the plugin's buffer, and it ends with the rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from libra_hpc.slurm.pmi import REQUEST_BYTES, VALUE_BYTES, capped

MAXES = b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n"
"""Slurm's own."""
RANK = """
import os, re, socket, sys
plugin = socket.socket(fileno=int(os.environ["PMI_FD"]))
def ask(request):
    plugin.sendall(request)
    return plugin.recv(65536)
maxes = ask(b"cmd=get_maxes\\n")
value = b"5A" * ((int(re.search(rb"vallen_max=(\\d+)", maxes)[1]) - 2) // 2)
put = b"cmd=put kvsname=50001000.0 key=-allgather-1-3-seg-10/10 value=" + value + b"\\n"
sys.exit(ask(put) != b"cmd=put_result rc=0\\n")
"""


@pytest.mark.parametrize(
    ("reply", "passed_on"),
    [
        (MAXES, MAXES.replace(b"1024", b"896")),
        (b"cmd=maxes vallen_max=512 keylen_max=64\n", b"cmd=maxes vallen_max=512 keylen_max=64\n"),
        (b"cmd=get_result rc=0 value=vallen_max=1024\n", b"cmd=get_result rc=0 value=vallen_max=1024\n"),
        (b"37    cmd=kvs-get-response;vallen_max=1024;", b"37    cmd=kvs-get-response;vallen_max=1024;"),
        (b"", b""),
    ],
)
def test_only_the_announced_length_of_values_is_changed(reply: bytes, passed_on: bytes) -> None:
    assert capped(reply) == passed_on


def test_the_longest_request_fits_one_read() -> None:
    space, key = f"{2**32 - 1}.{2**32 - 1}", "k" * 64
    assert len(f"cmd=put kvsname={space} key={key} value={'5A' * (VALUE_BYTES // 2)}\n") <= REQUEST_BYTES


def exchange(program: Path) -> tuple[list[bytes], int]:
    """What a plugin that reads as Slurm's reads from a rank that publishes as much as it may, and how the rank
    ended."""
    plugin, theirs = socket.socketpair()
    argv = [sys.executable, "-m", "libra_hpc.slurm.pmi", str(program)]
    with plugin:
        with theirs:
            rank = subprocess.Popen(
                argv, env={**os.environ, "PMI_FD": str(theirs.fileno())}, pass_fds=(theirs.fileno(),)
            )
        requests = []
        while request := plugin.recv(REQUEST_BYTES):
            requests.append(request)
            if request == b"cmd=get_maxes\n":
                plugin.sendall(MAXES)
            elif request.startswith(b"cmd=put "):
                plugin.sendall(b"cmd=put_result rc=%d\n" % (not request.endswith(b"\n")))
    return requests, rank.wait()


def test_the_largest_value_arrives_whole(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    requests, code = exchange(program)
    assert (len(requests), code, requests[1][-1:]) == (2, 0, b"\n")


def test_an_abort_of_one_mpi_process_does_not_reach_slurm_which_would_kill_all_agents(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        'import os, socket; socket.socket(fileno=int(os.environ["PMI_FD"])).sendall(b"cmd=abort exitcode=5\\n")'
    )
    assert exchange(program) == ([], 0)


def test_the_relay_leaves_with_a_killed_rank(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert exchange(program) == ([], -9)


def test_without_a_plugin_the_program_is_started_as_it_is() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PMI_FD"}
    code = "import os, sys; print(sys.argv[1:], 'PMI_FD' in os.environ)"
    done = subprocess.run(
        [sys.executable, "-m", "libra_hpc.slurm.pmi", "-c", code, "two words"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['two words'] False\n"
