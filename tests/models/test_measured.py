"""Calibration: the fit recovers the step's model and resists outliers; wrong files are named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.errors import UserError
from libra_hpc.models.step_times.curves import StepCurve, isotonic
from libra_hpc.models.step_times.fitting import robust_fit
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.measured import Calibration, StepPoint, fit_steps, load, measured_times, save

BASE, SEQUENCE, KV, PREFILL, PAIR = 4e-3, 2e-4, 3e-8, 5e-5, 2e-8


def line(decodes: int, kv_tokens: int, prefill: int, context: int) -> float:
    return BASE + SEQUENCE * decodes + KV * kv_tokens + prefill * (PREFILL + PAIR * (context + prefill / 2))


def stairs(decodes: int, kv_tokens: int, prefill: int, context: int) -> float:
    """Base time that jumps where the batch passes a multiple of eight."""
    return line(0, kv_tokens, prefill, context) + 2e-3 * -(-decodes // 8)


def points(
    model: Callable[[int, int, int, int], float], count: int = 600, noise: float = 0.02, slow: float = 0.0
) -> list[StepPoint]:
    """Steps of a busy engine; another process makes a share ``slow`` of them up to thirty times as long."""
    rng = random.Random(7)
    out = []
    for _ in range(count):
        decodes = rng.randint(0, 24)
        prefill = rng.randint(1, 512) if rng.random() < 0.3 or not decodes else 0
        kv, context = decodes * rng.randint(50, 4000), rng.randint(0, 3000) if prefill else 0
        seconds = model(decodes, kv, prefill, context) * rng.lognormvariate(0, noise)
        if rng.random() < slow:
            seconds *= rng.uniform(2, 30)
        out.append(StepPoint(tp=1, decodes=decodes, kv_tokens=kv, prefill=prefill, context=context, seconds=seconds))
    return out


def calibration(steps: list[StepPoint]) -> Calibration:
    return Calibration(device="cpu", model="tiny", kv_capacity={1: 4096}, points=steps)


def test_exact_steps_give_the_coefficients_back() -> None:
    fit = fit_steps(points(line, noise=0.0))
    found = (fit.base, fit.per_sequence, fit.per_kv, fit.per_prefill, fit.per_pair)
    assert found == pytest.approx((BASE, SEQUENCE, KV, PREFILL, PAIR), rel=1e-6)
    assert fit.batches == ()
    assert fit.total == pytest.approx(1)


def test_noisy_steps_with_outliers_still_give_good_predictions() -> None:
    assert fit_steps(points(line)).batches == (), "steps on a line get no table"
    times = measured_times(calibration(points(line, noise=0.05, slow=0.05)), 1)
    for step in [(1, 500, 0, 0), (24, 60_000, 0, 0), (8, 8_000, 256, 1000), (0, 0, 512, 2048)]:
        # The typical step, and up to 30 % for the share of slow steps that the total contains.
        assert 0.95 < times.step_s(*step) / line(*step) < 1.3
    assert times.fit.median_error < 0.3


def test_the_fitted_total_is_the_measured_total_when_noise_is_skewed() -> None:
    rng = random.Random(3)
    steps = [msgspec.structs.replace(p, seconds=p.seconds * (1 + rng.expovariate(3))) for p in points(line, noise=0.0)]
    assert fit_steps(steps).total == pytest.approx(1, abs=0.01)


def test_steps_that_jump_between_batch_sizes_get_a_table() -> None:
    fit = fit_steps(points(stairs))
    assert [batch for batch, _ in fit.batches][:-1] == list(range(25))
    assert fit.median_error < 0.03
    times = measured_times(calibration(points(stairs)), 1)
    assert times.step_s(16, 8000) == pytest.approx(stairs(16, 8000, 0, 0), rel=0.05)
    assert times.step_s(17, 8000) == pytest.approx(stairs(17, 8000, 0, 0), rel=0.05)
    assert times.step_s(60, 8000) > times.step_s(24, 8000)


def test_no_coefficient_is_negative_where_noise_would_make_it_so() -> None:
    fit = fit_steps(points(lambda decodes, kv, prefill, context: 0.01, noise=0.1))
    assert min(fit.base, fit.per_sequence, fit.per_kv, fit.per_prefill, fit.per_pair) >= 0
    assert fit.base == pytest.approx(0.01, rel=0.05)


def test_one_batch_size_alone_is_enough_to_predict_it() -> None:
    steps = [StepPoint(tp=1, decodes=4, kv_tokens=4000 + 4 * i, seconds=0.02) for i in range(50)]
    assert measured_times(calibration(steps), 1).step_s(4, 4100) == pytest.approx(0.02, rel=1e-6)


def test_a_long_run_is_thinned_to_a_fit_of_bounded_size() -> None:
    assert fit_steps(points(line, count=1000) * 20).points <= 4096


def test_a_saved_file_is_read_back_and_used_by_lookup(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    written = calibration(points(line))
    for _ in range(2):
        save(written, path)
    assert load(path) == written
    assert [each.name for each in tmp_path.iterdir()] == ["cpu.json"]
    times = lookup("CPU", "models/tiny", 1, calibration=path)
    assert (times.tp, times.kv_capacity) == (1, 4096)
    assert times.source.startswith("measured: 600 steps of tiny on 1 x cpu")


@pytest.mark.parametrize(
    ("device", "model", "tp", "message"),
    [
        ("a100", "tiny", 1, r"device = 'a100': .*cpu.json was measured with another; valid: cpu"),
        ("cpu", "tidy", 1, r"model = 'tidy': .* valid: tiny .did you mean 'tiny'"),
        ("cpu", "tiny", 2, "tp = 2: the calibration file has no steps of it; valid: 1"),
        ("cpu", "tiny", 1, "steps of tp 1 = 7: too few to fit; valid: at least 8"),
    ],
)
def test_lookup_refuses_another_device_model_or_degree_and_too_few_steps(
    device: str, model: str, tp: int, message: str, tmp_path: Path
) -> None:
    save(calibration(points(line, count=7)), tmp_path / "cpu.json")
    with pytest.raises(UserError, match=message):
        lookup(device, model, tp, calibration=tmp_path / "cpu.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, r"Invalid enum value 'other' - at `\$.format`"),
        ({"kv_capacity": {"1": 0}}, r"Expected `int` >= 1 - at `\$.kv_capacity"),
        (
            {"points": [{"tp": 1, "decodes": 0, "kv_tokens": 0, "seconds": 1.0}]},
            r"a step without .* at `\$.points\[0\]`",
        ),
        ({"points": [{"tp": 1, "decodes": 1, "kv_tokens": -1, "seconds": 1.0}]}, r"Expected `int` >= 0"),
        ({"points": [{"tp": 1, "decodes": 1, "kv_tokens": 1, "seconds": 0}]}, r"> 0.0 - at `\$.points\[0\].seconds`"),
        ({"points": [{"tp": 1, "decodes": 1, "kv_tokens": 1, "secs": 1}]}, "unknown field `secs`"),
        ({"points": [{"tp": 1, "decodes": 1.5, "kv_tokens": 1, "seconds": 1}]}, "Expected `int`"),
        ({"extra": 1}, "unknown field `extra`"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "cpu.json"
    save(calibration(points(line, count=20)), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", None])
def test_a_file_that_is_no_calibration_is_a_users_mistake(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "cpu.json").write_bytes(content)
    with pytest.raises(UserError, match="No such file" if content is None else "calibration file"):
        load(tmp_path / "cpu.json")


def test_equal_columns_do_not_break_the_fit() -> None:
    found = robust_fit([(x, 2.0 * x, 0.0) for x in range(1, 20)], [3.0 * x for x in range(1, 20)])
    assert found[0] + 2 * found[1] == pytest.approx(3)
    assert found[2] == 0


def test_curves_are_isotonic_and_go_on_beyond_their_points() -> None:
    assert isotonic([1, 3, 2, 2, 5]) == pytest.approx([1, 7 / 3, 7 / 3, 7 / 3, 5])
    curve = StepCurve([1, 2, 4], [10, 20, 30])
    assert [curve(x) for x in (0, 1, 1.5, 4, 6)] == [10, 10, 15, 30, 40]
