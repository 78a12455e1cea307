"""How an agent joins a running job: the record of the door, and questions to rank 0.

- The record cannot be read, or is of another version of libra-hpc or another model -> `UserError`.
- Rank 0 has another secret, or takes no guest -> `UserError`.
- Nobody answers -> `OSError`: the ranks restart, or have ended.
"""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.config.run_file_text import without_secrets
from libra_hpc.errors import UserError, error_text, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import OWNER_ONLY, read_own, write_atomic
from libra_hpc.process.addresses import listen, own_addresses
from libra_hpc.process.code_stamp import code_stamp
from libra_hpc.protocol.codec import FrameError
from libra_hpc.protocol.joining import (
    AT_THE_DOOR,
    FIRST_GUEST,
    RANKS_OF_A_START,
    Admitted,
    ConfigShown,
    ConfigWanted,
    DoorRecord,
    JoinMessage,
    JoinWanted,
    NotAdmitted,
    door,
    door_record,
    guest_secret,
)

from .links import call_door
from .world import Endpoint, World

Answer = TypeVar("Answer", Admitted, ConfigShown)
LOOPBACK = (("127.0.0.1",), ("::1",))
BACKLOG = 64
"""Callers that may wait; only leaders call a guest."""


class JoinedWorld(NamedTuple):
    """The mesh from the view of a guest."""

    world: World
    addresses: tuple[str, ...]
    """Addresses of this node."""


def open_door(run: RunDir, config: RunConfig, attempt: int, world: World) -> DoorRecord:
    """Write how to join this start, with ranks that no start before had; raises `OSError` or `UserError`."""
    before, own = read_record(run), world.endpoints[world.rank]
    first = FIRST_GUEST if before is None else before.next_rank
    record = DoorRecord(
        attempt,
        own.host,
        own.addresses,
        own.port,
        guest_secret(world.secret).hex(),
        code=code_stamp(),
        model=model_stamp(config),
        next_rank=first + RANKS_OF_A_START,
    )
    _write(run, record)
    return record


def close_door(run: RunDir, record: DoorRecord) -> None:
    """Mark in the record that its ranks end; raises `OSError`."""
    _write(run, msgspec.structs.replace(record, open=False))


def _write(run: RunDir, record: DoorRecord) -> None:
    write_atomic(run.door, msgspec.json.encode(record), OWNER_ONLY)


def read_record(run: RunDir) -> DoorRecord | None:
    """None while there is none; raises `UserError` where it cannot be read."""
    try:
        return door_record.decode(read_own(run.door))
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"{run.door} cannot be read ({error_text(error)})"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = f"{run.door} is no record of a run ({error})"
    raise invalid("RUN", run.name, why, "a run of your own, with libra-hpc of the same version")


def model_stamp(config: RunConfig) -> str:
    """What distinguishes the run's model from others of another shape: a guest gets the weights from the run."""
    if config.run.engine == "simulated":
        return ""
    return hashlib.sha256((Path(config.model.path) / "config.json").read_bytes()).hexdigest()[:16]


def check_record(run: RunDir, record: DoorRecord, config: RunConfig) -> None:
    """Raise `UserError` where this machine has other code, or another model."""
    if record.code != code_stamp():
        why = f"it runs with libra-hpc {record.code}, and this is {code_stamp()}"
        raise invalid("RUN", run.name, why, "the interpreter that submitted the run")
    try:
        own = model_stamp(config)
    except OSError as error:
        raise invalid("model.path", config.model.path, f"it cannot be read here ({error_text(error)})") from None
    if own != record.model:
        raise invalid("model.path", config.model.path, f"here it is another model than that of {run.name}")


def shown(config: RunConfig) -> ConfigShown:
    """What a guest without the run's folder gets of the configuration."""
    return ConfigShown({name: without_secrets(name, section) for name, section in config.as_data().items()})


async def ask_config(run: RunDir, record: DoorRecord) -> dict[str, Any]:
    """The configuration of a run without its folder, by section; see the module docstring for what it raises."""
    with socket.socket() as unused:
        return (await _ask(run, record, ConfigWanted(), unused, ConfigShown)).sections


async def ask_to_join(run: RunDir, record: DoorRecord, interface: str) -> JoinedWorld:
    """Be admitted as a guest of the run; see the module docstring for what it raises."""
    host = socket.gethostname()
    # Ranks that share a machine listen nowhere else.
    addresses = record.addresses if record.addresses in LOOPBACK else tuple(own_addresses(interface))
    listener = listen(addresses, 2 * BACKLOG)
    listener.setblocking(False)
    wanted = JoinWanted(host, addresses, listener.getsockname()[1])
    try:
        admitted = await _ask(run, record, wanted, listener, Admitted)
    except BaseException:
        listener.close()
        raise
    endpoints = tuple(Endpoint(*one) for one in admitted.ranks)
    return JoinedWorld(World(admitted.rank, endpoints, bytes.fromhex(record.secret), listener), addresses)


async def _ask(
    run: RunDir, record: DoorRecord, question: JoinMessage, listener: socket.socket, expected: type[Answer]
) -> Answer:
    rank_0 = Endpoint(record.host, record.addresses, record.port)
    caller = World(AT_THE_DOOR, (rank_0,), bytes.fromhex(record.secret), listener)
    try:
        answer = door.decode(await call_door(caller, door.encode(question)))
        if isinstance(answer, NotAdmitted):
            raise UserError(f"RUN = {run.name!r}: it takes no guest: {answer.reason}.")
        if not isinstance(answer, expected):
            raise FrameError("no answer to a guest")
        return answer
    except (EOFError, FrameError):
        why = f"the secret in {run.door.name} is not that of its ranks"
        raise invalid("RUN", run.name, why, "the file as the run wrote it") from None
