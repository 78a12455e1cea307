"""How an agent joins: the record, the question to rank 0, and whom the mesh then reaches."""

from __future__ import annotations

import asyncio
import secrets
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.config.load import validate, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.config.run_file_text import HIDDEN
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.mesh.door import ask_config, ask_to_join, check_record, close_door, open_door, read_record, shown
from libra_hpc.mesh.mesh import Mesh
from libra_hpc.mesh.world import Endpoint, World
from libra_hpc.process.addresses import PORTS
from libra_hpc.protocol.agents import Fatal
from libra_hpc.protocol.joining import (
    FIRST_GUEST,
    RANKS_OF_A_START,
    Admitted,
    ConfigShown,
    DoorRecord,
    NotAdmitted,
    door,
)
from tests.mesh.test_links import worlds
from tests.stage.waiting import until

DRY = RunConfig().changed(run={"engine": "simulated"})
Answer = Callable[[World], Admitted | ConfigShown | NotAdmitted]


def admitted(world: World) -> Admitted:
    return Admitted(FIRST_GUEST, tuple((one.host, one.addresses, one.port) for one in world.endpoints))


@asynccontextmanager
async def serving(run: RunDir, answer: Answer) -> AsyncIterator[tuple[DoorRecord, list[Mesh], list[tuple[int, Any]]]]:
    """Two ranks of a run, the record of their door, their ends of the mesh, and what they receive."""
    ranks, received = worlds(), list[tuple[int, Any]]()
    meshes = [Mesh(world, lambda source, message: received.append((source, message))) for world in ranks]
    meshes[0].admit = lambda frame: door.encode(answer(ranks[0]))
    tasks = [asyncio.create_task(mesh.run()) for mesh in meshes]
    async with asyncio.timeout(30.0):
        yield open_door(run, DRY, 3, ranks[0]), meshes, received
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_guest_that_was_admitted_talks_with_every_rank_that_it_was_announced_to(tmp_path: Path) -> None:
    async with serving(RunDir(tmp_path), admitted) as (record, meshes, received):
        world, addresses = await ask_to_join(RunDir(tmp_path), record, "")
        assert world.listener.getsockname()[1] in PORTS, "a firewall may let through no others"
        got = list[tuple[int, Any]]()
        guest = Mesh(world, lambda source, message: got.append((source, message)))
        task = asyncio.create_task(guest.run())
        for rank in (0, 1):
            guest.send(rank, Fatal(rank, ""))
        await until(lambda: len(received) == 2)
        assert sorted((source, message.rank) for source, message in received) == [(FIRST_GUEST, 0), (FIRST_GUEST, 1)]
        # What is sent before the announcement waits for it.
        meshes[1].send(FIRST_GUEST, Fatal(1, ""))
        meshes[0].add_guest(FIRST_GUEST, Endpoint("g", addresses, world.listener.getsockname()[1]))
        meshes[0].send(FIRST_GUEST, Fatal(0, ""))
        await until(lambda: got)
        assert got == [(0, Fatal(0, ""))]
        meshes[1].add_guest(FIRST_GUEST, Endpoint("g", addresses, world.listener.getsockname()[1]))
        await until(lambda: len(got) == 2)
        task.cancel()


async def test_a_guest_cannot_pose_as_a_rank_of_the_run(tmp_path: Path) -> None:
    async with serving(RunDir(tmp_path), admitted) as (record, _, received):
        world, _ = await ask_to_join(RunDir(tmp_path), record, "")
        posing = msgspec.structs.replace(world, rank=1)
        mesh = Mesh(posing, lambda source, message: None)
        mesh.send(0, Fatal(0, ""))
        await until(lambda: mesh._links[0].broken)
        assert not received


async def test_a_run_that_takes_no_guest_says_why(tmp_path: Path) -> None:
    async with serving(RunDir(tmp_path), lambda world: NotAdmitted("it ends")) as (record, _, _):
        with pytest.raises(UserError, match="takes no guest: it ends"):
            await ask_to_join(RunDir(tmp_path), record, "")


async def test_a_guest_without_the_runs_folder_gets_the_configuration_without_secrets(tmp_path: Path) -> None:
    config = DRY.changed(compute={"env": {"API_KEY": "sk-private"}})
    async with serving(RunDir(tmp_path), lambda world: shown(config)) as (record, _, _):
        found = validate(await ask_config(RunDir(tmp_path), record))
    assert found.as_data() == config.changed(compute={"env": {"API_KEY": HIDDEN}}).as_data()


async def test_a_record_with_another_secret_is_refused_in_one_sentence(tmp_path: Path) -> None:
    async with serving(RunDir(tmp_path), admitted) as (record, _, _):
        other = msgspec.structs.replace(record, secret=secrets.token_bytes(32).hex())
        with pytest.raises(UserError, match=r"the secret in door.json is not that of its ranks"):
            await ask_to_join(RunDir(tmp_path), other, "")


async def test_a_start_that_has_ended_does_not_answer(tmp_path: Path) -> None:
    async with serving(RunDir(tmp_path), admitted) as (record, meshes, _):
        meshes[0]._world.listener.close()
        with pytest.raises(OSError, match="Connect call failed"):
            await ask_to_join(RunDir(tmp_path), record, "")


def test_the_record_is_private_and_no_start_uses_the_ranks_of_another(tmp_path: Path) -> None:
    run, (world, _) = RunDir(tmp_path), worlds()
    assert read_record(run) is None
    first = open_door(run, DRY, 1, world)
    assert stat.S_IMODE(run.door.stat().st_mode) == 0o600
    assert first.secret != world.secret.hex()
    close_door(run, first)
    left = read_record(run)
    assert left is not None
    assert not left.open
    second = open_door(run, DRY, 1, world)
    assert second.open
    assert second.next_rank - RANKS_OF_A_START == first.next_rank > FIRST_GUEST


def test_an_unreadable_record_other_code_and_another_model_are_mistakes_of_the_user(tmp_path: Path) -> None:
    run, (world, _) = RunDir(tmp_path), worlds()
    run.door.write_bytes(b'{"attempt": 1')
    with pytest.raises(UserError, match=r"door.json is no record of a run"):
        read_record(run)
    run.door.unlink()
    run.door.mkdir()
    with pytest.raises(UserError, match=r"door.json cannot be read"):
        read_record(run)
    run.door.rmdir()
    record = open_door(run, DRY, 1, world)
    check_record(run, record, DRY)
    with pytest.raises(UserError, match=r"runs with libra-hpc 0.0.1\+x, and this is"):
        check_record(run, msgspec.structs.replace(record, code="0.0.1+x"), DRY)
    model = tmp_path / "model"
    model.mkdir()
    real = with_values(DRY, {"run.engine": "real", "model.path": str(model)})
    with pytest.raises(UserError, match=r"model.path = .* it cannot be read here"):
        check_record(run, record, real)
    (model / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model.path = .* another model"):
        check_record(run, record, real)
