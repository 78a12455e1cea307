"""To whom a version is published, and in which order it passes the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libra_hpc.protocol.agents import WeightsCurrent, WeightsHere, WeightsWanted
from libra_hpc.protocol.carriers import Peer, Publish
from libra_hpc.protocol.joining import FIRST_GUEST
from libra_hpc.train_leader.publisher import Published, WeightPublisher

CORE, RECEIVERS = (1, 2), (2, 3, 4, 5)


class Nodes:
    def __init__(self, *carriers: int) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.places: dict[int, str] = {}
        self.publisher = WeightPublisher(CORE, lambda: RECEIVERS, self.send)
        for rank in carriers:
            self.start(rank)

    def send(self, rank: int, message: Any) -> None:
        self.sent.append((rank, message))

    def start(self, rank: int) -> None:
        self.publisher.on_here(WeightsHere(rank, carrier=Peer(rank, ("h",), rank, self.places.get(rank, ""))))

    def publish(self, version: int) -> None:
        self.publisher.publish(Published(version, version - 1, (("t1.0", 1), ("t2.0", 2))))

    def versions(self, rank: int) -> list[int]:
        return [m.version for to, m in self.sent if to == rank and isinstance(m, Publish)]

    def taken(self) -> list[tuple[int, Any]]:
        sent, self.sent = self.sent, []
        return sent

    def chains(self) -> dict[int, list[int]]:
        return {to: [peer.rank for peer in m.chain] for to, m in self.taken() if isinstance(m, Publish)}


def test_a_version_passes_the_core_and_then_every_receiver_with_a_carrier() -> None:
    nodes = Nodes(1, 2, 3, 5)
    nodes.publish(0)
    assert nodes.chains() == {1: [1, 2, 3, 5], 2: [1, 2, 3, 5], 3: [1, 2, 3], 5: [1, 2, 3, 5]}


def test_a_node_gets_its_part_of_a_long_chain_and_the_core_knows_all_of_itself() -> None:
    sent: list[tuple[int, Any]] = []
    publisher = WeightPublisher(tuple(range(12)), lambda: range(12, 60), lambda rank, m: sent.append((rank, m)))
    for rank in range(60):
        publisher.on_here(WeightsHere(rank, carrier=Peer(rank, ("h",), rank)))
    publisher.publish(Published(0, -1, (("t11.0", 11),)))
    chains = {to: [peer.rank for peer in message.chain] for to, message in sent}
    assert all(chains[rank] == list(range(12)) for rank in range(12)), "each may be a writer"
    assert chains[59] == [0, 1, *range(51, 60)], "two of the core, for when the eight before it are gone"
    assert chains[14] == [0, 1, *range(6, 15)]
    assert all(chain[-1] == rank for rank, chain in chains.items() if rank >= 12)


def test_nothing_is_published_before_the_carriers_of_the_core_are_there_and_all_versions_then() -> None:
    nodes = Nodes(1, 3)
    nodes.publish(0)
    nodes.publish(1)
    nodes.publisher.on_wanted(WeightsWanted(3, -1))
    assert not nodes.taken()
    nodes.start(2)
    assert nodes.versions(1) == nodes.versions(2) == nodes.versions(3) == [0, 1]
    assert nodes.chains() == {rank: [1, 2, 3] for rank in (1, 2, 3)}


def test_a_carrier_that_starts_later_gets_the_newest_version_at_its_place() -> None:
    nodes = Nodes(1, 2, 5)
    nodes.publish(0)
    nodes.taken()
    nodes.start(4)
    nodes.start(9)
    assert nodes.chains() == {4: [1, 2, 4]}, "9 does not get weights"


def test_a_carrier_of_the_core_that_starts_again_is_found_by_all_and_gets_what_its_image_may_lack() -> None:
    nodes = Nodes(1, 2, 3)
    for version in range(6):
        nodes.publish(version)
    nodes.taken()
    nodes.start(1)
    assert {rank: nodes.versions(rank) for rank in (1, 2, 3)} == {1: [2, 3, 4, 5], 2: [5], 3: [5]}
    nodes.taken()
    nodes.publisher.publish(Published(6, -1, (("t1.0", 1),)))
    nodes.taken()
    nodes.start(3)
    assert {rank: nodes.versions(rank) for rank in (1, 2, 3)} == {1: [], 2: [], 3: [6]}, "it needs nothing before"


def test_a_node_that_wants_weights_gets_the_newest_or_hears_that_there_are_none() -> None:
    nodes = Nodes(1, 2, 3, 8)
    nodes.publisher.on_wanted(WeightsWanted(8, -1))
    assert nodes.taken() == [(8, WeightsCurrent(-1))]
    nodes.publish(4)
    nodes.taken()
    nodes.publisher.on_wanted(WeightsWanted(8, 3))
    assert nodes.chains() == {8: [1, 2, 3, 8]}
    nodes.publisher.on_wanted(WeightsWanted(8, 4))
    assert nodes.taken() == [(8, WeightsCurrent(4))]


def test_a_node_behind_a_slow_link_comes_last_until_it_is_as_quick_as_others() -> None:
    nodes = Nodes(1, 2, 3, 4, 5)
    for rank, seconds in ((3, 9.0), (4, 1.0), (5, 1.5)):
        nodes.publisher.on_here(WeightsHere(rank, 0, 100, seconds))
    nodes.publish(0)
    assert nodes.chains()[1] == [1, 2, 4, 5, 3]
    nodes.publisher.on_here(WeightsHere(3, 0, 100, 1.0))
    nodes.publish(1)
    assert nodes.chains()[1] == [1, 2, 3, 4, 5]


def test_a_lost_node_is_in_no_chain() -> None:
    nodes = Nodes(1, 2, 3, 4)
    nodes.publisher.lost(3)
    nodes.publish(0)
    assert nodes.chains()[1] == [1, 2, 4]


def joined(*guests: int, places: Sequence[str] = ()) -> Nodes:
    """Own nodes 1, 2, 3, and these guests."""
    nodes = Nodes(1, 2, 3)
    nodes.publisher = WeightPublisher(CORE, lambda: (*guests, 3), nodes.send)
    nodes.places = dict(zip(guests, places, strict=False))
    for rank in (1, 2, 3, *guests):
        nodes.start(rank)
    return nodes


def test_guests_follow_the_own_nodes_and_no_own_node_gets_anything_from_them() -> None:
    guests = (FIRST_GUEST, FIRST_GUEST + 1)
    nodes = joined(*guests)
    nodes.publish(0)
    own = {rank: [1, 2, 3] for rank in (1, 2, 3)}
    assert nodes.chains() == {**own, guests[0]: [1, 2, 3, guests[0]], guests[1]: [1, 2, 3, *guests]}
    nodes.publisher.on_wanted(WeightsWanted(guests[1], -1))
    assert nodes.chains() == {guests[1]: [1, 2, 3, *guests]}
    nodes.publisher.on_here(WeightsHere(3, 0, 100, 9.0))
    nodes.publisher.on_here(WeightsHere(2, 0, 100, 1.0))
    nodes.publish(1)
    assert nodes.chains() == {**own, guests[0]: [1, 2, guests[0]], guests[1]: [1, 2, *guests]}, "3 is slow"


def test_neighbours_follow_each_other_so_a_link_between_switches_carries_a_version_once() -> None:
    guests = range(FIRST_GUEST, FIRST_GUEST + 6)
    nodes = joined(*guests, places=["top.a.n1", "top.b.n4", "top.a.n2", "top.b.n3", "top.a.n1", "top.b.n4"])
    nodes.publish(0)
    assert [rank - FIRST_GUEST for rank in nodes.chains()[FIRST_GUEST + 5][3:]] == [0, 4, 2, 3, 1, 5]


def test_who_waits_for_a_slow_node_is_not_slow() -> None:
    guests = (FIRST_GUEST, FIRST_GUEST + 1, FIRST_GUEST + 2)
    nodes = joined(*guests)
    nodes.publish(0)
    nodes.publisher.on_here(WeightsHere(3, 0, 100, 1.0))
    for rank, seconds in zip(guests, (9.0, 9.1, 9.2), strict=True):
        nodes.publisher.on_here(WeightsHere(rank, 0, 100, seconds))
    nodes.taken()
    nodes.publish(1)
    assert nodes.chains()[guests[0]] == [1, 2, 3, *guests[1:], guests[0]]
