"""What a weight update costs: the measured points of the model, and a run's own numbers in their place."""

from __future__ import annotations

import msgspec
import pytest

from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.update_time import UpdateTime, measured, sent_share, update_time

SHAPE, A800 = model_shape("qwen3-14b"), device("a800")


@pytest.mark.parametrize(
    ("changed", "share", "diff_s"), [(0.008, 0.012, 0.38), (0.033, 0.050, None), (0.29, 0.44, None), (0.52, 0.78, 0.68)]
)
def test_the_measured_updates_of_the_lab_notes(changed: float, share: float, diff_s: float | None) -> None:
    assert sent_share(changed) == pytest.approx(share, rel=0.08)
    gigabyte = msgspec.structs.replace(SHAPE, dtype_bytes=1e9 / SHAPE.params)
    if diff_s is not None:
        assert update_time(gigabyte, A800, changed).diff_s == pytest.approx(diff_s, rel=0.1)


def test_what_changed_is_sent_and_whole_weights_are_staged() -> None:
    few, many = (update_time(SHAPE, A800, changed) for changed in (0.01, 1.0))
    assert few.wire_s < 0.02 * many.wire_s
    assert (few.stage_s, few.pause_s) == (many.stage_s, many.pause_s)
    assert few.pause_s == pytest.approx(SHAPE.weight_bytes / 25e9)
    exact = msgspec.structs.replace(SHAPE, dtype_bytes=4)
    assert update_time(exact, A800, 0.01).wire_s == pytest.approx(2 * many.wire_s), "float32 is sent whole"


def test_a_run_replaces_assumptions_by_its_medians() -> None:
    line = {"diff_s": 0.2, "wire_s": 0.1, "image_s": 0.05, "stage_s": 0.3, "pause_s": 0.01}
    lines = [line, {**line, "pause_s": 0.03}, {**line, "pause_s": 9.0}, {"step": 4}]
    found = measured(lines, tp=2, processes=4)
    assert found == UpdateTime(0.8, pytest.approx(0.15), 0.6, 0.06)
    assert found.by(4).words(2) == "0.65 s until engines at TP2 have them, pause 0.030 s"
    assert measured([{"diff_s": 0.2}], tp=2, processes=4) is None
