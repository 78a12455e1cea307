"""What an agent does about what its node's carrier reports."""

from __future__ import annotations

from typing import Any, cast

from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.config.run import RunConfig
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.mesh.rank_layout import RankLayout
from libra_hpc.protocol.agents import FromReplica
from libra_hpc.protocol.carriers import PieceRefused, Publish
from libra_hpc.protocol.trainer import OfferFailed


class Context:
    """Stands for `AgentContext`."""

    def __init__(self) -> None:
        self.rank, self.config = 1, RunConfig.model_validate({})
        self.layout = RankLayout(("planner", "train"))
        self.sent: list[Any] = []
        self.logged: list[str] = []

    def send(self, rank: int, message: Any) -> None:
        self.sent.append((rank, message))

    def log(self, kind: str, **fields: Any) -> None:
        self.logged.append(kind)


def test_an_own_offer_that_is_not_whole_is_told_to_the_train_leader_once_for_each_publication() -> None:
    context = Context()
    carrier = NodeCarrier(cast(AgentContext, context), lambda: None)

    def refused(own: bool) -> None:
        carrier.received(cast(Any, None), 0, PieceRefused(3, "t0", "torn", own))

    refused(own=False)
    assert not context.sent, "it comes again from its owner"
    for _ in range(3):
        refused(own=True)
    assert context.sent == [(1, FromReplica(1, OfferFailed(3, "torn")))]
    carrier.publish(Publish(3, -1, (("t0", 1),), ()))
    refused(own=True)
    assert len(context.sent) == 2
    assert set(context.logged) == {"weights_corrupt"}
