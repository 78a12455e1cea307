"""The interpreter of the nodes is run once before anything is queued, and what it lacks is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.slurm import interpreter
from libra_hpc.slurm.interpreter import check_python, compute_python
from tests.slurm.scripts import program


def configured(python: object, engine: str = "real", device: str = "cuda", **track: object) -> RunConfig:
    compute, slurm = {"python": str(python)}, {"device": device}
    return validate({"compute": compute, "slurm": slurm, "run": {"engine": engine}, "track": track})


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """An interpreter without any package, as that of a login node lacks the engines."""
    return program(tmp_path / "bare", f'echo x >>"{tmp_path}/starts"\nexec "{sys.executable}" -I -S "$@"')


def refused(config: RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        check_python(config)
    return str(caught.value)


def test_this_interpreter_runs_both_kinds_of_runs() -> None:
    assert compute_python(configured("")) == sys.executable
    assert check_python(configured("")) == check_python(configured(sys.executable, "simulated")) == []


def test_missing_packages_are_named_with_the_way_to_get_them(bare: Path) -> None:
    fix = "python3 envs/install.py cuda --venv DIR makes one, and compute.python = 'DIR/bin/python' names it."
    expected = (
        f"compute.python = '{bare}': it lacks libra_hpc, mpi4py, vllm, megatron and torch, which the nodes need; {fix}"
    )
    assert refused(configured(bare)) == expected
    assert "it lacks libra_hpc and mpi4py, which" in refused(configured(bare, "simulated"))
    assert "envs/install.py cpu " in refused(configured(bare, device="cpu"))


@pytest.mark.parametrize(
    ("track", "lacks", "sentence"),
    [
        ({"wandb": {"project": "x"}}, "wandb", "track.wandb: it lacks wandb; `{} -m pip install wandb`, or leave"),
        ({"tensorboard": True}, "tensorboardX", "track.tensorboard: it lacks tensorboardX; `{} -m pip install tens"),
    ],
)
def test_a_tracker_whose_library_is_missing_is_refused(
    tmp_path: Path, track: dict[str, object], lacks: str, sentence: str
) -> None:
    python = program(tmp_path / "python", f"echo libra-hpc finds 3.11 other {lacks}")
    assert sentence.format(python) in refused(configured(python, "simulated", **track))
    assert check_python(configured(python, "simulated")) == []


def test_the_submitting_interpreter_is_named_where_none_is_given(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(bare))
    assert refused(configured("")).startswith(
        f"compute.python = '': the submitting interpreter {bare} lacks libra_hpc, "
    )


def test_an_interpreter_is_asked_once(bare: Path) -> None:
    for _ in range(3):
        refused(configured(bare))
    assert (bare.parent / "starts").read_text() == "x\n"


def test_the_question_imports_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "megatron", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    asked = program(tmp_path / "python", f'exec "{sys.executable}" -S "$@"')
    assert refused(configured(asked)).startswith(f"compute.python = '{asked}': it lacks libra_hpc and mpi4py, which")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("exit 3", "it does not run (exit code 3, and it is no Python)"),
        ("echo 'libpython3.so: cannot open' >&2; exit 127", "it does not run (libpython3.so: cannot open)"),
        (
            "echo a greeting; echo libra-hpc finds 3.9 other",
            "it is Python 3.9 and 3.11 is needed; python3 envs/install.py",
        ),
        ("sleep 5", "it does not run (no answer within 0 s)"),
    ],
)
def test_what_does_not_run_is_refused_with_its_reason(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in text:
        monkeypatch.setattr(interpreter, "TIMEOUT_S", 0.1)
    assert sentence in refused(configured(program(tmp_path / "python", text)))


def test_what_cannot_be_an_interpreter_is_refused_and_what_only_the_nodes_have_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    assert "not an executable file" in refused(configured(tmp_path / "text"))
    assert "not an executable file" in refused(configured(tmp_path))
    assert (
        refused(configured("pyhton3"))
        == "compute.python = 'pyhton3': no such program on PATH; valid: the absolute path of an interpreter."
    )
    (line,) = check_python(configured("/nodes/only/python"))
    assert line.startswith("compute.python = '/nodes/only/python' is not visible from here, ")


def test_inside_a_container_the_interpreter_is_the_images_and_not_looked_for_here() -> None:
    compute = {"container": "apptainer", "image": "/shared/libra.sif"}
    config = validate({"compute": compute})
    assert compute_python(config) == "python3"
    assert check_python(config) == ["python3 is inside /shared/libra.sif, so what the nodes need was not checked"]
    named = validate({"compute": {**compute, "python": "/opt/bin/python"}})
    assert compute_python(named) == "/opt/bin/python"
    local = validate({"compute": compute, "slurm": {"executor": "local"}})
    assert compute_python(local) == sys.executable
