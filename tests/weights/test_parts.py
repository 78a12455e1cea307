"""Parts of snapshots between carriers: whole, past a broken link, and to nobody but nodes of the run."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from libra_hpc.protocol.callers import NONCE_BYTES, PROVE_S, Unproven
from libra_hpc.protocol.carriers import PartPulled, Peer, PullPart
from libra_hpc.protocol.joining import FIRST_GUEST, guest_secret
from libra_hpc.weights import parts
from libra_hpc.weights.offers import OfferStore
from libra_hpc.weights.parts import PART, pull_part
from libra_hpc.weights.server import CarrierServer, ImageSource
from libra_hpc.weights.wire import Absent, Caller, Fetch
from tests.weights.chain import SHAPES
from tests.weights.nodes import SECRET, CarrierNode, FaultyLink, node_folders

NAME = "step-00000004.attempt-1-7"
FILES = {"trainer.json": b"{}", "empty": b"", "snapshot-00000.safetensors": bytes(range(256)) * 40_000}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a node that has a part."""
    (part := tmp_path / "snapshots/1" / NAME).mkdir(parents=True)
    for name, data in FILES.items():
        (part / name).write_bytes(data)
    (tmp_path / "snapshots/secret").write_text("none of a part")
    return tmp_path / "snapshots"


@pytest.fixture
def peer(folder: Path) -> Iterator[Peer]:
    listener = socket.create_server(("127.0.0.1", 0))
    CarrierServer(listener, SECRET, OfferStore(0), cast(ImageSource, None), folder, rank=1).start()
    yield Peer(1, ("127.0.0.1",), listener.getsockname()[1])
    listener.close()


def asked(peer: Peer, writer: str, end: int) -> None:
    """Ask for a part's listing (-1) or bytes; raises the first fault."""

    def failed(error: Exception) -> None:
        raise error

    if end < 0:
        Caller(2, SECRET).manifest(peer, Fetch(-1, writer))
    else:
        payload = memoryview(bytearray(end))
        Caller(2, SECRET).receive(lambda: peer, Fetch(-1, writer, 0, end), payload, lambda begin, end: None, failed)


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_one_carrier_pulls_a_part_of_another_although_the_link_breaks(folder: Path, tmp_path: Path) -> None:
    with node_folders() as nodes, ExitStack() as stack:
        writer = CarrierNode(nodes / "1", 1, SHAPES, parts=str(folder))
        copier = CarrierNode(nodes / "2", 2, SHAPES)
        link = FaultyLink(writer.port, cut_at=3_000_000)
        for one in (writer, copier, link):
            stack.callback(one.close)
        target = str(tmp_path / "copy")
        copier.send(PullPart(Peer(1, ("127.0.0.1",), link.port), f"1/{NAME}", target))
        assert copier.wait(PartPulled) == PartPulled(target)
        assert content(Path(target)) == FILES


def test_a_part_that_is_not_there_and_a_folder_without_room_are_errors(peer: Peer, tmp_path: Path) -> None:
    caller = Caller(2, SECRET)
    with pytest.raises(OSError, match="No such file"):
        pull_part(caller, peer, "2/step-00000009.x", tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        pull_part(caller, peer, f"1/{NAME}", tmp_path / "file/a")


def test_a_peer_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "GIVE_UP_S", 0.1)
    monkeypatch.setattr(parts, "RETRY_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        pull_part(Caller(2, SECRET), Peer(1, ("127.0.0.1",), port), f"1/{NAME}", tmp_path / "a")


@pytest.mark.parametrize(
    "name", ["", "1", "secret", "../snapshots/1", "1/..", f"1/{NAME}/../../../secret", f"1/{NAME}/a/b", "1//x"]
)
def test_nothing_else_is_served(peer: Peer, name: str) -> None:
    for end in (-1, 5):
        with pytest.raises(Absent, match="is no part of a snapshot"):
            asked(peer, f"{PART}{name}", end)


def test_a_link_in_a_part_leads_nowhere(peer: Peer, folder: Path) -> None:
    (folder / "1" / NAME / "link").symlink_to(folder / "secret")
    with pytest.raises(Absent):
        asked(peer, f"{PART}1/{NAME}/link", 5)


def test_callers_without_the_secret_keep_no_carrier_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra_hpc.weights.server.Unproven", lambda: Unproven(8))
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = listener.getsockname()
        CarrierServer(listener, SECRET, OfferStore(0), cast(ImageSource, None), folder, rank=1).start()
        connected = (socket.create_connection(address, timeout=PROVE_S / 2) for _ in range(40))
        strangers = [stack.enter_context(stranger) for stranger in connected]
        asked(Peer(1, ("127.0.0.1",), address[1]), f"{PART}1/{NAME}", -1)
        assert len(strangers[0].recv(100)) == NONCE_BYTES
        assert strangers[0].recv(1) == b"", "the oldest is disconnected"


def test_a_guest_gets_weights_alone(peer: Peer) -> None:
    with pytest.raises(Absent, match="no snapshots are served here"):
        Caller(FIRST_GUEST, guest_secret(SECRET)).manifest(peer, Fetch(-1, f"{PART}1/{NAME}"))
