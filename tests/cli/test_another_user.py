"""What another user of the node tries with a run and its owner, in a process of another uid."""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401  # another user may not be able to read the interpreter's files
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
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import pytest
from libra_hpc_cli import app, jobs

from libra_hpc.annexes.lend import lender_record as records
from libra_hpc.annexes.lend.guest_process import wanting
from libra_hpc.annexes.lend.lender_record import LenderRecord
from libra_hpc.annexes.lend.terms import LendTerms
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import NEW, OWNER_ONLY, write_atomic
from libra_hpc.mesh import links
from libra_hpc.mesh.door import read_record
from libra_hpc.mesh.links import accept
from libra_hpc.mesh.world import Endpoint, World
from libra_hpc.owner.claim import acquire
from libra_hpc.process import agent_folders
from libra_hpc.process.code_stamp import code_stamp
from libra_hpc.protocol.carriers import Peer
from libra_hpc.protocol.joining import AT_THE_DOOR, FIRST_GUEST, DoorRecord, guest_secret
from libra_hpc.slurm import submit
from libra_hpc.weights.offers import OfferStore
from libra_hpc.weights.parts import PART
from libra_hpc.weights.server import CarrierServer, ImageSource
from libra_hpc.weights.transport.http_server import HttpServer, Part
from libra_hpc.weights.wire import Absent, Caller, Fetch
from tests.weights.http_client import HttpCaller

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
lenders = true
"""
Act = Callable[[], object]


def as_other(act: Act) -> str:
    """What stops another user of the same group who does so; empty: nothing does."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        word = ""
        try:
            os.setgroups([])
            os.setuid(OTHER)
            act()
        except BaseException as error:
            word = f"{type(error).__name__} {error}"
        os.write(writing, word.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        word = file.read()
    os.waitpid(pid, 0)
    return word


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
    write_atomic(run.weights, SECRET.encode(), OWNER_ONLY)
    return run


def write_door(run: RunDir) -> None:
    door = DoorRecord(1, "h", ("127.0.0.1",), 1, SECRET.encode().hex(), code_stamp(), "", FIRST_GUEST)
    write_atomic(run.door, msgspec.json.encode(door), OWNER_ONLY)


def test_no_file_of_a_shared_run_shows_another_user_a_secret(shared: RunDir) -> None:
    secrets = (SECRET, str(OPTION), SECRET.encode().hex())
    files = [path for path in shared.path.rglob("*") if path.is_file()]
    assert sum(any(word in path.read_text(errors="replace") for word in secrets) for path in files) == 5

    def search() -> None:
        seen = 0
        for path in files:
            try:
                text = path.read_text(errors="replace")
            except PermissionError:
                continue
            seen += 1
            assert not any(word in text for word in secrets), path
        assert seen >= 3, "what its owner shares"
        for path in (shared.config, shared.toml, shared.script, shared.door, shared.weights):
            with pytest.raises(PermissionError):
                path.read_bytes()

    assert as_other(search) == ""


@pytest.mark.parametrize("verb", ["status", "config show", "summary", "report --out {}"])
def test_another_user_can_look_at_a_shared_run(verb: str, shared: RunDir, folder: Path) -> None:
    own = folder / "own"
    own.mkdir()
    os.chown(own, OTHER, 0)

    def look() -> None:
        os.chdir(own)
        assert app.run([*verb.format(own / "page.html").split(), str(shared.path)]) == 0

    assert as_other(look) == ""


@dataclass
class Scene:
    """A shared run of the owner, a process of it, its folders on the node and its ports."""

    run: RunDir
    pid: int
    folders: tuple[Path, ...]
    lenders: Path
    world: World
    carrier: Peer
    http: int


@pytest.fixture
def scene(shared: RunDir, folder: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        private = agent_folders.make_folders()
        for path in private:
            stack.callback(agent_folders.remove, path)
            (path / "weights").touch()
        lenders = folder / "lenders"
        lenders.mkdir()
        records.write_record(lenders, LenderRecord("l", "h", "b", 1, 1, "", LendTerms(0.5, 0.15)))
        os.close(os.open(records.log_file(lenders, "l"), NEW, OWNER_ONLY))
        acquire(shared.leases).release()
        process = stack.enter_context(subprocess.Popen(["sleep", "600"], env={"SECRET": SECRET}))
        stack.callback(process.kill)
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [listener.getsockname()[1] for listener in listeners]
        endpoint = Endpoint("h", ("127.0.0.1",), ports[0])
        listeners[0].setblocking(False)
        world = World(0, (endpoint, endpoint), SECRET.encode(), listeners[0])
        serve_mesh = accept(world, lambda rank, frame: None, lambda frame: b"welcome")
        threading.Thread(target=lambda: asyncio.run(serve_mesh), daemon=True).start()
        CarrierServer(listeners[1], world.secret, OfferStore(0), cast(ImageSource, None)).start()
        http = HttpServer(listeners[2], world.secret, lambda *_: Part(1, 4, b"data"), 1e9)
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        stack.callback(http.shutdown)
        peer = Peer(0, ("127.0.0.1",), ports[1])
        yield Scene(shared, process.pid, private, lenders, world, peer, ports[2])


def as_rank(scene: Scene, rank: int, secret: bytes = b"guessed") -> object:
    """Open a stream to the agent, and have its answer."""
    other = World(rank, scene.world.endpoints, secret, scene.world.listener)
    return asyncio.run(links._open(other, 0, scene.world.endpoints[0], "127.0.0.1"))


def ask_carrier(scene: Scene, rank: int, secret: bytes = b"guessed") -> bytes:
    return Caller(rank, secret).manifest(scene.carrier, Fetch(1, "image"))


def verb(*words: object) -> None:
    os.environ["HOME"] = "/nowhere"
    if code := app.run([str(word) for word in words]):
        sys.exit(code)


DENIED, USAGE = "PermissionError", "SystemExit [12]"
UNPROVEN = "^(EOFError|ConnectionError|ConnectionResetError|Refused) "
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
    "over HTTP": (lambda s: HttpCaller(s.http, b"guessed").read("/weights"), UNPROVEN),
    "request a stop": (lambda s: s.run.stop.write_text("{}"), DENIED),
    "order a layout": (lambda s: s.run.write_json(s.run.order, {}), DENIED),
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
    "repartition": (lambda s: verb("repartition", s.run.path, "train.tp=2"), USAGE),
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
    for rank in (0, 1):
        as_rank(scene, rank, scene.world.secret)
    for rank in (AT_THE_DOOR, FIRST_GUEST):
        as_rank(scene, rank, guest_secret(scene.world.secret))
    assert HttpCaller(scene.http, scene.world.secret).read("/weights") == (1, b"data")
    with pytest.raises(Absent, match="no snapshots"):
        Caller(1, scene.world.secret).manifest(scene.carrier, Fetch(1, PART))


def test_a_run_of_another_user_is_neither_cancelled_nor_resumed(open_place: Path, queue: Queue, cli: Cli) -> None:
    def put() -> None:
        plant(open_place / "zz-001")
        RunDir(open_place / "zz-001").write_json(open_place / "zz-001" / "job.json", {"job_id": "1", "attempt": 1})

    assert as_other(put) == ""
    place = str(open_place / "zz-001")
    for words in (["cancel", "--runs", str(open_place)], ["cancel", place], ["submit", "--resume", place]):
        outcome = cli(*words)
        assert outcome.code == 2
        assert "'zz-001': it is another user's" in outcome.err
    assert queue.cancelled == []


def plant(place: Path) -> None:
    """A run of the one who does this, that asks for lenders."""
    run = RunDir(place)
    run.path.mkdir(exist_ok=True)
    run.write_json(run.config, {"borrow": {"lenders": True}})
    write_door(run)


@pytest.fixture
def open_place(folder: Path) -> Path:
    """A folder of runs that others can write."""
    place = folder / "runs"
    place.mkdir()
    place.chmod(0o1777)
    plant(place / "own-001")
    return place


def linked(place: Path) -> None:
    (place / "a-001").symlink_to(place / "own-001")


def linked_door(place: Path) -> None:
    plant(place / "a-001")
    (place / "a-001" / "door.json").unlink()
    (place / "a-001" / "door.json").symlink_to(place / "own-001" / "door.json")


def linked_parts(place: Path) -> None:
    (place / "a-001").mkdir()
    for name in ("config.json", "door.json"):
        (place / "a-001" / name).symlink_to(place / "own-001" / name)


def pipes(place: Path) -> None:
    (place / "a-001").mkdir()
    for name in ("config.json", "door.json"):
        os.mkfifo(place / "a-001" / name)


@pytest.mark.parametrize(
    "put", [lambda place: plant(place / "a-001"), linked, linked_door, linked_parts, pipes], ids=str
)
def test_a_lender_takes_runs_of_its_own_user_only(put: Callable[[Path], None], open_place: Path) -> None:
    assert as_other(lambda: put(open_place)) == ""
    assert (open_place / "a-001").lstat()
    assert [run.name for run in wanting(open_place)] == ["own-001"]
    if not (open_place / "a-001").is_symlink():
        with pytest.raises(UserError, match="cannot be read"):
            read_record(RunDir(open_place / "a-001"))


def test_a_run_that_others_can_write_gets_no_lender(open_place: Path) -> None:
    (open_place / "own-001").chmod(0o777)
    assert wanting(open_place) == []


@pytest.mark.parametrize("planted", ["scratch/ada", f"scratch/cache-{os.getuid()}", f"scratch/cache-{os.getuid()}@"])
def test_code_of_compilers_is_never_read_from_a_folder_of_another_user(
    planted: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "scratch").mkdir()
    (folder / "scratch").chmod(0o1777)
    place = folder / planted.removesuffix("@")
    local = place if place.name == "ada" else place.parent

    def put() -> None:
        place.symlink_to("/tmp") if planted.endswith("@") else place.mkdir(mode=0o777)

    monkeypatch.setattr(tempfile, "tempdir", str(local))
    assert as_other(put) == ""
    with pytest.raises(PermissionError, match="not a folder of this user"):
        agent_folders.make_folders()
    place.unlink() if place.is_symlink() else place.rmdir()
    local.mkdir(exist_ok=True)
    for made in agent_folders.make_folders():
        agent_folders.remove(made)
