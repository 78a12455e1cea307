"""Children of an agent: their socket and their devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from libra_hpc.process.child import Child, send_all
from libra_hpc.process.child_environment import clean_own, direct, engine_environment
from libra_hpc.protocol.engine import Abort, from_engine, to_engine
from tests.stage.waiting import until


async def test_messages_to_a_child_that_ended_before_it_read_them_are_dropped(tmp_path: Path) -> None:
    codes: list[int] = []
    child = Child("a", to_engine, from_engine, print, lambda child, code: codes.append(code))
    child.send(Abort("before"))
    await child.start(["/bin/sh", "-c", "exit 3"], dict(os.environ), tmp_path / "a.log")
    await until(lambda: codes)
    child.send(Abort("after"))
    assert (codes, child._queue) == ([3], [])


def test_a_message_to_several_children_is_encoded_once() -> None:
    children = [Child(name, to_engine, from_engine, print, print) for name in "abc"]
    children[0].ended = True
    send_all(children, Abort("all"))
    frames = [child._queue for child in children]
    assert [len(queue) for queue in frames] == [0, 1, 1]
    assert frames[1][0] is frames[2][0]


@pytest.mark.parametrize(
    ("device", "given", "first", "count", "seen"),
    [
        ("cpu", "0,1", 0, 1, ""),
        ("cuda", "", 2, 2, "2,3"),
        ("cuda", "4,5,6,7", 0, 2, "4,5"),
        ("cuda", "4,5,6,7", 2, 2, "6,7"),
        ("cuda", "GPU-a,GPU-b", 1, 1, "GPU-b"),
    ],
)
def test_an_engine_sees_its_share_of_what_the_node_was_given(
    device: str, given: str, first: int, count: int, seen: str
) -> None:
    out = engine_environment({"CUDA_VISIBLE_DEVICES": given, "HOME": "/h"}, device, first, count, 3)
    assert (out["CUDA_VISIBLE_DEVICES"], out["OMP_NUM_THREADS"], out["HOME"]) == (seen, "3", "/h")


HERE = "127.0.0.1,localhost,::1"


NODES = [f"node-{number:05d}" for number in range(20_000)]


@pytest.mark.parametrize(
    ("base", "hosts", "lower", "upper"),
    [
        ({}, (), HERE, HERE),
        ({"NO_PROXY": ".corp, 10.0.0.0/8"}, ("n1", "10.1.0.1"), *[f".corp,10.0.0.0/8,{HERE},n1,10.1.0.1"] * 2),
        ({"no_proxy": "a", "NO_PROXY": "b,localhost"}, (), f"a,{HERE}", "b,localhost,127.0.0.1,::1"),
        ({"no_proxy": "*"}, ("n1",), "*", "*"),
        # The longest variable that a program can start with has 128 kB.
        ({}, NODES, *[",".join([HERE, *NODES[:5955]])] * 2),
    ],
    ids=["none", "one", "both", "all", "many nodes"],
)
def test_no_proxy_is_asked_for_this_machine_and_the_nodes_of_the_run(
    base: dict[str, str], hosts: Sequence[str], lower: str, upper: str
) -> None:
    assert direct(base, hosts) == direct(direct(base, hosts), hosts) == {"no_proxy": lower, "NO_PROXY": upper}


def test_what_another_launcher_left_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dict.fromkeys(("PMIX_NAMESPACE", "PALS_RANKID", "PMI_PORT", "MPIR_CVAR_PMI_VERSION"), "x")
    own = {"UCX_TLS": "tcp", "MPIR_CVAR_CH4_NETMOD": "ofi"}
    monkeypatch.setattr(os, "environ", {**other, **own})
    clean_own(["n1"])
    assert os.environ == {**own, "no_proxy": f"{HERE},n1", "NO_PROXY": f"{HERE},n1"}
