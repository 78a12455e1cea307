"""The metrics of a step have what was measured, under the names of the columns."""

from __future__ import annotations

import math

import msgspec

from libra_hpc.facts.columns import COLUMNS
from libra_hpc.policies.learning.guards import READ
from libra_hpc.protocol.trainer import Offered, StepDone
from libra_hpc.train_leader.step_metrics import offer_metrics, train_metrics
from tests.protocol.step_reports import batch_stats

MEANS = {"entropy", "ratio_mean", "ratio_truncated", "logprob_gap", "clipped", "masked", "behaviour_kl", "kl_clamped"}
OFFERS = [Offered(4, 3, "t0", 300, 20, 1000, 0.5), Offered(4, 3, "t1", 700, 40, 1000, 0.2)]


def done(loss_tokens: int) -> StepDone:
    return StepDone(1, 1, 0.1, 0.2, 1.0, 0.0, 0.1, 0.001, 0.02, 0.5, 900, loss_tokens, 1.0, 0.1, 0.1)


def test_the_guards_find_what_they_read() -> None:
    metrics = batch_stats() | train_metrics([done(400)], 900, 1.0) | offer_metrics(OFFERS, 4, 2)
    assert metrics.keys() >= set(READ)
    assert metrics.keys() <= {column.name for column in COLUMNS}
    assert (metrics["entropy"], metrics["logprob_gap"]) == (0.5, 0.02)


def test_a_step_without_a_token_to_train_on_has_no_means_over_tokens() -> None:
    with_tokens, without = (train_metrics([done(tokens), done(0)], 900, 1.0) for tokens in (400, 0))
    assert with_tokens.keys() - without.keys() == MEANS


def test_skipped_updates_have_no_means() -> None:
    nothing = msgspec.structs.replace(done(400), loss=math.nan, grad_norm=math.nan, behaviour_kl=math.nan)
    missing = train_metrics([done(400)], 900, 1.0).keys() - train_metrics([nothing], 900, 1.0).keys()
    assert missing == {"loss", "grad_norm", "behaviour_kl"}


def test_the_offers_of_all_processes_are_one_version_and_no_work_of_the_stage() -> None:
    metrics = offer_metrics(OFFERS, 4, element_bytes=2)
    assert metrics == {"changed_share": 0.03, "weights_mb": 0.001, "weights_dense_mb": 0.004, "diff_s": 0.5}
    assert offer_metrics(OFFERS, 5, element_bytes=2) == {}, "of an older version"
    assert train_metrics([done(400)], 900, 1.0)["train_s"] == 1.0 + 0.1 + 0.1
