"""Groups of processes that part and meet again, here as threads of one process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import libra_hpc.trainer.channel as module
from libra_hpc.trainer.channel import PARKED, Channel

SIZE = 5


class Member:
    """The core's process, or that of a replica."""

    def __init__(self, number: int) -> None:
        self.elastic = number > 0
        self.bucket = SimpleNamespace(
            numel_unpadded=SIZE, param_data=torch.full((SIZE,), float(number)), grad_data=torch.ones(SIZE)
        )
        self.interrupted = False
        self.channel = Channel(
            [self.bucket],
            "all",
            1,
            copies=1,
            copy=0,
            elastic=self.elastic,
            device=torch.device("cpu"),
            timeout_s=30.0,
            interrupted=lambda: self.interrupted,
        )

    def meet(self, path: Path, place: int, replicas: int) -> None:
        self.channel.announce(str(path), 1, replicas, place - 1)
        self.channel.assemble(time.monotonic() + 30.0)
        self.channel.connect(30.0, (place, 0))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the groups that were made, once for each member."""
    sizes: list[int] = []
    original = module.bare_group

    def count(*arguments: Any) -> Any:
        sizes.append(arguments[3])
        return original(*arguments)

    monkeypatch.setattr(module, "bare_group", count)
    return sizes


def together(members: list[Member], work: str, *arguments: Any) -> None:
    with ThreadPoolExecutor(len(members)) as pool:
        tasks = [pool.submit(getattr(member.channel, work), *arguments) for member in members]
        for task in tasks:
            task.result()


def meet(members: list[Member], path: Path) -> None:
    with ThreadPoolExecutor(len(members)) as pool:
        tasks = [pool.submit(m.meet, path, place, len(members) - 1) for place, m in enumerate(members)]
        for task in tasks:
            task.result()


def exchange(members: list[Member]) -> None:
    """Gradients to the core, and its weights to all."""
    core = members[0]
    for member in members:
        member.bucket.grad_data.fill_(1.0)
    core.bucket.param_data.add_(10.0)
    together(members, "reduce")
    assert core.bucket.grad_data.tolist() == [float(len(members))] * SIZE
    together(members, "spread_weights")
    assert all((m.bucket.param_data == core.bucket.param_data).all() for m in members)


@pytest.mark.parametrize("replicas", [1, 2])
def test_members_that_parted_in_peace_meet_again_in_the_same_group(
    tmp_path: Path, made: list[int], replicas: int
) -> None:
    members = [Member(number) for number in range(1 + replicas)]
    for number in range(3):
        meet(members, tmp_path / f"g{number}")
        exchange(members)
        together(members, "park")
        assert not any(member.channel.connected for member in members)
    siblings = [replicas] * replicas if replicas > 1 else []
    assert sorted(made) == sorted([1 + replicas] * (1 + replicas) + siblings)


def test_after_one_has_left_for_good_all_make_a_new_group(tmp_path: Path, made: list[int]) -> None:
    core, replica = Member(0), Member(1)
    meet([core, replica], tmp_path / "g1")
    core.channel.park()
    replica.channel.leave()
    meet([core, replica], tmp_path / "g2")
    exchange([core, replica])
    assert made == [2] * 4


def test_a_member_that_missed_an_exchange_makes_all_of_them_make_a_new_group(
    tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other has sent would be taken for the next exchange; gloo waits for the receiver, NCCL may not."""
    core, replica = Member(0), Member(1)
    meet([core, replica], tmp_path / "g1")
    monkeypatch.setattr(replica.channel, "_done", 2)
    together([core, replica], "park")
    meet([core, replica], tmp_path / "g2")
    exchange([core, replica])
    assert made == [2] * 4


def test_few_groups_are_kept_and_each_only_for_its_own_members(tmp_path: Path, made: list[int]) -> None:
    core, *replicas = (Member(number) for number in range(PARKED + 2))
    for number, replica in enumerate(replicas):
        meet([core, replica], tmp_path / f"first-{number}")
        together([core, replica], "park")
    assert made == [2] * 2 * len(replicas)
    meet([core, replicas[-1]], tmp_path / "last")
    exchange([core, replicas[-1]])
    assert made == [2] * 2 * len(replicas), "the newest is still there"
    together([core, replicas[-1]], "park")
    meet([core, replicas[0]], tmp_path / "oldest")
    exchange([core, replicas[0]])
    assert made == [2] * 2 * (len(replicas) + 1)
