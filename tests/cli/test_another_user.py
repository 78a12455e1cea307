"""What another user of the node tries with a run and its owner, in a process of another uid."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from libra_hpc_cli import app, jobs

from libra_hpc.annexes.lend.guest_process import wanting
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import write_atomic
from libra_hpc.mesh.door import read_record
from libra_hpc.process.code_stamp import code_stamp
from libra_hpc.protocol.joining import FIRST_GUEST, DoorRecord
from libra_hpc.slurm import submit

from .conftest import RUN, Cli, Queue, write_status

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

OTHER = 65534
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
    write_status(run)
    write_door(run)
    write_atomic(run.weights, SECRET.encode(), 0o600)
    return run


def write_door(run: RunDir) -> None:
    door = DoorRecord(1, "h", ("127.0.0.1",), 1, SECRET.encode().hex(), code_stamp(), "", FIRST_GUEST)
    write_atomic(run.door, msgspec.json.encode(door), 0o600)


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


def plant(place: Path, **changes: object) -> None:
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
