"""When ranks may be repartitioned, what is left for their next start, and the one answer that every order gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import load_resolved, validate
from libra_hpc.config.run import RunConfig
from libra_hpc.coordinator import orders
from libra_hpc.coordinator.repartitioner import Repartitioner
from libra_hpc.facts.journal import LineLog
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.files import write_once
from libra_hpc.mesh.rank_layout import RankLayout
from libra_hpc.policies.control.layout_choice import EVERY_S
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.protocol.plan import PlanDecision
from libra_hpc.protocol.repartition_order import LONGEST, encode_order, new_order
from tests.stage.node_parts import Outbox

GIVEN = validate(
    {
        "run": {"engine": "simulated"},
        "simulated": {"model": "qwen3-8b", "device": "a800", "presets": ["math"]},
        "components": {name: {"nodes": 1, "gpus": 8} for name in ("train", "hybrid", "rollout")},
    }
)
CONFIG = validate(GIVEN.as_data())
"""As agents read it."""


class Job:
    """A run directory and whoever is rank 0 in it."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        self.run.write_json(self.run.config, CONFIG.as_data())
        self.clock = 1000.0

    def rank_0(self, attempt: int = 2, step: int = 0, speedup: float = 1.0) -> Repartitioner:
        self.run.logs(attempt).mkdir(parents=True, exist_ok=True)
        config = CONFIG.changed(simulated={"speedup": speedup})
        components, start = RankLayout.of(self.config()).components, ResumePoint(step, "", 0, ())
        context = Outbox().context_of(self.run.path, 0, *components, config=config, start=start, attempt=attempt)
        log = LineLog(self.run.events)

        def event(kind: str, **fields: Any) -> None:
            log.write({"t": self.clock, "kind": kind, **fields})

        return Repartitioner(context, event, event)

    def config(self) -> RunConfig:
        return load_resolved(self.run.config)

    def order(self, attempt: int = 2, **values: Any) -> str:
        made = new_order(attempt, 1.0, {key.replace("__", "."): value for key, value in values.items()})
        assert write_once(self.run.order, encode_order(made))
        return made.id

    def answers(self) -> list[tuple[str, str, str]]:
        return [(e["kind"], e["by"], e.get("order", "")) for e in read_lines(self.run.events)]

    def reasons(self) -> list[str]:
        return [e["reason"] for e in read_lines(self.run.events) if e["kind"] == orders.REFUSED]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def proposal(changes: dict[str, Any]) -> PlanDecision:
    return PlanDecision("repartition", -1, "better", {}, layout="better", changes=changes)


def test_nothing_is_touched_before_it_is_carried_out(job: Job) -> None:
    repartitioner = job.rank_0()
    assert repartitioner.propose(proposal({"train.tp": 2, "rollout.tp": [1, 2]}))
    assert repartitioner.ordered
    assert job.config() == CONFIG
    repartitioner.carry_out(7)
    assert (job.config().train.tp, job.config().rollout.tp) == (2, [1, 2])
    assert job.answers() == [("repartitioned", "planner", "")]
    assert (
        repartitioner.last
        == "after step 7 by the planner: 1 node trains with TP2, 1 hybrid, 1 rolls out with 1xTP1, 1xTP2"
    )


def test_a_proposal_that_is_none_is_refused_in_words(job: Job) -> None:
    repartitioner = job.rank_0()
    assert not repartitioner.propose(proposal({"components.rollout.nodes": 0, "components.train.nodes": 2}))
    assert not repartitioner.propose(proposal({"rollout.tp": [1, 2, 4]}))
    assert not repartitioner.ordered
    assert [next(word for word in reason.split() if "." in word) for reason in job.reasons()] == [
        "components.rollout.nodes",
        "rollout.tp",
    ]


def test_at_most_one_in_an_hour_of_the_run_whoever_did_the_last(job: Job) -> None:
    assert job.rank_0().not_before == float("-inf")
    job.order(train__tp=2)
    repartitioner = job.rank_0()
    assert repartitioner.poll("")
    repartitioner.carry_out(3)
    assert job.rank_0().not_before == 1000.0 + EVERY_S, "an operator's counts too"
    assert job.rank_0(3, speedup=10.0).not_before == 1000.0 + EVERY_S / 10.0, "a dry run's hour is shorter"
    job.order(train__tp=4)
    assert job.rank_0().poll(""), "and is not held to it"


