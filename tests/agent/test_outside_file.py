"""Events of carriers: for another cluster that pulls new weights, and how nodes get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.mesh.rank_layout import RankLayout
from libra_hpc.protocol.agents import Log
from libra_hpc.protocol.carriers import CarrierReady
from libra_hpc.protocol.joining import FIRST_GUEST, is_guest
from libra_hpc.protocol.layout import ResumePoint

SECRET = b"of the run"


def ready(folder: Path, rank: int, message: CarrierReady, engine: str = "simulated", **rollout: Any) -> list[Log]:
    """The events of a carrier that has started."""
    sent: list[Any] = []
    config = validate({"rollout": rollout, "run": {"engine": engine}})
    context = AgentContext(
        rank,
        RankLayout(("planner", "train", "rollout")),
        config,
        RunDir(folder),
        1,
        lambda rank, message: sent.append(message),
        ResumePoint(0, "", 0, ()),
        folder,
        folder,
        secret=SECRET,
    )
    carrier = NodeCarrier(context, lambda: None)
    settings = carrier._config
    assert settings.http_port == (rollout.get("weights_port", 0) if rank == 1 else 0)
    by_tcp = engine == "simulated" or is_guest(rank)
    assert settings.transport == ("tcp" if by_tcp else config.rollout.weights_transport)
    carrier.received(carrier._carrier, 0, message)
    return [message for message in sent if isinstance(message, Log)]


@pytest.mark.parametrize(
    ("rank", "port", "fault", "kinds"),
    [
        (1, 8300, "", ["weights_served"]),
        (1, 8300, "Address already in use", ["weights_not_served"]),
        (2, 8300, "", []),
        (1, 0, "", []),
    ],
)
def test_the_train_leaders_node_alone_serves_another_cluster(
    tmp_path: Path, rank: int, port: int, fault: str, kinds: list[str]
) -> None:
    assert [event.kind for event in ready(tmp_path, rank, CarrierReady(5, fault), weights_port=port)] == kinds


@pytest.mark.parametrize(("reason", "transport"), [("NIXL is not installed", "tcp"), ("", "nixl")])
def test_an_event_names_the_transport_of_weights_and_why_it_is_tcp(tmp_path: Path, reason: str, transport: str) -> None:
    (event,) = ready(tmp_path, 2, CarrierReady(5, by_tcp=reason), "real")

    assert event.kind == "weights_transport"
    assert event.fields == {"rank": 2, "transport": transport, "reason": reason}


def test_guests_and_runs_by_tcp_are_silent_about_it(tmp_path: Path) -> None:
    message = CarrierReady(5, by_tcp="x")
    assert not ready(tmp_path, FIRST_GUEST, message, "real", weights_transport="nixl")
    assert not ready(tmp_path, 2, message, "real", weights_transport="tcp")
