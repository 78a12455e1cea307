"""What another user of the node tries with a run and its owner, in a process of another uid."""

from __future__ import annotations

import asyncio
import email.parser  # noqa: F401  # another user may not be able to read the interpreter's files
import encodings.idna  # noqa: F401
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from libra_hpc_cli import app, jobs

from libra_hpc import api
from libra_hpc.annexes.lend import guest_process, lender_record
from libra_hpc.annexes.lend import lender_record as records
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import NEW, OWNER_ONLY, write_atomic
from libra_hpc.mesh import door, links
from libra_hpc.mesh.world import Endpoint, World
from libra_hpc.owner.claim import acquire
from libra_hpc.process import agent_folders
from libra_hpc.protocol.joining import AT_THE_DOOR, FIRST_GUEST, DoorRecord, guest_secret
from libra_hpc.slurm import submit
from libra_hpc.weights import offers, parts, server, wire

from .conftest import RUN, Cli, Queue, write_status

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

OTHER = 65533
OPTION = 918273645
SECRET = "s3cr3t-of-the-owner"
SHARED = f"""
[compute]
env = {{ WANDB_API_KEY = "{SECRET}" }}
[task.options]
seed = {OPTION}
[borrow]
lenders = "any"
"""
Scene = SimpleNamespace
"""A shared ``run`` of the owner, the ``pid`` of a process of it, its ``folders`` on the node, and its ports."""


