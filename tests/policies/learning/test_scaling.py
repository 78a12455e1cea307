"""The sigmoid of reward against compute."""

from __future__ import annotations

import random

import pytest

from libra_hpc.policies.learning.scaling import LEAST, Sigmoid, fit_sigmoid


@pytest.mark.parametrize(
    "true", [Sigmoid(0.1, 0.7, 1.5, 40.0), Sigmoid(-1.0, 0.2, 3.0, 90.0), Sigmoid(0.5, 0.3, 1.0, 5.0)]
)
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_parameters_come_back(true: Sigmoid, noise: float) -> None:
    draw, compute = random.Random(0), [float(step) for step in range(1, 601)]
    found = fit_sigmoid(compute, [true.at(c) + draw.gauss(0.0, noise) for c in compute])
    assert found.asymptote == pytest.approx(true.asymptote, abs=0.01 + noise)
    assert found.midpoint == pytest.approx(true.midpoint, rel=0.05 if noise == 0.0 else 0.25)
    assert max(abs(found.at(c) - true.at(c)) for c in compute) < 0.005 + noise


def test_what_no_sigmoid_can_say_is_a_reason() -> None:
    assert fit_sigmoid([1.0] * (LEAST - 1), [0.0] * (LEAST - 1)) == f"{LEAST - 1} points, of {LEAST} that are needed"
    rising = [float(step) for step in range(1, 100)]
    assert "has not bent" in str(fit_sigmoid(rising, [c**2 for c in rising]))
