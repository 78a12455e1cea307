"""Every user mistake: exit code 2, one sentence on stderr that names field and value, nothing queued, nothing
written."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from libra_hpc_cli import check

from libra_hpc.facts.rundir import RunDir
from libra_hpc.preflight import checked_run
from libra_hpc.preflight.task_trial import try_task
from libra_hpc.slurm import submit
from libra_hpc.slurm.queue.command import SlurmRefused
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.example_files import write_text_tokenizer
from tests.preflight.test_checks import write_model

from .conftest import RUN, Cli, Queue, one_line
from .mistake_rows import LACKS, MODELS, Mistake, table

TABLE = list(table())
EXPECTED_START = check.expected_start
FIELD = re.compile(
    r"error: (With [^:]+: |site profile \S+: )?"
    r"([\w.,* \[\]'-]+ = |\[[\w.]+\]: |[\w./-]+(:\d+|, line \d+)?: |model\.path: |--over |\S+ cannot be )"
)
"""How a sentence names what has the wrong value."""
USAGE = re.compile(
    r"error: (No such (option|command)|Missing (option|argument)|Option '-|Got unexpected|submit needs"
    r"|There is no run|--toml and --json|-o changes)"
)
"""How one begins where words are missing, or not known."""
POLICY = """
class {0}:
    name = key = "own"
    route = finished = forget = None
    def __init__(self{1}):
        {2}
"""
FILES = {
    "login": f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n',
    "bad.py": "class Task(:\n",
    "good.py": "class Task:\n    def __init__(self, tokenizer, size=1):\n        pass\n",
    "raises.py": "1 / 0\n",
    "scores.py": "raise SystemExit('imported')\nasync def judge(row, text): pass\nclass Mine: pass\n",
    "policy.py": POLICY.format("Raises", "", "1 / 0")
    + POLICY.format("Asks", ", load", "pass")
    + POLICY.format("Exits", "", "exit(7)")
    + POLICY.format("Takes", "", "self.key = lambda turn: 0.0"),
    "exits.py": "import sys\nsys.exit(3)\n",
    "empty.jsonl": "",
    "good.jsonl": '{"prompt_id": "a", "sample": 0, "prompt_tokens": 9,'
    ' "turns": [{"new_tokens": 0, "gen_tokens": 5, "tool": null}]}\n',
    "garbage.jsonl": "\x00\xff garbage\n{\n",
    "garbage.json": "{",
    "garbage.toml": "[x\n",
    "other.toml": "[x]\na = 1\n",
    "torn.jsonl.gz": "\x1f\x8bxxxx",
    "run.toml": RUN,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of all rows, with the files and model folders that they name."""
    made = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (made / name).write_bytes(text.encode("latin-1"))
    (made / "login").chmod(0o755)
    (made / "loop").symlink_to("loop")
    os.mkfifo(made / "rows")
    for name, config in MODELS.items():
        write_model(made / name, config, LACKS.get(name, ""))
    write_text_tokenizer(made / "player")
    (made / "torn" / "config.json").write_text("{")
    (made / "slow" / "tokenizer.model").touch()
    wide = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "c", "id": 1_000_000}]}
    (made / "wide" / "tokenizer.json").write_text(json.dumps(wide))
    (made / "secret").mkdir()
    made.chmod(0o777)
    return made


