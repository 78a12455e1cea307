"""README's cluster path, word for word: a light environment on the login node, the engines' on the compute nodes.

Both environments are views of the suite's own: the login one holds the distributions of ``login.txt`` and nothing else.
Their stamps are current, so `envs/install.py` finds nothing to install.  No GPU is there, so the real run of the path
ends in its job script, and `doctor` queues no job.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from libra_hpc_envs.install import SETS, STAMP, fingerprint, requirements

from libra_hpc.annexes.devcluster.cluster import ClusterInfo
from tests.example_files import write_text_tokenizer
from tests.preflight.test_checks import write_model

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]

ROOT = Path(__file__).resolve().parents[2]
HEADING = "## How do I run it on my cluster?"
PROJECT = {"libra_hpc": "libra_hpc", "libra_hpc_cli": "cli", "libra_hpc_envs": "envs", "libra_hpc_sbatch": "sbatch"}
QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
"""All that a simulated run reads of the model."""
COMMAND = """#!{}/bin/python
from libra_hpc_cli.app import main
from libra_hpc.planning import best_plan
best_plan.MOST = 0
main()
"""
"""Plans are played once: the path plans five times, each time for as long as a user may
wait."""
AFTERWARDS = """
libra-hpc list
libra-hpc status
libra-hpc logs
libra-hpc cancel
libra-hpc trace inspect runs/a800-48-qwen3-14b-001/trajectories.jsonl
libra-hpc check $RUN -o model.path=$MODEL
libra-hpc plan $RUN -o model.path=$MODEL
libra-hpc config show $RUN
libra-hpc calibrate --help
libra-hpc make-policy policy --task examples/keychain.py:KeyChain --steps 2
"""


def readme_commands() -> list[str]:
    """The lines of README's cluster path."""
    section = (ROOT / "README.md").read_text().split(HEADING, 1)[1]
    block = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block[1].strip().splitlines()


def login_environment(folder: Path) -> None:
    """A virtual environment that sees the distributions of ``login.txt``, this checkout, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for pin in requirements(("login",)):
        distribution = importlib.metadata.distribution(pin.split("==")[0])
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not top.endswith(".pth") and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    for name, source in PROJECT.items():
        (packages / name).symlink_to(ROOT / source)
    command = folder / "bin" / "libra-hpc"
    command.write_text(COMMAND.format(folder))
    command.chmod(0o755)
    (folder / "share").symlink_to(Path(sys.prefix) / "share")
    stamp(folder, SETS["login"])


def compute_environment(folder: Path) -> None:
    """The suite's environment under another name, with a stamp of its own."""
    folder.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != STAMP:
            (folder / entry.name).symlink_to(entry)
    stamp(folder, ("login", "cuda", "compile"))


def stamp(folder: Path, names: tuple[str, ...]) -> None:
    (folder / STAMP).write_text(json.dumps({"satisfies": [fingerprint(names)]}))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with both environments, where nothing was run yet."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("envs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    login_environment(folder / ".venv")
    compute_environment(folder / ".venv-cuda")
    # The checks of a real run read the headers of its weights, and play a task with its tokenizer.
    write_text_tokenizer(write_model(folder / "model", QWEN3_14B))
    return folder


def login_shell(checkout: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a new user of the login node."""
    site = checkout / "site.toml"
    # The compute nodes import this checkout, as an installed project would.
    paths = json.dumps(os.environ.get("PYTHONPATH", ""))
    site.write_text(f"[compute.env]\nPYTHONPATH = {paths}\n" if paths != '""' else "")
    home = checkout / "home"
    home.mkdir(exist_ok=True)
    env = {
        "HOME": str(home),
        "PATH": f"{checkout}/.venv/bin:/usr/bin:/bin",
        "LIBRA_HPC_CLUSTER": os.environ.get("LIBRA_HPC_CLUSTER", ""),
        "LIBRA_HPC_SITE": str(site),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        ["bash", "-e", "-c", script], cwd=checkout, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


@pytest.mark.nightly
def test_readmes_cluster_path_works_from_a_login_node_without_engines(cluster: ClusterInfo, checkout: Path) -> None:
    lines = readme_commands()
    assert len(lines) <= 10
    model = f"MODEL={checkout}/model"
    script = "\n".join([re.sub(r"^MODEL=\S+", model, lines[0]), *lines[1:-1], f"{lines[-1]} --dry-run"])
    assert " doctor --submit" in script
    done = login_shell(checkout, script.replace(" doctor --submit", " doctor"))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "Traceback" not in said
    assert said.count("is up to date") == 2
    profile = (checkout / "home/.config/libra-hpc/site.toml").read_text()
    assert f'python = "{checkout}/.venv-cuda/bin/python"' in profile
    run = checkout / "runs" / "a800-48-qwen3-14b-001"
    assert json.loads((run / "result.json").read_text())["state"] == "completed"
    assert f"{checkout}/.venv-cuda/bin/python" in (run / "job.sbatch").read_text()
    assert "#SBATCH hetjob" in done.stdout, "the job script of the real run"

    variables = "\n".join(line for line in script.splitlines() if re.match(r"[A-Z]+=", line))
    for command in AFTERWARDS.strip().splitlines():
        done = login_shell(checkout, f"{variables}\n{command}")
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), (command, done.stdout, done.stderr)
