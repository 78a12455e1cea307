"""Alerts, sent by a real script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.facts.events import alert_of
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.owner.owner_records import OwnerRecords
from libra_hpc.process import alerts as module
from libra_hpc.process.alerts import Alerts


def run_with(folder: Path, script: str, on: list[str]) -> RunDir:
    """A run whose alerts go to this script, which is called with one argument before the text."""
    program = folder / "notify.sh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    run = RunDir(folder / "study-001")
    run.logs(1).mkdir(parents=True)
    run.write_json(run.config, {"run": {"steps": 40}, "notify": {"command": [str(program), "a $b"], "on": on}})
    return run


def finish(run: RunDir, state: str, message: str, step: int) -> None:
    records = OwnerRecords(run, 1)
    records.result(state, message, step)
    records.close()


def test_the_end_of_a_run_reaches_a_script_as_text_and_as_json(tmp_path: Path) -> None:
    run = run_with(tmp_path, f'echo "$#|$1|$2" > {tmp_path}/text; cat > {tmp_path}/facts', ["failed"])
    finish(run, "failed", "node 2 was lost; `rm -rf $HOME`", 12)
    text = "libra-hpc: run study-001: failed at step 12: node 2 was lost; `rm -rf $HOME`"
    assert (tmp_path / "text").read_text() == f"2|a $b|{text}\n"
    facts = json.loads((tmp_path / "facts").read_text())
    assert {"alert": "failed", "text": text, "run": "study-001", "path": str(run.path)}.items() <= facts.items()
    assert (facts["kind"], facts["step"]) == ("job_finished", 12)
    assert [event["kind"] for event in read_lines(run.events)] == ["job_finished"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no route to host >&2; exit 7", "exit code 7: no route to host"),
        ("sleep 60 & wait", "no end within 1 s"),
        ("exec /no/such/program", "exit code 127: "),
    ],
)
def test_a_script_that_fails_is_an_event_and_not_the_end(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 1.0 if "sleep" in script else 30.0)
    run = run_with(tmp_path, script, ["completed"])
    finish(run, "completed", "step 40 is saved", 40)
    kinds = {event["kind"]: event.get("reason", "") for event in read_lines(run.events)}
    assert kinds["alert_failed"].startswith(f"{tmp_path}/notify.sh: {why}")
    assert run.read_json(run.result)["state"] == "completed"


def test_a_script_that_was_removed_or_leaves_a_process_behind(tmp_path: Path) -> None:
    run = run_with(tmp_path, "sleep 5 & exit 0", ["completed"])
    alerts = Alerts(run.read_json(run.config)["notify"], run.path)
    alerts.add("completed", {"kind": "job_finished"})
    alerts.close()
    assert alerts.failures == []
    (tmp_path / "notify.sh").unlink()
    alerts.add("completed", {"kind": "job_finished"})
    alerts.close()
    assert alerts.failures == [f"{tmp_path}/notify.sh: No such file or directory"]


@pytest.mark.parametrize(
    ("kind", "fields", "alert"),
    [
        ("job_finished", {"state": "completed"}, "completed"),
        ("job_finished", {"state": "failed"}, "failed"),
        ("job_finished", {"state": "paused"}, "guard"),
        ("job_finished", {"state": "cancelled"}, ""),
        ("learning_notice", {}, "guard"),
        ("step_late", {}, "stalled"),
        ("engine_lost", {"state": "failed"}, ""),
        ("of another version", {}, ""),
    ],
)
def test_which_alert_an_event_is(kind: str, fields: dict[str, Any], alert: str) -> None:
    assert alert_of({"kind": kind, **fields}) == alert


def test_what_nobody_asked_for_starts_nothing(tmp_path: Path) -> None:
    run = run_with(tmp_path, f"touch {tmp_path}/called", ["failed"])
    finish(run, "completed", "step 40 is saved", 40)
    assert not (tmp_path / "called").exists()
