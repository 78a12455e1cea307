"""Decisions become events: what is new in full, what repeats as a count, and what moves brought once it is measured."""

from __future__ import annotations

from typing import Any

import pytest

from libra_hpc.coordinator.decisions import DecisionLog
from libra_hpc.protocol.plan import Candidate, PlanDecision

MOVE = PlanDecision(
    "to_train",
    4,
    "to_train: moving node 4",
    {"train_nodes": 1.0, "batch_s": 2.0, "after_s": 1.5},
    (4, 5),
    (Candidate(3, 1, 1.5, 1.2, 1.5, 90.0, 20.0),),
    ("drift",),
)


class Scene:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.log = DecisionLog(lambda kind, **fields: self.events.append({"kind": kind, **fields}))

    def hold(self, reason: str, now: float) -> None:
        self.log.add(PlanDecision("hold", -1, reason, {}), now)

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]


def test_a_hold_whose_figures_alone_change_is_counted() -> None:
    scene = Scene()
    for number in range(500):
        scene.hold(f"hold: {number} of 600 steps measured, {number / 7:.2f} s", float(number))
    assert scene.kinds() == ["decision"]
    assert scene.log.last is not None
    assert (scene.log.last.looks, scene.log.last.at) == (500, 499.0)
    scene.hold("hold: the stages balance", 500.0)
    assert scene.kinds() == ["decision", "held", "decision"]
    assert (scene.events[1]["looks"], scene.events[1]["reason"]) == (499, "hold: 499 of 600 steps measured, 71.29 s")
    scene.log.close()
    assert scene.kinds() == ["decision", "held", "decision"]


def test_a_move_carries_inputs_candidates_and_predicted_gain() -> None:
    scene = Scene()
    scene.log.add(MOVE, 7.0)
    (event,) = scene.events
    assert (event["action"], event["nodes"], event["triggers"], event["predicted_gain_s"]) == (
        "to_train",
        [4, 5],
        ["drift"],
        0.5,
    )
    assert event["numbers"] == MOVE.numbers
    assert event["candidates"][0]["gain_s"] == 90.0
    scene.log.add(MOVE, 9.0)
    assert scene.kinds() == ["decision", "decision"], "every move is an event of its own"


def test_what_a_move_brought_follows_once_it_is_measured_with_the_same_work() -> None:
    for nodes, triggers, judged in ((3.0, (), [0.3]), (3.0, ("drift",), []), (2.0, (), []), (1.0, (), [])):
        scene = Scene()
        scene.log.add(MOVE, 7.0)
        scene.hold("hold: node 4 is in state to_train", 8.0)
        measured = PlanDecision("hold", -1, "hold: fine", {"train_nodes": nodes, "batch_s": 1.7}, triggers=triggers)
        scene.log.add(measured, 31.0)
        scene.log.add(measured, 32.0)
        found = [event for event in scene.events if event["kind"] == "move_judged"]
        assert [event["realised_gain_s"] for event in found] == pytest.approx(judged)
        for event in found:
            assert [event[key] for key in ("at", "rank", "to", "predicted_gain_s", "nodes")] == [
                31.0,
                4,
                "train",
                0.5,
                2,
            ]