def listed(folder: Path) -> list[Path]:
    """All files, less those of the interpreter."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def refusing(words: str) -> Callable[..., str]:
    """An sbatch that refuses."""

    def call(*arguments: object, **options: object) -> str:
        raise SlurmRefused(words)

    return call


@contextlib.contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """As somebody who may not enter ``folder``; root is nobody meanwhile."""
    root = os.getuid() == 0
    # Nobody may be unable to read the interpreter's own modules.
    codecs.lookup("utf-8-sig")
    folder.chmod(0)
    for parent in folder.parents if root else ():
        parent.chmod(parent.stat().st_mode | 0o011)
    try:
        if root:
            os.setresuid(65534, 65534, 0)
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)
        folder.chmod(0o755)


@pytest.mark.parametrize(
    "mistake", TABLE, ids=lambda mistake: f"{' '.join(mistake.words)[:60]} {mistake.sentence[:40]}"
)
def test_a_mistake_is_one_sentence_that_names_the_field(
    mistake: Mistake, folder: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    shutil.rmtree(folder / "case", ignore_errors=True)
    (folder / "case").mkdir()
    mistake.prepare(folder / "case")
    monkeypatch.setenv("LIBRA_HPC_SITE", mistake.site)
    if mistake.plays:
        monkeypatch.setattr(checked_run, "try_task", try_task)
    if mistake.refusal:
        monkeypatch.setattr(check, "expected_start", EXPECTED_START)
        monkeypatch.setattr(submit, "call", refusing(mistake.refusal))
    before = listed(folder)
    with another_user(folder / "secret") if mistake.private else contextlib.nullcontext():
        outcome = cli(*mistake.words)
    line = one_line(outcome).replace(f"{folder}/", "")
    assert mistake.sentence in line
    assert FIELD.match(line) or USAGE.match(line)
    assert queue.submitted == []
    assert listed(folder) == before


@pytest.mark.parametrize(
    ("job", "change", "sentence"),
    [
        ("RUNNING", [], "--resume = 'quick-001': its job 4711 is starting; valid: a run that has ended"),
        ("PENDING", [], "--resume = 'quick-001': its job 4711 is pending; valid: a run that has ended"),
        ("FAILED", ["-o", "run.name=x"], "'quick-001': a resumed run keeps its run.name and run.dir."),
        ("FAILED", ["-o", "components.split=auto"], "split = 'auto': a resumed run keeps the split it has"),
    ],
)
def test_a_mistake_in_a_resume(
    job: str, change: list[str], sentence: str, submitted: RunDir, queue: Queue, cli: Cli
) -> None:
    queue.answer = JobInfo("4711", JobState[job])
    assert sentence in one_line(cli("submit", "--resume", "quick-001", *change))
    assert queue.submitted == [("quick-001", 1)]


def test_a_moved_run_is_not_resumed(submitted: RunDir, queue: Queue, cli: Cli, tmp_path: Path) -> None:
    moved, place = submitted.path.rename(tmp_path / "quick-001"), submitted.path.parent
    why = f"it was moved from {place}, and its files name each other by their paths there"
    assert f"{why}; valid: its old place: mv {moved} {place}." in one_line(cli("submit", "--resume", str(moved)))


@pytest.mark.parametrize(
    ("state", "steps", "sentence"),
    [
        ("failed", 10, "run.steps = 10: step 40 is trained and saved; valid: a larger number, for instance -o run.ste"),
        ("completed", 40, "run.steps = 40: the run is complete at step 40; valid: a larger number"),
        ("failed", 40, ""),
        ("completed", 41, ""),
        ("failed", "41 -o lora.rank=8", "lora.rank = 8: the checkpoint of step 40 has lora.rank = 0; valid: 0, or --f"),
        ("failed", "41 -o model.dtype=float32", "model.dtype = 'float32': the checkpoint of step 40 has model.dtype ="),
        ("failed", "41 -o run.seed=7", "run.seed = 7: the checkpoint of step 40 has run.seed = 0; valid: 0, or --from"),
        ("failed", "41 -o lora.rank=8 -o run.seed=7 --from-step 0", ""),
        ("failed", "41 --from-step 30", "--from-step = 30: quick-001 has no checkpoint of that step; valid: 0, 40."),
        ("failed", "40 --from-step 40", "run.steps = 40 leaves nothing to train"),
    ],
)
def test_a_run_is_not_resumed_for_steps_that_it_has_trained_or_with_other_keys_than_its_state(
    state: str, steps: int | str, sentence: str, submitted: RunDir, queue: Queue, cli: Cli
) -> None:
    folder = submitted.checkpoints / "step-000040"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    submitted.write_json(submitted.result, {"state": state, "message": ""})
    queue.answer = JobInfo("4711", JobState.FAILED)
    outcome = cli("submit", "--resume", "quick-001", "-o", *f"run.steps={steps}".split())
    assert sentence in one_line(outcome) if sentence else outcome.code == 0