def test_an_order_waits_while_nodes_are_away_and_is_carried_out_once(job: Job) -> None:
    order = job.order(train__tp=2)
    repartitioner = job.rank_0()
    assert not repartitioner.poll("node 2 is in state to_train")
    assert repartitioner.message == "an order for another layout waits: node 2 is in state to_train"
    assert job.run.order.exists()
    assert repartitioner.poll("")
    assert not repartitioner.poll(""), "seen once"
    assert "as the operator asks" in repartitioner.message
    repartitioner.carry_out(7)
    assert not job.run.order.exists()
    after = job.rank_0(step=7)
    assert not after.poll("")
    assert after.last.startswith("after step 7 by the operator: 1 node trains with TP2")
    assert job.answers() == [("repartition_ordered", "operator", order), ("repartitioned", "operator", order)]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is no order"),
        (b"{", "is no order"),
        (b"\xff\xfe\x00", "is no order"),
        (b"[1, 2]", "is no order"),
        (b"x" * (LONGEST + 1), "is no order: it is longer than 65536 bytes"),
        (b'{"id": "000000000000", "attempt": 2, "t": 1.0, "values": {}}', "length >= 1 - at `$.values`"),
        (b'{"id": "../../etc/xx", "attempt": 2, "t": 1.0, "values": {"train.tp": 2}}', "at `$.id`"),
        (b'{"id": "000000000000", "attempt": "2", "t": 1.0, "values": {"train.tp": 2}}', "at `$.attempt`"),
        (b'{"id": "000000000000", "attempt": 2, "t": 1.0, "values": {"train.tp": {"a": 1}}}', "at `$.values[...]`"),
        (b'{"id": "000000000000", "attempt": 2, "t": 1.0, "values": {"train.tp": "2"}}', "train.tp = '2': wrong type"),
        (
            b'{"id": "000000000000", "attempt": 2, "t": 1.0, "values": {"run.dir": "/"}}',
            "KEY = 'run.dir': not part of a layout",
        ),
        (
            b'{"id": "000000000000", "attempt": 2, "t": 1.0, "values": {"train.tp": 1}}',
            "the run has this layout already",
        ),
        (b'{"id": "000000000000", "attempt": 9, "t": 1.0, "values": {"train.tp": 2}}', "it is an order for attempt 9"),
    ],
)
def test_what_is_no_order_is_refused_once(job: Job, data: bytes, why: str) -> None:
    repartitioner = job.rank_0()
    job.run.order.write_bytes(data)
    assert not repartitioner.poll("")
    assert not repartitioner.poll("")
    (reason,) = job.reasons()
    assert why in reason
    assert not job.run.order.exists()
    assert job.config() == CONFIG


def test_what_cannot_be_removed_is_not_answered_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError("read-only")

    repartitioner = job.rank_0()
    monkeypatch.setattr(Path, "unlink", denied)
    job.run.order.write_bytes(b"no")
    assert not repartitioner.poll("")
    assert not repartitioner.poll("")
    assert len(job.reasons()) == 1


def test_what_is_no_file_is_left_alone(job: Job) -> None:
    job.run.order.mkdir()
    assert not job.rank_0().poll("")
    assert job.answers() == []


def killed_before(job: Job, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, step: int = 7) -> None:
    """Rank 0 dies while it carries out an order, before it calls ``name``."""

    def die(*arguments: Any, **fields: Any) -> None:
        raise KeyboardInterrupt

    repartitioner = job.rank_0()
    assert repartitioner.poll("")
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, die)
        with pytest.raises(KeyboardInterrupt):
            repartitioner.carry_out(step)


def test_killed_before_the_configuration_is_written_the_order_is_refused_by_the_next_attempt(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = job.order(train__tp=2)
    killed_before(job, monkeypatch, RunDir, "write_config")
    assert not job.rank_0(attempt=3).poll("")
    assert job.answers() == [("repartition_ordered", "operator", order), ("repartition_refused", "operator", order)]
    assert "attempt 2 ended before it could be carried out" in job.reasons()[0]
    assert job.config() == CONFIG
    assert not job.run.order.exists()


@pytest.mark.parametrize("name", ["answer", "_remove"])
def test_killed_later_it_is_carried_out_and_logged_once(job: Job, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = job.order(train__tp=2)
    killed_before(job, monkeypatch, orders.Orders, name)
    for _ in range(2):
        again = job.rank_0(step=7)
        assert not again.poll("")
        assert again.last.startswith("after step 7 by the operator")
    assert job.answers() == [("repartition_ordered", "operator", order), ("repartitioned", "operator", order)]
    assert job.config().train.tp == 2
    assert not job.run.order.exists()


def test_an_order_that_the_run_outruns_is_refused(job: Job) -> None:
    repartitioner = job.rank_0()
    order = job.order(train__tp=2)
    repartitioner.give_up("the run is over: completed, step 30 is saved.")
    assert job.answers() == [("repartition_refused", "operator", order)]
    repartitioner.give_up("")
    assert len(job.answers()) == 1


def test_a_configuration_that_is_not_the_one_that_runs_is_not_built_on(job: Job) -> None:
    repartitioner = job.rank_0()
    other = CONFIG.as_data()
    other["components"]["hybrid"]["nodes"] = 0
    damages: list[Callable[[], object]] = [
        lambda: job.run.config.write_text("{"),
        lambda: job.run.write_json(job.run.config, other),
    ]
    for damage in damages:
        damage()
        job.order(train__tp=2)
        assert not repartitioner.poll("")
    assert ["cannot be read" in job.reasons()[0], "another layout than the ranks that run" in job.reasons()[1]] == [
        True,
        True,
    ]
