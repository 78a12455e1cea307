"""Events of carriers: for another cluster that pulls new weights, and how nodes get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.config.load import validate
from libra_hpc.protocol.agents import Log
from libra_hpc.protocol.carriers import CarrierReady
from tests.stage.node_parts import Outbox


def ready(folder: Path, rank: int, message: CarrierReady, **rollout: Any) -> list[Log]:
    """The events of a carrier that has started."""
    box = Outbox()
    config = validate({"rollout": rollout, "run": {"engine": "simulated"}})
    carrier = NodeCarrier(box.context_of(folder, rank, config=config, secret=b"of the run"), lambda: None)
    assert carrier._config.http_port == (rollout.get("weights_port", 0) if rank == 1 else 0)
    carrier.received(carrier._carrier, 0, message)
    return box.of(Log)


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
