"""The metrics of a step have what was measured, under the names of the columns."""

from __future__ import annotations

from libra_hpc.facts.columns import COLUMNS
from libra_hpc.policies.learning.guards import READ
from libra_hpc.protocol.trainer import Offered, StepDone
from libra_hpc.train_leader.step_metrics import offer_metrics, train_metrics
from tests.protocol.step_reports import batch_stats

OFFERS = [Offered(4, 3, "t0", 300, 20, 1000, 0.5), Offered(4, 3, "t1", 700, 40, 1000, 0.2)]


CORE = {"loss": 0.1, "entropy": 0.5, "logprob_gap": 0.02, "skipped": 0, "loss_tokens": 400, "trained_tokens": 900}


def done(train_s: float, reduce_s: float) -> StepDone:
    return StepDone(1, 1, CORE | {"train_s": train_s, "reduce_s": reduce_s})


def test_the_guards_find_what_they_read() -> None:
    metrics = batch_stats() | train_metrics([done(1.1, 0.1)], 900, 1.0) | offer_metrics(OFFERS, 4, 2)
    assert metrics.keys() >= set(READ)
    assert metrics.keys() <= {column.name for column in COLUMNS}


def test_the_numbers_of_replicas_are_merged_each_by_its_rule() -> None:
    elastic = StepDone(1, 1, {"loss": 9.0, "loss_tokens": 200, "trained_tokens": 300, "train_s": 2.0, "reduce_s": 0.3})
    metrics = train_metrics([done(1.1, 0.5), elastic], 1200, 1.0)
    own = {"loss_tokens": 600, "trained_tokens": 1200, "train_s": 2.3, "reduce_s": 0.3}
    assert metrics == CORE | own | {"train_ahead_s": 2.3 - 1.0, "train_wall_s": 1.0, "train_tokens_per_s": 1200 / 2.3}


def test_the_offers_of_all_processes_are_one_version_and_no_work_of_the_stage() -> None:
    metrics = offer_metrics(OFFERS, 4, element_bytes=2)
    assert metrics == {"changed_share": 0.03, "weights_mb": 0.001, "weights_dense_mb": 0.004, "diff_s": 0.5}
    assert offer_metrics(OFFERS, 5, element_bytes=2) == {}, "of an older version"