def as_other(act: Callable[[], object]) -> str:
    """What stops another user of the same group who does so; empty: nothing does."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            os.setgroups([])
            os.setuid(OTHER)
            act()
        except BaseException as error:
            os.write(writing, f"{type(error).__name__} {error}".encode()[:4000])
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading) as file:
        return file.read()


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(params=["group", "all"])
def shared(
    request: pytest.FixtureRequest, folder: Path, site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> RunDir:
    """A run that its owner shares, with the umask that lets the group write, and whose ranks have an open door."""
    monkeypatch.setattr(jobs, "queue", submit.submit)
    monkeypatch.setattr(submit, "cluster_name", lambda env: "")
    monkeypatch.setattr(submit, "_sbatch", lambda *_: "4711")
    before = os.umask(0o002)
    try:
        (site / "run.toml").write_text(RUN + SHARED)
        overrides = (f"run.share={request.param}", f"run.dir={folder}")
        assert cli("submit", "run.toml", *(word for one in overrides for word in ("-o", one))).code == 0
    finally:
        os.umask(before)
    run = RunDir(folder / "quick-001")
    (run.logs(1) / "agent-0.log").touch()
    write_status(run)
    write_door(run)
    return run


def write_door(run: RunDir) -> None:
    record = DoorRecord(1, "h", ("127.0.0.1",), 1, SECRET.encode().hex(), "", "", FIRST_GUEST)
    write_atomic(run.door, msgspec.json.encode(record), OWNER_ONLY)


def test_no_file_of_a_shared_run_shows_another_user_a_secret(shared: RunDir) -> None:
    def with_secret() -> list[Path]:
        readable = [path for path in shared.path.rglob("*") if path.is_file() and os.access(path, os.R_OK)]
        assert len(readable) >= 3, "what its owner shares"
        secrets = (SECRET, str(OPTION), SECRET.encode().hex())
        return [path for path in readable if any(word in path.read_text(errors="replace") for word in secrets)]

    assert set(with_secret()) == {shared.config, shared.toml, shared.script, shared.spot_script, shared.door}
    assert as_other(lambda: sys.exit(str(with_secret()))) == "SystemExit []"


@pytest.mark.parametrize("verb", ["status", "config show", "report --out {}"])
def test_another_user_can_look_at_a_shared_run(verb: str, shared: RunDir, folder: Path) -> None:
    (folder / "own").mkdir()
    os.chown(folder / "own", OTHER, 0)
    words = [*verb.format(folder / "own" / "page.html").split(), str(shared.path)]
    assert as_other(lambda: sys.exit(app.run(words))) == "SystemExit 0"


@pytest.fixture
def scene(shared: RunDir, folder: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        for path in (private := agent_folders.make_folders()):
            stack.callback(agent_folders.remove, path)
            (path / "weights").touch()
        lenders = folder / "lenders"
        lenders.mkdir()
        records.write_record(lenders, records.LenderRecord("l", "h", "b", 1, 1, "", lender_record.LendTerms(0.5)))
        os.close(os.open(records.log_file(lenders, "l"), NEW, OWNER_ONLY))
        acquire(shared.leases).release()
        process = stack.enter_context(subprocess.Popen(["sleep", "600"], env={"SECRET": SECRET}))
        stack.callback(process.kill)
        agent, carrier = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        agent.setblocking(False)
        world = World(0, (Endpoint("h", ("127.0.0.1",), agent.getsockname()[1]),) * 2, SECRET.encode(), agent)
        serve = links.accept(world, lambda rank, frame: None, lambda frame: b"welcome")
        threading.Thread(target=lambda: asyncio.run(serve), daemon=True).start()
        nothing: Any = None
        server.CarrierServer(carrier, world.secret, offers.OfferStore(0), nothing, rank=0).start()
        peer = wire.Peer(0, ("127.0.0.1",), carrier.getsockname()[1])
        yield Scene(run=shared, pid=process.pid, folders=private, lenders=lenders, world=world, carrier=peer)


def as_rank(scene: Scene, rank: int, secret: bytes = b"guessed") -> object:
    """Open a stream to the agent, and have its answer."""
    other = World(rank, scene.world.endpoints, secret, scene.world.listener)
    return asyncio.run(links._open(other, 0, scene.world.endpoints[0], "127.0.0.1"))


def ask_carrier(scene: Scene, rank: int, secret: bytes = b"guessed") -> bytes:
    return wire.Caller(rank, secret).manifest(scene.carrier, wire.Fetch(1, parts.PART))


def verb(*words: object) -> None:
    sys.exit(app.run([str(word) for word in words]))


DENIED, USAGE = "PermissionError", "SystemExit [12]"
UNPROVEN = "^(EOFError|ConnectionError|ConnectionResetError|NoProof) "
TRIED: dict[str, tuple[Callable[[Scene], object], str]] = {
    "read weights": (lambda s: (s.folders[1] / "weights").read_bytes(), DENIED),
    "list sockets": (lambda s: os.listdir(s.folders[0]), DENIED),
    "read a process's environment": (lambda s: Path(f"/proc/{s.pid}/environ").read_bytes(), DENIED),
    "its memory": (lambda s: os.open(f"/proc/{s.pid}/mem", os.O_RDONLY), DENIED),
    "its open files": (lambda s: os.listdir(f"/proc/{s.pid}/fd"), DENIED),
    "a lender's record": (lambda s: records.record_file(s.lenders, "l").read_bytes(), DENIED),
    "what its guest printed": (lambda s: records.log_file(s.lenders, "l").read_bytes(), DENIED),
    "list leases": (lambda s: os.listdir(s.run.leases), DENIED),
    "join": (lambda s: verb("join", s.run.path), USAGE),
    "pose as a rank": (lambda s: as_rank(s, 1), UNPROVEN),
    "as rank 0": (lambda s: as_rank(s, 0), UNPROVEN),
    "as a guest": (lambda s: as_rank(s, FIRST_GUEST), UNPROVEN),
    "ask to join without the secret": (lambda s: as_rank(s, AT_THE_DOOR), UNPROVEN),
    "ask with an empty one": (lambda s: as_rank(s, AT_THE_DOOR, b""), UNPROVEN),
    "pull weights as node": (lambda s: ask_carrier(s, 1), UNPROVEN),
    "as guest": (lambda s: ask_carrier(s, FIRST_GUEST), UNPROVEN),
    "request a stop": (lambda s: s.run.stop.write_text("{}"), DENIED),
    "write status": (lambda s: s.run.status.open("r+"), DENIED),
    "remove it": (lambda s: s.run.status.unlink(), DENIED),
    "write the shared configuration": (lambda s: s.run.shared_config.open("a"), DENIED),
    "write a log": (lambda s: (s.run.logs(1) / "agent-0.log").open("a"), DENIED),
    "link a log elsewhere": (lambda s: (s.run.logs(1) / "agent-1.log").symlink_to("/tmp/x"), DENIED),
    "make a checkpoint": (lambda s: s.run.checkpoint(9).mkdir(parents=True), DENIED),
    "rename the run": (lambda s: s.run.path.rename("/tmp/another-run"), DENIED),
    "open it to all": (lambda s: s.run.path.chmod(0o777), DENIED),
    "take the lease": (lambda s: acquire(s.run.leases), DENIED),
    "write into an agent's folder": (lambda s: (s.folders[0] / "x").touch(), DENIED),
    "take it over": (lambda s: agent_folders.own(s.folders[1]), DENIED),
    "revoke a lender": (lambda s: records.revoked_file(s.lenders, "l").touch(), DENIED),
    "submit --resume": (lambda s: verb("submit", "--resume", s.run.path), USAGE),
    "eval": (lambda s: verb("eval", s.run.path, "--task", "x"), USAGE),
    "cancel": (lambda s: verb("cancel", s.run.path), USAGE),
    "end a process": (lambda s: os.kill(s.pid, signal.SIGTERM), DENIED),
    "stop it": (lambda s: os.kill(s.pid, signal.SIGSTOP), DENIED),
    "bind it to a core": (lambda s: os.sched_setaffinity(s.pid, {0}), DENIED),
    "slow it down": (lambda s: os.setpriority(os.PRIO_PROCESS, s.pid, 19), DENIED),
    "limit it": (lambda s: resource.prlimit(s.pid, resource.RLIMIT_NOFILE, (1, 1)), DENIED),
}


@pytest.mark.parametrize("shared", ["all"], indirect=True)
@pytest.mark.parametrize("attempt", TRIED)
def test_another_user_reads_joins_writes_and_stops_nothing(attempt: str, scene: Scene) -> None:
    act, refusal = TRIED[attempt]
    before = {path: path.lstat().st_mtime for path in scene.run.path.rglob("*")}
    assert re.search(refusal, as_other(lambda: act(scene)))
    assert {path: path.lstat().st_mtime for path in scene.run.path.rglob("*")} == before


@pytest.mark.parametrize("shared", ["all"], indirect=True)
def test_who_has_the_secret_is_let_in(scene: Scene) -> None:
    for rank in (0, 1, AT_THE_DOOR, FIRST_GUEST):
        as_rank(scene, rank, scene.world.secret if rank < 2 else guest_secret(scene.world.secret))
    with pytest.raises(wire.Absent, match="no snapshots"):
        ask_carrier(scene, 1, scene.world.secret)


def test_a_run_of_another_user_is_neither_cancelled_nor_resumed(open_place: Path, queue: Queue, cli: Cli) -> None:
    job = {"job_id": "1", "attempt": 1}
    assert as_other(lambda: plant(open_place / "zz-001").write_json(open_place / "zz-001" / "job.json", job)) == ""
    place = str(open_place / "zz-001")
    for words in (["cancel", "--runs", str(open_place)], ["cancel", place], ["submit", "--resume", place]):
        outcome = cli(*words)
        assert outcome.code == 2
        assert "'zz-001': it is another user's" in outcome.err
    with pytest.raises(UserError, match="it is another user's"):
        api.Runs()[place].cancel(now=True)
    assert queue.cancelled == []


def plant(place: Path) -> RunDir:
    """A run of the one who does this, that asks for lenders."""
    run = RunDir(place)
    run.path.mkdir()
    run.write_json(run.config, {"borrow": {"lenders": "any"}})
    write_door(run)
    return run


@pytest.fixture
def open_place(folder: Path) -> Path:
    """A folder of runs that others can write."""
    place = folder / "runs"
    place.mkdir()
    place.chmod(0o1777)
    plant(place / "own-001")
    return place


PARTS = ("config.json", "door.json")
PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a run": lambda place, own: plant(place),
    "a link to a run": lambda place, own: place.symlink_to(own),
    "a run with the door of another": lambda place, own: [
        plant(place).door.unlink(),
        (place / "door.json").symlink_to(own / "door.json"),
    ],
    "links to files of a run": lambda place, own: [
        place.mkdir(),
        *((place / name).symlink_to(own / name) for name in PARTS),
    ],
    "pipes": lambda place, own: [place.mkdir(), *(os.mkfifo(place / name) for name in PARTS)],
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_lender_takes_runs_of_its_own_user_only(what: str, open_place: Path) -> None:
    place, own = open_place / "a-001", open_place / "own-001"
    assert as_other(lambda: PLANTED[what](place, own)) == ""
    assert [run.name for run in guest_process.wanting(open_place, "l")] == ["own-001"]
    if not place.is_symlink():
        with pytest.raises(UserError, match="cannot be read"):
            door.read_record(RunDir(place))
    own.chmod(0o777)
    assert guest_process.wanting(open_place, "l") == [], "others can write it"


@pytest.mark.parametrize("name", ["ada", f"cache-{os.getuid()}"])
@pytest.mark.parametrize("is_link", [False, True])
def test_code_of_compilers_is_never_read_from_a_folder_of_another_user(
    name: str, is_link: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / name if name == "ada" else folder))
    assert as_other(lambda: (folder / "others").mkdir(mode=0o777)) == ""
    assert as_other(lambda: (folder / name).symlink_to("others") if is_link else (folder / name).mkdir()) == ""
    with pytest.raises(PermissionError, match="not a folder of this user"):
        agent_folders.make_folders()
