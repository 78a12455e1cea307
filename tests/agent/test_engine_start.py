"""What a rollout engine begins with."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.agent.child_start import engine_config
from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol.layout import ResumePoint
from tests.stage.node_parts import Outbox


def test_an_engine_that_is_rebuilt_begins_with_a_checkpoint_that_still_exists(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    config = validate({"model": {"path": "/models/policy"}})
    start = ResumePoint(10, str(run.checkpoint(10)), 80, ())
    context = Outbox().context_of(tmp_path, 2, config=config, start=start)
    run.checkpoint(10).mkdir(parents=True)
    found = engine_config(context, "r2.0", 1, None, -1)
    assert (found.run.model.path, found.version) == (str(run.checkpoint(10) / "policy"), 10)
    run.checkpoint(10).rmdir()
    run.checkpoint(30).mkdir()
    (run.checkpoint(30) / "state.json").write_text('{"step": 30, "low": 240, "extra": []}')
    found = engine_config(context, "r2.0", 1, None, -1)
    assert (found.run.model.path, found.version) == (str(run.checkpoint(30) / "policy"), 30), (
        "older checkpoints have made room"
    )
    context.resume_point = ResumePoint(34, str(run.checkpoint(30)), 272, (), snapshot="step-34", saved_step=30)
    found = engine_config(context, "r2.0", 1, None, -1)
    assert (found.run.model.path, found.version) == (str(run.checkpoint(30) / "policy"), 30), "a snapshot has no policy"
    context.resume_point = ResumePoint(0, "", 0, ())
    assert engine_config(context, "r2.0", 1, None, -1).run.model.path == "/models/policy"
