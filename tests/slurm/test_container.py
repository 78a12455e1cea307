"""Runs in a container: what is bound, what is started, and what is refused before the queue."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.process.code_stamp import code_stamp
from libra_hpc.slurm.interpreter import binds, check_container, start_command
from libra_hpc.slurm.launch import Launch, job_request
from libra_hpc.slurm.writer import het_script

from .scripts import program
from .test_writer import FULL, script

GOLDEN = Path(__file__).with_name("golden")
BASE: dict[str, Any] = {"image": "/shared/images/libra.sif", "python": "python3", "local_dir": "/scratch/$USER"}
CONTAINERS = {
    "apptainer": {**FULL, "slurm": {"device": "cuda"}, "compute": {**BASE, "container": "apptainer"}},
    "pyxis": {**FULL, "compute": {**BASE, "container": "pyxis", "image": "nvcr.io#rl/libra:0.1", "binds": ["/data"]}},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_golden_text_of_a_container(kind: str) -> None:
    text = script(CONTAINERS[kind], interpreter="").replace(sys.executable, "/login/bin/python")
    assert text.replace(code_stamp(), "0.1.0+CODE") == (GOLDEN / f"{kind}.sbatch").read_text()
    without_gpus = {**CONTAINERS[kind], "slurm": {"device": "cpu"}}
    assert "--nv" not in script(without_gpus)


def configured(**sections: Any) -> RunConfig:
    compute = {"container": "apptainer", "image": "/shared/libra.sif", **sections.pop("compute", {})}
    return validate({"compute": compute, **sections})


def test_folders_of_the_run_file_are_bound_unless_a_bind_shows_them(tmp_path: Path) -> None:
    (tmp_path / "hub" / "blobs").mkdir(parents=True)
    model = tmp_path / "hub" / "snapshots" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").symlink_to("../../blobs/a1")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.py").write_text("")
    (tmp_path / "linked.py").symlink_to(tmp_path / "tasks" / "mine.py")
    sections = {
        "model": {"path": str(model)},
        "task": {"name": f"{tmp_path}/linked.py:Mine"},
        "rollout": {"policy": f"{model}/policy.py:Own"},
    }
    run = Path("/data/runs/demo-001")
    # The task's own folder holds all others.
    assert set(binds(configured(**sections), run)) == {"/dev/shm", str(tmp_path), str(run)}
    part = {"name": "a", "task": "/lib/a.py:A", "data": "/data/a.jsonl", "reward": "/own/score.py:score"}
    mixed = {"train": [part], "eval": [{**part, "data": "/held/out.parquet"}]}
    assert set(binds(configured(**{**sections, "task": mixed}), run)) >= {"/lib", "/data", "/own", "/held"}
    sections["task"] = {"name": f"{tmp_path}/tasks/mine.py:Mine"}
    compute = {"binds": ["/data", f"{tmp_path}:/mnt"], "local_dir": "/local/scratch/j$SLURM_JOB_ID"}
    wanted = {"/data", f"{tmp_path}:/mnt", "/dev/shm", "/local/scratch"}
    wanted |= {str(tmp_path / folder) for folder in ("tasks", "hub/blobs", "hub/snapshots/model")}
    assert set(binds(configured(**sections, compute=compute), run)) == wanted


@pytest.mark.parametrize(
    ("local_dir", "bound"), [("/scratch", "/scratch"), ("/scratch/me", "/scratch"), ("/a/b$USER/$X", "/a")]
)
def test_what_is_bound_of_a_local_folder_is_there_before_the_run(local_dir: str, bound: str) -> None:
    for key in ("local_dir", "cache_dir"):
        assert bound in binds(configured(compute={key: local_dir}), Path("/data/demo-001"))


@pytest.mark.parametrize(
    ("local_dir", "run", "message"),
    [
        ("/$USER/x", "/data/demo-001", "compute.local_dir = '/': the container cannot bind '/'"),
        ("", "/data/a,b/demo-001", "run.dir = '/data/a,b/demo-001': the container cannot bind '/data/a,b/demo-001'"),
    ],
)
def test_a_folder_that_cannot_be_bound_is_named(local_dir: str, run: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        start_command(configured(compute={"local_dir": local_dir}), Path(run), named=True)


def test_pyxis_unpacks_an_image_once_for_a_run_and_again_where_the_image_is_another(tmp_path: Path) -> None:
    image = tmp_path / "libra.sqsh"
    image.write_bytes(b"1")

    def name(run: str, *, named: bool = True) -> list[str]:
        config = configured(compute={"container": "pyxis", "image": str(image)})
        step = start_command(config, Path(run), named=named).step
        return [option for option in step if option.startswith("--container-name=libra-hpc-")]

    first = name("/data/demo-001")
    assert len(first) == 1
    assert first == name("/data/demo-001")
    assert first != name("/data/demo-002"), "an image of another run has that one's binds"
    image.write_bytes(b"22")
    assert first != name("/data/demo-001")
    assert not name("/data/demo-001", named=False)


def test_what_is_missing_is_refused_before_the_queue(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    environ = {"PATH": f"{programs}:{os.environ['PATH']}"}
    here = {"image": str(tmp_path / "libra.sif"), "binds": [str(tmp_path), f"{tmp_path}/absent:/mnt"]}

    def refused(message: str, **compute: Any) -> None:
        with pytest.raises(UserError, match=message):
            check_container(configured(compute={**here, **compute}), environ)

    refused(r"compute\.image = '': compute\.container is 'apptainer'", image="")
    refused(r"compute\.image = 'docker://x': .* apptainer pull libra\.sif docker://x", image="docker://x")
    refused(rf"compute\.binds\[1\] = '{tmp_path}/absent': {tmp_path} is here and has no 'absent'")
    refused(rf"compute\.image = '{here['image']}': {tmp_path} is here and has no 'libra\.sif'", binds=[])
    Path(here["image"]).touch()
    refused(r"compute\.container = 'apptainer': it is not on PATH here, and compute\.setup has no line", binds=[])
    assert check_container(configured(compute={**here, "binds": [], "setup": ["module load apptainer"]}), environ) == []
    (unused,) = check_container(configured(compute={"image": here["image"], "container": "none"}), environ)
    assert "nothing starts in it" in unused
    for name, answer in (("apptainer", ""), ("srun", "--container=BUNDLE")):
        program(programs / name, f"echo '{answer}'")
    far = ["/nowhere/data", "/nowhere2"]
    unseen = [
        f"compute.binds[{i}] = {path!r} is not visible from here, so it was not checked" for i, path in enumerate(far)
    ]
    assert check_container(configured(compute={**here, "binds": far}), environ) == unseen
    refused(r"compute\.container = 'pyxis': srun lacks Pyxis here", container="pyxis", binds=[])
    program(programs / "srun", "echo '      --container-image=PATH   [pyxis] the image'")
    assert check_container(configured(compute={"container": "pyxis", "image": "nvcr.io#a/b:1"}), environ) == []
    local = configured(compute={"image": ""}, slurm={"executor": "local"})
    assert check_container(local, environ) == []


SRUN = """echo "$*" >"$RUN/srun"
while [ "$1" != bash ]; do shift; done
SLURM_PROCID=0 SLURM_STEP_ID=3 exec "$@"
"""
APPTAINER = """[ "$1" = exec ] || exit 9
echo "$(ulimit -Sn) $(ulimit -Hn) $TRITON_CACHE_DIR" >"$RUN/inside"
while [ "$1" != "$IMAGE" ]; do shift; done
shift
exec "$@"
"""
RANK = """
import os, pathlib, json
logs = pathlib.Path(os.environ["RUN"], "logs/attempt-1")
(logs / "met").touch()
(logs / "ended.json").write_text(json.dumps({"why": "completed", "sentence": "step 9 is saved", "step": 9}))
"""


def test_a_rank_starts_through_the_runtime_where_nothing_is_exported_and_set_up_is_strict(tmp_path: Path) -> None:
    run, image = RunDir(tmp_path / "a run"), tmp_path / "libra.sif"
    run.logs(1).mkdir(parents=True)
    for name, text in (("srun", SRUN), ("apptainer", APPTAINER)):
        program(tmp_path / name, text)
    compute = {"image": str(image), "setup": ["set -u"], "local_dir": f"{tmp_path}/local/$USER"}
    compute |= {"env": {"IMAGE": str(image)}, "python": sys.executable}
    config = configured(compute=compute)
    run.write_config(config.as_data())
    text = het_script(Launch(job_request(config), run, 1, arguments=["-c", RANK]))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(run.path), "USER": "ada"}
    done = subprocess.run(
        ["bash", "-c", f"ulimit -S -n 256\n{text}"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--export=ALL " in (run.path / "srun").read_text()
    soft, hard, cache = (run.path / "inside").read_text().split()
    assert (soft, cache) == (hard, f"{tmp_path}/local/ada/cache-{os.getuid()}/triton")
    assert (tmp_path / "local" / "ada").is_dir()
