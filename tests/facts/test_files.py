"""Series, summary and screen of a synthetic run whose facts are known."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from libra_hpc.facts import series, status, summary, view
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import FailedAttempts, StageStatus, Status, decode_status, encode_status, in_simulated_time

from . import synthetic
from .synthetic import event


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return synthetic.make_run(tmp_path)


def text_of(renderable: object, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def screen(
    status: Status, width: int = 100, *, later: float = 0.0, steps: Sequence[series.Record] = (), room: int = 0
) -> str:
    """The screen of ``width`` columns."""
    text = text_of(view.status_screen(status, now=status.updated_at + later, steps=steps), room or width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    return text


def ended(run: RunDir, facts: summary.Summary | None = None, width: int = 100) -> str:
    """The screen of the run once it is over."""
    return text_of(summary.render_summary(run, facts or summary.summarise(run), "completed"), width)


def flat(text: str) -> str:
    """Without frames and line breaks."""
    return " ".join(text.replace("│", " ").split())


def test_a_step_trained_again_after_a_resume_counts_once(run: RunDir) -> None:
    synthetic.write(run.metrics, {"t": synthetic.START + 500, "step": 60, "reward": 0.99, "tokens": 7})
    rows = series.steps(run)
    assert [row["step"] for row in rows] == list(range(1, synthetic.STEPS + 1))
    assert rows[-1]["reward"] == 0.99
    assert summary.summarise(run).numbers["tokens"] == 1000 * (synthetic.STEPS - 1) + 7


def test_torn_and_foreign_lines_are_skipped(run: RunDir) -> None:
    with run.metrics.open("ab") as handle:
        handle.write(b'{"note": 1}\n[1, 2]\n{"t": 1, "ste')
    assert len(series.steps(run)) == synthetic.STEPS


def test_moves_are_paired_by_rank() -> None:
    log = [
        event(1.0, "move_started", rank=2, to="train", reason="a"),
        event(2.0, "move_started", rank=3, to="to_rollout", reason="b"),
        event(5.0, "move_done", rank=2, role="train"),
    ]
    first, second = series.moves(log)
    assert (first.rank, first.to, first.reason, first.end, first.seconds) == (2, "train", "a", 5.0, 4.0)
    assert (second.to, second.end, second.seconds) == ("rollout", None, None)


@pytest.mark.parametrize(
    ("record", "name"), [({"after_drift": 0.6}, "after drift"), ({"after_drift": 0.0}, "before drift"), ({}, "")]
)
def test_the_phase_of_a_step(record: dict[str, object], name: str) -> None:
    assert series.phase(record) == name


def test_nodes_that_moved_by_one_decision_share_its_gain_and_an_older_move_has_its_own() -> None:
    to_train = {"rank": 2, "to": "train"}
    log = [
        event(1.0, "move_started", **to_train, predicted_gain_s=0.9),
        event(5.0, "move_done", rank=2, role="train"),
        event(6.0, "move_judged", **to_train, predicted_gain_s=0.9, realised_gain_s=-0.1),
        event(20.0, "move_started", **to_train, predicted_gain_s=0.5),
        event(20.01, "move_started", rank=3, to="train", predicted_gain_s=0.5),
        event(21.0, "move_started", rank=4, to="rollout"),
        event(40.0, "move_judged", **to_train, predicted_gain_s=0.6, realised_gain_s=0.4),
    ]
    gains = [(move.rank, move.predicted_gain_s, move.realised_gain_s) for move in series.moves(log)]
    assert gains[:3] == [(2, 0.9, -0.1), (2, 0.6, 0.4), (3, 0.6, 0.4)]
    assert gains[3][1:] == (None, None)


def test_summary_states_the_facts_of_the_run(run: RunDir) -> None:
    got = summary.summarise(run)
    assert (got.steps, got.attempts) == (synthetic.STEPS, 1)
    assert got.numbers == (
        {"tokens": 60_000, "loss_tokens": 24_000, "train_tokens_per_s": 900.0, "rollout_tokens_per_s": 350.0}
        | {"train_ahead_s": None}
        | {"staleness_mean": 0.5, "staleness_max": 1, "guest_tokens": 0, "recomputed_tokens": 0, "evicted_tokens": 0}
        | {"old_kv_tokens": 0, "spot_tokens": 0, "lent_tokens": 0}
        | {"engines_lost": 1, "resubmitted": 1, "pauses": 1, "given_up": 1}
        | {"kept_trajectories": 24, "kept_unfinished": 3, "kept_tokens": 2_400}
    )
    assert got.wall_s == pytest.approx(181)
    assert [change.of for change in got.rewards] == ["before drift", "after drift"]
    (move,) = got.moves
    # Steps end every 3 s: those at 102, 105 and 108 s fall between 100 and 109.5 s; ten trajectories of 50 tokens end
    # in it, at 100 .. 109 s.
    assert (move.rank, move.to, move.at_s, move.seconds) == (2, "train", 100.0, 9.5)
    assert (move.steps_meanwhile, move.tokens_meanwhile) == (3, 500)
    assert (move.predicted_gain_s, move.realised_gain_s) == (0.42, 0.31)
    assert got.accuracy is not None
    assert (got.accuracy.steps, got.accuracy.error) == (synthetic.STEPS - 3, pytest.approx(0.1))
    assert got.checkpoints == [50]
    assert [(found.kind, found.count, found.error) for found in got.failures] == [
        ("raised", 12, "KeyError: 'x'"),
        ("timeout", 3, "late"),
    ]
    run.status.unlink()
    # Without a status, as far as the events show.
    found = [(one.kind, one.count, one.error) for one in summary.summarise(run).failures]
    assert found == [("raised", 11, "KeyError: 1"), ("timeout", 1, "KeyError: 2")]


def test_screens_of_a_dry_run_are_in_simulated_time(run: RunDir) -> None:
    status = msgspec.structs.replace(synthetic.make_status(run), speedup=60.0)
    status = msgspec.structs.replace(status, numbers=status.numbers | {"update_s": 0.5})
    run.status.write_bytes(encode_status(status))
    run.write_json(run.plan, {"predicted": {"step_ends_s": [200.0, 350.0], "batch_s": 150.0}})
    got, before = summary.summarise(run), synthetic.EVERY_STEP
    assert (got.wall_s, got.numbers["staleness_mean"]) == (pytest.approx(181), before["staleness_mean"])
    speeds = [got.numbers[f"{stage}_tokens_per_s"] for stage in ("train", "rollout")]
    assert speeds == [pytest.approx(900 / 60), pytest.approx(350 / 60)]
    (move,) = got.moves
    assert (move.at_s, move.seconds, move.predicted_gain_s) == (6000.0, 570.0, pytest.approx(25.2))
    assert (move.steps_meanwhile, move.tokens_meanwhile) == (3, 500)
    assert move.reason == "to_train: training takes 138.0 s a batch, rollout 126.0 s"
    text = flat(ended(run, got))
    # Its plan: two steps end after 350 s, and 58 take 150 s each.
    assert "60 in 3:00:00 since the first prompt, 2:30:50 planned; simulated, 3:01 by the clock;" in text
    assert "measured 180.00 s (mean" in text
    shown = flat(screen(in_simulated_time(status), 100))
    for fact in ("3:00 by the clock", "train 1 15 85.20", "30.00 s to engines", "expects 192.00 s", "7.5 s"):
        assert fact in shown, fact
    assert in_simulated_time(synthetic.make_status(run)) == synthetic.make_status(run)


def test_a_summary_of_80_columns_breaks_words_before_numbers(run: RunDir) -> None:
    got = summary.summarise(run)
    numbers = {"at_s": 45_296.0, "seconds": 1_234.5, "steps_meanwhile": 4_321, "tokens_meanwhile": 123_456_789}
    gains = {"predicted_gain_s": 1_234.56, "realised_gain_s": -1_234.56}
    far = [msgspec.structs.replace(move, to="rollout", rank=12, **numbers, **gains) for move in got.moves]
    shown = ended(run, msgspec.structs.replace(got, moves=far), 80)
    assert "…" not in shown
    for whole in ("12:34:56", "1234.5 s", "4321", "123,456,789", " 1234.56 s", "-1234.56 s", "rollout"):
        assert whole in shown, whole


@pytest.mark.parametrize(
    ("reason", "simulated"),
    [
        (
            "a batch from 0.85 s (train 0.85, rollout 0.42) to 12.50 s; 4 s over",
            "a batch from 170.00 s (train 170.00, rollout 84.00) to 2500.00 s; 800 s over",
        ),
        ("more than 1.0 x 0.2 s: 0.1 for the restart", "more than 1.0 x 40.0 s: 20.0 for the restart"),
        (
            "node 2 of r3.0 (32%, 4.5%): tool times drifted from 3 to 7 s",
            "node 2 of r3.0 (32%, 4.5%): tool times drifted from 600 to 1400 s",
        ),
    ],
)
def test_seconds_in_a_reason_are_found_among_its_numbers(reason: str, simulated: str) -> None:
    found = series.simulated({"reason": reason, "numbers": {"gain_s": 2.0, "nodes": 3}}, 200.0)
    assert found == {"reason": simulated, "numbers": {"gain_s": 400.0, "nodes": 3}}


@pytest.mark.parametrize(
    ("rows", "planned", "changes"),
    [
        ([{"reward": r} for r in (0.0, 0.2, 0.4, 0.6, 0.8)], 0, [("", 0.0, 0.8)]),
        ([{"reward": r} for r in (0.0, 0.2, 0.4, 0.6, 0.8)], 10, [("", 0.1, 0.8)]),
        (
            [{"reward": r, "after_drift": float(i > 1)} for i, r in enumerate((0.5, 0.8, 0.1, 0.4))],
            20,
            [("before drift", 0.5, 0.8), ("after drift", 0.1, 0.4)],
        ),
        (
            [{"reward": 0.5, "math/reward": 0.2, "eval/reward": 1.0}, {"reward": 0.5, "qa/reward": 0.7}],
            0,
            [("math", 0.2, 0.2), ("qa", 0.7, 0.7)],
        ),
    ],
)
def test_no_change_of_the_reward_is_between_different_work(
    rows: list[dict[str, float]], planned: int, changes: list[tuple[str, float, float]]
) -> None:
    found = series.reward_changes(rows, planned)
    assert [(one.of, pytest.approx(one.first), pytest.approx(one.last)) for one in found] == changes


def test_summary_of_a_run_that_never_started(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "empty")
    got = summary.summarise(run)
    assert (got.steps, got.rewards, got.moves) == (0, [series.RewardChange("", None, None)], [])
    assert "reward" in ended(run, got)


def test_rendered_summary_names_the_move_and_its_reason(run: RunDir) -> None:
    text = ended(run)
    facts = flat(text)
    for fact in (
        *("3 steps, 500 tokens", "node 2 training takes 2.3 s a batch", "0.42 s", "0.31 s"),
        "planner expected 3.30 s, measured 3.00 s (mean of 57 steps), error 10% (median of blocks of 8)",
        "failed 12 raised (KeyError: 'x'), 3 timeout",
        "admission pauses 1, prompts given up 1",
        "24 trajectories, 3 unfinished ones, 2,400 generated tokens",
    ):
        assert fact in facts, fact
    assert str(run.path) in text.replace("\n", "")


STEPS = [{"reward": reward} for reward in [0.31] * 12 + [0.4] * 20 + [0.71] * 9]


def test_the_screen_fits_100_columns_or_80_and_cuts_nothing_off(run: RunDir) -> None:
    status = synthetic.make_status(run, step=41)
    wide, narrow = (
        screen(status, width, later=0.5, steps=STEPS, room=room) for width, room in ((view.WIDTH, 200), (80, 80))
    )
    expects = "planner expects 3.20 s a step (train 3.20 s, rollout 0.91 s)"
    expected = (expects, "planner expected 3.31 s, measured 3.00 s (mean of 8 steps), error 10%")
    node = ["a800-03", "moving node 2", "→ train", "t2.0 starting"]
    for fact in ("41 / 60", "0.310 → 0.710", "2,346", "TP 2", "57 open", *expected, *node):
        assert fact in wide, fact
    for fact in ("0.310 → 0.710", "generated/s", "2,346", "KV cache", "0.48 mean, 1 max"):
        assert fact in narrow, fact


def test_a_low_terminal_gets_the_short_screen(run: RunDir) -> None:
    status = synthetic.make_status(run, step=41)
    whole, low = (
        text_of(view.status_screen(status, now=status.updated_at, steps=STEPS, short=short)) for short in (False, True)
    )
    assert len(low.splitlines()) <= 24 < len(whole.splitlines())
    assert [words in whole for words in ("0.310 → 0.710", "2,346", "moving node 2", "a800-03")] == [True] * 4
    assert "1 engine lost, 1 engine ready" in low
    assert [words in low for words in ("0.310 → 0.710", "2,346", "moving node 2", "a800-03")] == [True] * 3 + [False]


def test_a_thousand_nodes_are_shown_by_role_with_the_odd_ones(run: RunDir) -> None:
    status = synthetic.make_status(run, step=41, nodes=1024)
    nodes = [msgspec.structs.replace(node, heartbeat_age_s=0.3) for node in status.nodes]
    nodes[900] = msgspec.structs.replace(nodes[900], role="lost", engines={}, version=-1, heartbeat_age_s=21.0)
    nodes[800] = msgspec.structs.replace(nodes[800], version=38)
    nodes[700] = msgspec.structs.replace(nodes[700], heartbeat_age_s=9.0)
    status, began = msgspec.structs.replace(status, nodes=nodes), time.process_time()
    text = screen(status, 80)
    assert time.process_time() - began < 0.5, "a live screen is drawn every second"
    assert len(text.splitlines()) <= 50
    roles = ("rollout 1,020 1 engine lost, 8,153 engines ready v38 to v41 9.0 s", "lost 1 - 21.0 s")
    odd = (
        "901 rollout lost",
        "801 rollout rollout 8 engines ready v38",
        "701 rollout rollout 8 engines ready v41 9.0 s",
    )
    for words in (*roles, *odd, "a800-04"):
        assert words in flat(text), flat(text)
    assert "a800-0702" not in text
    silent = [msgspec.structs.replace(node, heartbeat_age_s=9.0) for node in nodes]
    assert "1,016 more: libra-hpc status --nodes" in screen(msgspec.structs.replace(status, nodes=silent), 80)
    every = text_of(view.status_screen(status, now=status.updated_at, every_node=True), 80)
    assert all(f"a800-0{rank + 1} " in every for rank in range(1024))


NEW_WEIGHTS = {"changed_share": 0.033, "weights_mb": 34.2, "weights_dense_mb": 690.1, "update_s": 0.58, "pause_s": 6e-4}
SLOW = "engine r3.1 (node3) takes 2.4x its class' time per step since 12:03"
SHORT_KV = {"waiting_for_room": 2, "recomputed_tokens": 81_920, "evicted_tokens": 65_536, "waiting_turns": 3}
RECOMPUTED = "recomputed 81,920 context tokens, 65,536 of them evicted from a KV cache"


@pytest.mark.parametrize(
    ("changes", "later", "shown", "hidden"),
    [
        ({}, 0.0, ["reward 0.310 → 0.710", "12 raised (KeyError: 'x'), 3 timeout"], ["recomputed", "no news"]),
        ({"step": 0}, 0.0, ["reward - "], ["reward 0.310"]),
        (SHORT_KV, 0.0, ["3 turns waiting, 2 of them for KV cache, 4 tools running", RECOMPUTED], []),
        (NEW_WEIGHTS, 0.0, ["new weights 3.3% changed, 34.2 MB, 0.58 s to engines, pause 0.001 s"], []),
        ({"slow": [SLOW]}, 0.0, [SLOW], []),
        ({"speedup": 60.0}, 0.0, ["dry run, x60", "weights v60"], ["c3 ready"]),
        ({}, 3600.0, ["no news for 1:00:00"], ["dry run"]),
        ({"rollout": StageStatus(0.0, 0.0, 0.0, 2)}, 0.0, ["rollout 2 0 - ─"], []),
        ({"estimate": None, "accuracy": None}, 0.0, [], ["planner expect"]),
    ],
)
def test_the_screen_shows_what_matters_now(
    run: RunDir, changes: dict[str, Any], later: float, shown: list[str], hidden: list[str]
) -> None:
    status = synthetic.make_status(run)
    if changes in (SHORT_KV, NEW_WEIGHTS):
        changes = {"numbers": status.numbers | changes}
    status = msgspec.structs.replace(status, **changes)
    text = flat(screen(status, 80, later=later, steps=STEPS if status.step else ()))
    for words in shown:
        assert words in text
    for words in hidden:
        assert words not in text


@pytest.mark.parametrize("width", [80, 100])
def test_the_screen_names_failures_and_why_admission_is_paused(run: RunDir, width: int) -> None:
    why = "9 of the last 9 trajectories failed. One attempt at a time goes on until one succeeds."
    failures = [FailedAttempts("raised", 12_345, "E: " + "long\n" * 100)]
    status = synthetic.make_status(run)
    text = flat(screen(msgspec.structs.replace(status, paused=why, message=why, failures=failures), width))
    assert why in text
    assert "12,345 raised (E: long long" in text


def test_a_status_of_an_older_version_is_read_without_what_is_no_longer_shown(run: RunDir) -> None:
    status = synthetic.make_status(run)
    old = json.loads(encode_status(status)) | {"forecast": {"steps": [], "error": 0.1}}
    for field in ("estimate", "accuracy", "failures", "paused", "slow"):
        del old[field]
    read = decode_status(json.dumps(old).encode())
    assert read == msgspec.structs.replace(status, estimate=None, accuracy=None, failures=[], paused="", slow=[])


def accuracy(*pairs: tuple[float | None, float]) -> status.StepAccuracy | None:
    """Of (expected, measured) seconds."""
    return status.step_accuracy([{"expected_s": expected, "step_s": measured} for expected, measured in pairs])


def test_steps_are_compared_in_blocks_and_only_where_there_was_an_estimate() -> None:
    assert accuracy() is None
    assert accuracy((None, 3.0), (2.0, 0.0)) is None
    two = status.StepAccuracy(2, 2.0, 2.5, pytest.approx(0.2))
    assert accuracy((None, 9.0), (2.0, 4.0), (2.0, 1.0)) == two
    # Bursts: every other step is long, the mean is as expected.
    assert accuracy(*[(2.0, 3.5), (2.0, 0.5)] * 8) == status.StepAccuracy(16, 2.0, 2.0, 0.0)
    # Blocks end with the newest step: the oldest three are in none of the two.
    got = accuracy(*[(9.0, 1.0)] * 3, *[(1.1, 1.0)] * 8, *[(1.3, 1.0)] * 8)
    assert got is not None
    assert (got.steps, got.error) == (19, pytest.approx(0.2))


@pytest.mark.parametrize("content", [b"", b'{"state": ', b"[]", b"[" * 100_000, b"\xff\xfe"])
def test_a_torn_document_reads_as_empty(content: bytes, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "torn")
    run.result.write_bytes(content)
    assert run.read_json(run.result) == {}
    assert run.read_json(run.path) == {}, "a folder stands for any file that cannot be read"
