"""Whether a carrier uses NIXL: one question at its start, which ends in time and names why not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from libra_hpc.weights.transport import nixl
from libra_hpc.weights.transport.nixl import DirectError, DirectReads, Place, probe
from tests.weights.test_nixl import FAKE


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """With the fake, an InfiniBand device, and a job's variables for MPI."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr(nixl, "DEVICES", tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    with mock.patch.dict(os.environ, UCX_TLS="of the job", UCX_NET_DEVICES="ib0", FAKE_NIXL=""):
        yield
    for name in [name for name in sys.modules if name.startswith(nixl.NIXL_WHEEL)]:
        del sys.modules[name]


@pytest.mark.parametrize(("wanted", "transports"), [("auto", "ib,sm,self"), ("nixl", "all")])
def test_nixl_gets_variables_of_its_own(monkeypatch: pytest.MonkeyPatch, wanted: str, transports: str) -> None:
    monkeypatch.setenv("WEIGHTS_UCX_IB_TRAFFIC_CLASS", "106")
    direct, why = probe(wanted, 3)
    assert direct is not None
    assert why == ""
    own = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    assert own == {"UCX_TLS": transports, "UCX_LOG_LEVEL": "fatal", "UCX_IB_TRAFFIC_CLASS": "106"}


@pytest.mark.parametrize(
    ("wanted", "fault", "why"),
    [
        ("tcp", "", 'rollout.weights_transport = "tcp"'),
        ("auto", "no wheel", "NIXL is not installed"),
        ("nixl", "no wheel", "NIXL is not installed"),
        ("auto", "no device", "this node has no InfiniBand or RoCE device"),
        ("auto", "start", "NIXL: NIXL_ERR_BACKEND"),
        ("nixl", "stuck", "NIXL did not start within 1 s"),
        ("nixl", "flip:0", "a READ brought other bytes"),
        ("nixl", "break:0", "NIXL: a READ failed"),
    ],
)
def test_what_keeps_weights_on_tcp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: str, fault: str, why: str
) -> None:
    monkeypatch.setenv("FAKE_NIXL", fault)
    monkeypatch.setattr(nixl, "PROBE_S", 1.0 if fault == "stuck" else 60.0)
    if fault == "no wheel":
        monkeypatch.setattr(nixl, "NIXL_WHEEL", "no_such_wheel")
    if fault == "no device":
        (tmp_path / "mlx5_0").rmdir()
    assert probe(wanted, 3) == (None, why)
    assert fault or os.environ["UCX_TLS"] == "of the job"


def test_freed_memory_is_forgotten_and_its_name_is_not_used_again() -> None:
    direct, _ = probe("nixl", 3)
    assert direct is not None
    first, second = memoryview(bytearray(4096)), memoryview(bytearray(4096))
    places = [direct.place(first), direct.place(second), direct.place(second)]
    assert places[1] is places[2]
    registered = direct._agent._registered
    assert len(registered) == 2
    del first
    assert list(registered) == [places[1].device]
    assert direct.place(memoryview(bytearray(4096))).device > places[1].device


def test_all_who_read_from_a_process_leave_it_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "READ_S", 1.0)
    (source, _), (direct, _) = probe("nixl", 1), probe("nixl", 2)
    assert source is not None
    assert direct is not None
    theirs, own = memoryview(bytearray(range(200))), memoryview(bytearray(200))
    place = source.place(theirs)
    stack = ExitStack()
    other = stack.enter_context(direct.reading(place, own))
    with mock.patch.object(direct._agent, "transfer", return_value="ERR"), pytest.raises(DirectError, match="failed"):
        read_with(direct, place, own, 100)
    with pytest.raises(DirectError, match="being closed"):
        read_with(direct, place, own, 100)
    with pytest.raises(DirectError, match="a READ failed beside it"):
        other(100, 200)
    stack.close()
    read_with(direct, place, own, 200)
    assert own == theirs


def read_with(direct: DirectReads, place: Place, own: memoryview, end: int) -> None:
    with direct.reading(place, own) as read:
        read(0, end)
