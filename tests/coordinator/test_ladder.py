"""What follows when nothing in a run progresses."""

from __future__ import annotations

from libra_hpc.coordinator.ladder import Ladder, Movement, Rung
from libra_hpc.process.deadlines import DeadlineSettings

SETTINGS = DeadlineSettings(floor_s=60.0, first_s=900.0, factor=10.0)


def stand(
    versions: dict[int, int], steps: tuple[float, ...] = (5.0,), excused: bool = False, seconds: int = 300
) -> list[tuple[int, Rung]]:
    """What a run does that stands still at step 9, by the second."""
    ladder, found = Ladder(SETTINGS, 0.0), []
    for now in range(seconds):
        rung = ladder.evaluate(Movement("same", excused, 9, steps, versions), float(now))
        if rung is not None:
            found.append((now, rung))
    return found


def test_nodes_with_old_weights_are_dropped_before_all_restart() -> None:
    first, second, *_ = stand({2: 9, 3: 7, 4: 7})
    assert first[1][:2] == ("drop", (3, 4))
    assert first[0] == 61
    assert "weights are of step 7, not 9" in first[1].reason
    assert second[1].action == "restart"
    assert second[0] == 121


def test_without_a_node_to_drop_all_restart() -> None:
    assert [(now, rung.action) for now, rung in stand({2: 9}, seconds=122)] == [(61, "restart")]


def test_the_limit_follows_the_steps() -> None:
    assert stand({}, steps=(5.0, 29.0), seconds=290) == []
    assert stand({}, steps=(), seconds=900) == []
    assert [rung.action for _, rung in stand({}, steps=(), seconds=902)] == ["restart"]


def test_progress_and_an_excuse_begin_again() -> None:
    assert stand({3: 1}, excused=True) == []
    ladder = Ladder(SETTINGS, 0.0)
    assert not any(ladder.evaluate(Movement(now // 50, False, 9, (5.0,), {}), float(now)) for now in range(600))
