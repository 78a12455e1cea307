"""What doctor finds, from facts alone, and on the embedded cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.agent import node_probe
from libra_hpc.config.load import validate
from libra_hpc.slurm import doctor
from libra_hpc.slurm.doctor import Finding, SlurmFacts
from libra_hpc.slurm.profile import profile_text
from libra_hpc.slurm.queue.query import Partition
from tests.slurm.scripts import program

A800 = Partition("a800", True, "up", 6, 6, 64, 1_000_000, {"a800": 8}, None)
CPU = Partition("cpu", False, "up", 2, 2, 16, 64_000, {}, None)
OLD = Partition("old", False, "down", 9, 9, 16, 64_000, {"v100": 16}, None)
SETTINGS = {
    "ClusterName": "big",
    "SlurmctldHost[0]": "head",
    "SchedulerType": "sched/backfill",
    "AccountingStorageType": "accounting_storage/slurmdbd",
}

NO_STEPS = {**SETTINGS, "SchedulerParameters": "bf_interval=60,disable_hetjob_steps"}
HET = validate({"components": {"planner": {"partition": "cpu"}}})

FAR = {"container": "apptainer", "image": "/nowhere/libra.sif", "setup": ["module load apptainer"]}


def facts(**changes: Any) -> SlurmFacts:
    return SlurmFacts("slurm 23.11.4", SETTINGS, [A800, CPU, OLD])._replace(**changes)


def test_a_good_site_has_only_good_findings() -> None:
    config = validate({"components": {"train": {"partition": "a800,cpu"}}})
    found = [doctor.controller(facts(), {}), doctor.version(facts()), doctor.heterogeneous(config, facts())]
    found += [doctor.accounting(facts()), doctor.gpus(facts())]
    assert {finding.state for finding in found} == {"good"}
    assert "cluster big at head" in found[0].found
    assert "a800: 6 x 8 a800" in found[-1].found


@pytest.mark.parametrize(
    ("finding", "state", "words"),
    [
        (doctor.version(facts(version="slurm 20.02.1")), "bad", "20.11"),
        (doctor.heterogeneous(HET, facts(settings={"SchedulerType": "sched/builtin"})), "bad", "backfill"),
        # https://slurm.schedmd.com/slurm.conf.html#OPT_disable_hetjob_steps: the default on Cray systems.
        (doctor.heterogeneous(HET, facts(settings=NO_STEPS)), "bad", "no step spans a heterogeneous job"),
        (doctor.heterogeneous(validate({}), facts(settings=NO_STEPS)), "warning", "a plain job"),
        (doctor.accounting(facts(settings={"MinJobAge": "60 sec"})), "warning", "60 sec"),
        (doctor.gpus(facts(partitions=[CPU])), "warning", "slurm.device"),
        (doctor.interpreter(validate({"compute": {"python": "relative/python"}})), "bad", "absolute path"),
        (doctor.container(validate({"compute": {"container": "pyxis"}}), None)[0], "bad", "compute.image"),
        (doctor.container(validate({"compute": FAR}), None)[0], "warning", "/nowhere/libra.sif"),
    ],
)
def test_every_fault_is_named_with_a_way_out(finding: Finding, state: str, words: str) -> None:
    assert finding.state == state
    assert words in f"{finding.found} {finding.fix}"
    assert finding.fix


def test_a_file_system_is_that_of_the_longest_mount() -> None:
    mounts = ["none / overlay rw 0 0", "nas:/x /shared nfs4 rw 0 0", "tmp /shared/tmp tmpfs rw 0 0"]
    assert doctor.file_system(Path("/shared/runs"), mounts) == "nfs4"
    assert doctor.file_system(Path("/shared/tmp/a"), mounts) == "tmpfs"
    assert doctor.file_system(Path("/sharedtmp"), mounts) == "overlay"


def test_a_profile_is_written_from_the_partitions_and_valid() -> None:
    import tomllib

    text = profile_text([OLD, A800, CPU], "/shared/bin/python", "rl")
    config = validate(tomllib.loads(text))
    assert (config.slurm.account, config.compute.python) == ("rl", "/shared/bin/python")
    assert config.components.planner.partition == "cpu"
    assert [getattr(config.components, name).partition for name in ("train", "hybrid", "rollout")] == ["a800"] * 3
    assert (config.components.train.gpus, config.components.train.gpu_type) == (8, "a800")
    sliced = replace(A800, gpus={"a800": 7, "1g.10gb": 28})
    assert 'gpu_type = "a800"' in profile_text([sliced]), "a slice of a GPU is none"
    none = profile_text([CPU])
    assert validate(tomllib.loads(none)).slurm.device == "cpu"
    assert '# device = "cuda"' in none, "nodes that are given whole list no GPUs"


SITES = {
    # https://doc.dhpc.tudelft.nl/delftblue/Slurm-scheduler: memory is asked for by the CPU.
    "no --mem": ("*--mem=*", "memory", 'slurm.mem_option = "--mem-per-cpu"'),
    # https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/18: memory cannot be asked for at all.
    "no memory": ("*--mem*", "not allowed", 'slurm.mem_option = "none"'),
    # https://docs.alliancecan.ca/wiki/Using_GPUs_with_Slurm
    "no --gres": ("*--gres*", "--gres", 'slurm.gpu_option = "--gpus-per-node={type}:{gpus}"'),
    # https://docs.nersc.gov/jobs/policy: a plugin chooses the partition by constraint and QOS.
    "no partition": ("*--partition*", "no partition, please", 'components.train.partition = ""'),
    "an account": ("*", "no account", "slurm.account = '': Slurm refuses it (no account)"),
    "something else": ("*", "ask us", "what this sentence asks for"),
}
"""What sbatch refuses, as a pattern of a shell, its words, and what doctor proposes."""


def requested(folder: Path, refused: str, words: str, train: dict[str, Any], known: SlurmFacts) -> Finding:
    program(folder / "sbatch", f'case "$*" in {refused}) echo "sbatch: error: {words}" >&2; exit 1;; esac')
    config = validate({"components": dict.fromkeys(("planner", "train", "rollout"), train)})
    (found,) = doctor.requests(config, {"PATH": f"{folder}:/usr/bin:/bin"}, known)
    return found


@pytest.mark.parametrize("site", ["none", *SITES])
def test_the_spelling_that_sbatch_takes_is_proposed(site: str, tmp_path: Path) -> None:
    refused, words, line = SITES.get(site, ("nothing", "", ""))
    found = requested(tmp_path, refused, words, {"partition": "a800", "gpus": 8, "gpu_type": "a800"}, facts())
    assert (found.state, found.fix) == ("bad" if line else "good", line)


def test_no_spelling_is_proposed_for_what_is_wrong_in_each(tmp_path: Path) -> None:
    train = {"partition": "a800", "gpus": 8, "gpu_type": "h100"}
    found = requested(tmp_path, "*--gres*", "Invalid generic resource (gres) specification", train, facts())
    assert found.fix.startswith("components.planner.gpu_type = 'h100': nodes of partition a800 have none (Slurm: ")
    # https://docs.tacc.utexas.edu/hpc/frontera: nodes are given whole, with all that they have.
    whole = facts(partitions=[replace(A800, gpus={})])
    found = requested(tmp_path, "*--mem*|*--gres*|*--gpus*", "Requested node", {"gpus": 4}, whole)
    assert found.fix == 'slurm.mem_option = "none", slurm.gpu_option = "none"'


@pytest.mark.cluster
def test_the_embedded_cluster_is_a_good_site(slurm_env: Mapping[str, str], tmp_path: Path) -> None:
    found = doctor.examine(validate({"run": {"dir": str(tmp_path / "runs")}}), slurm_env)
    assert not [finding for finding in found if finding.state == "bad" and finding.subject != "interpreter"], found
    assert {"controller", "scheduler", "GPUs", "run.dir"} <= {finding.subject for finding in found}


@pytest.mark.cluster
@pytest.mark.parametrize(
    "slurm", [{}, {"mem_option": "--mem-per-cpu"}, {"mem_option": "--mem-per-gpu", "gpu_option": doctor.GPU_OPTIONS[1]}]
)
def test_the_embedded_slurm_takes_every_spelling(slurm: dict[str, str], slurm_env: Mapping[str, str]) -> None:
    train, known = {"partition": "a800", "gpus": 4, "gpu_type": "a800"}, doctor.slurm_facts(slurm_env)

    def states(**train: Any) -> list[str]:
        config = validate({"slurm": slurm, "components": {"planner": {"partition": "cpu"}, "train": train}})
        return [finding.state for finding in doctor.requests(config, slurm_env, known)]

    assert states(**train) == ["good"] * 3
    assert states(**{**train, "gpu_type": "h100"}) == ["good", "bad", "good"]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "import pydantic\nclass M(pydantic.BaseModel):\n    x: int\nM(x='a')",
            "exit code 1: Input should be a valid integer, unable to parse string as an integer",
        ),
        ("raise SystemExit(3)", "exit code 3: no output"),
        ("import sys; print('odd', file=sys.stderr); sys.exit(4)", "exit code 4: odd"),
    ],
)
def test_a_child_that_fails_is_named_by_its_cause(program: str, said: str) -> None:
    with pytest.raises(RuntimeError) as error:
        node_probe._child(program)
    assert str(error.value) == said


def test_proxies_are_named_without_their_passwords() -> None:
    env = {"http_proxy": "http://me:pa/ss@proxy:3128/", "NO_PROXY": ".corp", "ftp_proxy": "", "HTTPS_PROXY": "p:1"}
    found = "HTTPS_PROXY = p:1, http_proxy = http://proxy:3128/; not for nodes of the run (no_proxy)"
    assert doctor.proxies(env) == [Finding("proxy", "good", found)]
    assert doctor.proxies({"NO_PROXY": ".corp"}) == []
