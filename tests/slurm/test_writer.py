"""The batch script: its exact text for a run with every option, and what cannot be written as one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.config.node_groups import rank_components
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol.ranks_stop import START, start_of
from libra_hpc.slurm.launch import Launch, job_request
from libra_hpc.slurm.writer import het_script, on_nodes, spot_script
from tests.slurm.scripts import executed

FULL: dict[str, Any] = {
    "run": {"name": "demo"},
    "slurm": {"time_limit": "02:00:00", "account": "rl", "extra": ["--exclude=a800-3"]},
    "components": {
        "planner": {"nodes": 1, "partition": "cpu"},
        "train": {"nodes": 2, "partition": "a800", "gpus": 8, "gpu_type": "a800", "cpus": 16, "mem": "64G"},
        "hybrid": {"nodes": 0},
        "rollout": {"nodes": 1, "partition": "a800", "gpus": 4, "cpus": 8, "mem": "32G", "constraint": "nvlink"},
    },
}


def script(config: dict[str, Any], **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "interpreter": "/opt/env/bin/python",
        "attempt": 2,
        "environment": {"NOTE": "it's 100%"},
        "mark": "libra-hpc:0123456789abcdef",
    }
    return het_script(
        Launch(job_request(validate(config)), RunDir("/data/my runs/demo-001"), **{**arguments, **changes})
    )


def test_golden_text() -> None:
    assert script(FULL) == Path(__file__).with_name("golden.sbatch").read_text()


A800: dict[str, Any] = {"partition": "a800", "gpus": 8, "gpu_type": "a800", "cpus": 64, "mem": "900G"}


def six_nodes(train: int, hybrid: int, rollout: int, planner: int = 0, **slurm: Any) -> dict[str, Any]:
    """Nodes of one kind, and a planner beside the first train node or on a CPU node."""
    counts = {"train": train, "hybrid": hybrid, "rollout": rollout}
    parts = {name: {**A800, "nodes": nodes} for name, nodes in counts.items()}
    return {
        "slurm": {"time_limit": "2-00:00:00", **slurm},
        "components": {"planner": {"nodes": planner, "partition": "cpu"}, **parts},
    }


LAYOUTS = {
    "heterogeneous": six_nodes(2, 2, 2),
    "plain": six_nodes(3, 2, 1),
    "cpu-planner": six_nodes(2, 2, 2, planner=1),
    "spare": six_nodes(2, 2, 2, spare=1),
    "spare-env": six_nodes(2, 2, 2, spare=1),
}
LAYOUTS["spare-env"]["components"]["env"] = {"nodes": 2, "partition": "cpu", "cpus": 64}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_layouts_of_six_nodes(layout: str) -> None:
    assert script(LAYOUTS[layout]) == (Path(__file__).parent / "golden" / f"{layout}.sbatch").read_text()


def test_a_job_is_plain_only_where_a_component_has_one_node_and_all_agree() -> None:
    def plain(config: dict[str, Any]) -> bool:
        return "#SBATCH hetjob" not in script(config)

    for key, value in (("partition", "other"), ("account", "rl"), ("qos", "long"), ("constraint", "nvlink")):
        config = six_nodes(3, 2, 1)
        config["components"]["rollout"][key] = value
        assert not plain(config), key


def test_nodes_of_a_plain_job_have_what_the_largest_of_its_agents_needs() -> None:
    config = six_nodes(3, 2, 1)
    config["components"]["rollout"] |= {"cpus": 32, "mem": "0"}
    assert "--cpus-per-task=32\n#SBATCH --mem=0\n" in script(config), "two tasks share the first node"
    assert rank_components(validate(config)) == ["planner", *["train"] * 3, *["hybrid"] * 2, "rollout"]


def test_a_spare_node_must_be_able_to_replace_every_other_one() -> None:
    differing = r"slurm\.spare = 1: components differ in partition, so no node can replace every other one; valid: 0"
    with pytest.raises(UserError, match=differing):
        script(six_nodes(2, 2, 2, planner=1, spare=1))
    own = six_nodes(2, 2, 2, planner=1, spare=1)
    own["components"]["planner"] = {**A800, "nodes": 1}
    own["components"]["env"] = {"nodes": 1, "partition": "cpu"}
    assert "--het-group=0 --nodes=7 --ntasks=7 --distribution=block : " in script(own), "no rank is on the spare node"
    with pytest.raises(UserError, match=r"slurm\.spare = 1: one node carries all agents"):
        script({"slurm": {"spare": 1}, "components": {"one_node": True}})


def test_the_run_file_names_the_interpreter_of_the_nodes() -> None:
    text = script({"compute": {"python": "/shared/env/bin/python"}}, interpreter="")
    assert text.count("/shared/env/bin/python -m libra_hpc.slurm.rank -m libra_hpc.agent.agent") == 1
    assert sys.executable not in text


def test_a_named_interface_reaches_every_library_that_listens() -> None:
    text = script({**FULL, "slurm": {"interface": "ib0"}})
    exports = {line.removeprefix("export ") for line in text.splitlines() if line.startswith("export ")}
    assert exports >= {"UCX_NET_DEVICES=ib0", "FI_TCP_IFACE=ib0", "GLOO_SOCKET_IFNAME=ib0", "NCCL_SOCKET_IFNAME='=ib0'"}
    assert "IFNAME" not in script(FULL)
    own = script({"slurm": {"interface": "ib0"}}, environment={"UCX_NET_DEVICES": "mlx5_0:1"})
    assert "UCX_NET_DEVICES=mlx5_0:1" in own


def test_another_command_is_quoted() -> None:
    assert "/opt/env/bin/python -m libra_hpc.slurm.rank /a/b.py 'two words'\n" in script(
        FULL, arguments=["/a/b.py", "two words"]
    )


SRUN = """logs="$RUN/logs/attempt-1"
end() { echo '{"why": "'"$1"'", "sentence": "step 9 is saved", "step": 9}' >"$logs/ended.json"; }
echo x >>"$RUN/starts"
case $(wc -l <"$RUN/starts") in
  1) end repartition; exit 0 ;;
  2) kill -KILL $$ ;;
  *) end completed; exit 1 ;;
esac
"""
"""The ranks ask for another start; that one is killed before they meet; the third completes the run although a rank
dies."""


def test_the_script_starts_ranks_again_that_ask_for_it_and_repeats_a_killed_start(tmp_path: Path) -> None:
    run, done = executed(tmp_path, FULL, {"srun": SRUN})
    assert done.returncode == 0, done.stderr
    assert (run.path / "starts").read_text() == "x\n" * 3
    assert done.stdout.splitlines() == [
        "restart: the ranks start in another layout",
        "repeat: start 1: the agents did not meet",
        "the run completed: step 9 is saved",
    ]


MEETS = "from libra_hpc.process import owner_link as link; link.call_owner(0, 'n0'); link.OwnerLink().met()"
LOSES_RANK_0 = f"""echo "$LIBRA_HPC_START" >>"$RUN/starts"
{sys.executable} -c "{MEETS}"
exit 137
"""


def test_the_script_restarts_ranks_whose_planner_was_lost_and_writes_a_result_when_restarts_are_used(
    tmp_path: Path,
) -> None:
    run, done = executed(tmp_path, {**FULL, "slurm": {"restarts": 2}}, {"srun": LOSES_RANK_0})
    reason = "the planner's agent (rank 0) was lost"
    starts = [start_of({START: line}) for line in (run.path / "starts").read_text().splitlines()]
    assert [(start.restarts, start.reason, start.last) for start in starts] == [
        (0, "", False),
        (1, reason, False),
        (2, reason, True),
    ]
    assert len({(start.nonce, start.generation) for start in starts}) == 1
    assert done.returncode == 1
    used = "all 2 restarts of slurm.restarts are used; continue with --resume"
    assert done.stdout.splitlines()[-1] == f"the run failed: {reason}, and {used}"
    assert run.read_json(run.result)["state"] == "failed"


STOPPED = """[ -n "$LIBRA_HPC_JOB_END" ] && echo "$LIBRA_HPC_JOB_END $LIBRA_HPC_KILL_WAIT" >>"$RUN/ends"
echo '{"why": "time_limit", "sentence": "step 9 is saved", "step": 9}' >"$RUN/logs/attempt-1/ended.json"
exit 1
"""
SCONTROL = """case "$1 $2" in
  "show config") printf 'KillOnBadExit = 0\\nKillWait                = 30 sec\\n' ;;
  "show job") echo "JobId=7 PreemptEligibleTime=2030-01-02T03:04:05 PreemptTime=$PREEMPTED" ;;
  requeue*) echo "$*" >>"$RUN/requeued"; echo "slurm_requeue error: disabled" >&2; exit "$REFUSED" ;;
esac
"""


@pytest.mark.parametrize(
    ("requeues", "preempted", "refused", "last"),
    [
        (5, "None", 0, "requeue: time limit at step 0; requeue 2 of 5"),
        (
            1,
            "None",
            0,
            "the run was stopped by the time limit: step 9 is saved; not queued again: time limit at step 0",
        ),
        (0, "2030-01-02T03:04:05", 0, "requeue: preempted at step 0"),
        (0, "None", 0, "the run was stopped by the time limit: step 9 is saved"),
        (5, "None", 1, "the run was stopped by the time limit: step 9 is saved; not queued again: slurm_requeue error"),
    ],
)
def test_the_script_queues_its_job_again_after_the_time_limit(
    tmp_path: Path, requeues: int, preempted: str, refused: int, last: str
) -> None:
    squeue = "echo 2030-01-02T03:04:05; echo 2030-01-02T03:04:05"
    programs = {"srun": STOPPED, "scontrol": SCONTROL, "squeue": squeue}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "PREEMPTED": preempted, "REFUSED": str(refused)}
    run, done = executed(tmp_path, {**FULL, "slurm": {"requeues": requeues}}, programs, **slurm)
    assert (run.path / "ends").read_text() == "2030-01-02T03:04:05 30\n"
    assert done.stdout.splitlines()[-1].startswith(last), done.stdout + done.stderr
    asked = (run.path / "requeued").read_text() if (run.path / "requeued").exists() else ""
    again = done.stdout.startswith("requeue: ")
    assert asked == ("requeue 7\n" if again else "")
    assert done.returncode == (0 if again and not refused else 1)


def test_who_wants_no_start_after_a_preemption_gets_none_after_the_time_limit_either() -> None:
    text = script({**FULL, "slurm": {"preempted": "stop"}})
    assert "#SBATCH --no-requeue\n" in text
    assert " --requeue " not in text
    with pytest.raises(UserError, match=r"slurm.preempted = 'stop': .*slurm.requeues = 2 .*valid: requeue"):
        script({**FULL, "slurm": {"preempted": "stop", "requeues": 2}})


@pytest.mark.parametrize(
    ("limit", "given", "notice"), [("02:00:00", 0, 120), ("00:05:00", 0, 30), ("1:0:0", 99.5, 100)]
)
def test_slurms_notice_is_the_last_resort_unless_it_is_given(limit: str, given: float, notice: int) -> None:
    assert f"--signal=B:USR1@{notice}\n" in script({**FULL, "slurm": {"time_limit": limit, "notice_s": given}})


def test_lists_of_gres_are_merged_and_other_options_are_not_given_twice() -> None:
    train = {**FULL["components"]["train"], "extra": ["--gres=nvme:1"], "account": "gpu"}
    data = {
        **FULL,
        "components": {**FULL["components"], "train": train},
        "slurm": {"extra": ["--gres", "lscratch:100"]},
    }
    lines = script(data).splitlines()
    gres = [line for line in lines if "--gres" in line]
    assert gres.count("#SBATCH --gres=gpu:a800:8,lscratch:100,nvme:1") == 1
    assert all(line.count("gres=") == 1 for line in gres)
    assert sum("lscratch" in line for line in gres) == sum("--nodes=" in line for line in lines)
    for extra in ("--account=b", "-Ab", "--gres=gpu:2", "--gres=lscratch:1,gpu:2"):
        wrong = {**train, "extra": [extra]}
        with pytest.raises(UserError, match=rf"^components.train.extra = '{extra}': .* valid: components.train"):
            script({**data, "components": {**data["components"], "train": wrong}})


SITE: dict[str, Any] = {
    **FULL,
    "slurm": {
        "gpu_option": "--gpus-per-node={type}:{gpus}",
        "mail": "me@site.org",
        "mail_on": ["FAIL", "TIME_LIMIT"],
        "account": "rl",
    },
    "compute": {
        "setup": ["module load cuda/12.8"],
        "env": {"NCCL_IB_HCA": "mlx5"},
        "local_dir": "/scratch/$USER",
        "binds": ["/shared", "/data:/mnt"],
        "image": "/shared/libra.sif",
        "container": "apptainer",
    },
}


def test_facts_of_a_site_reach_the_script() -> None:
    components = {**FULL["components"], "train": {**FULL["components"]["train"], "account": "gpu", "qos": "big"}}
    components["train"] |= {"reservation": "week", "extra": ["--exclusive"]}
    lines = script({**SITE, "components": components, "compute": {**SITE["compute"], "container": "none"}}).splitlines()
    assert lines.count("#SBATCH --gpus-per-node=a800:8") == 1
    assert lines.count("#SBATCH --gpus-per-node=4") == 1, "without a type there is no colon either"
    assert {"#SBATCH --mail-user=me@site.org", "#SBATCH --mail-type=FAIL,TIME_LIMIT"} <= set(lines)
    train = lines[lines.index("# train: 2 nodes") : lines.index("# rollout: 1 node")]
    assert {f"#SBATCH --{word}" for word in ("account=gpu", "qos=big", "reservation=week", "exclusive")} <= set(train)
    assert lines.count("#SBATCH --account=rl") == 2
    assert lines.index("module load cuda/12.8") < lines.index("export NCCL_IB_HCA=mlx5")
    assert 'export TMPDIR="/scratch/$USER"' in lines
    assert any('mkdir -pm 700 "$TMPDIR/cache-$UID"; [ "$SLURM_PROCID" != 0 ]' in line for line in lines)


@pytest.mark.parametrize(
    ("slurm", "train", "words"),
    [
        ({"mem_option": "--mem-per-cpu"}, {}, {"mem-per-cpu=4096M", "gres=gpu:a800:8"}),
        ({"mem_option": "--mem-per-gpu"}, {}, {"mem-per-gpu=8192M", "gres=gpu:a800:8"}),
        ({"mem_option": "none", "gpu_option": "none"}, {}, set()),
        ({"gpu_option": ""}, {"mem": "none"}, set()),
        ({"gpu_option": "none"}, {"extra": ["--gres=gpu:8"]}, {"mem=64G", "gres=gpu:8"}),
        ({"mem_option": "--mem-per-cpu"}, {"mem": "0"}, {"gres=gpu:a800:8"}),
    ],
)
def test_memory_and_gpus_are_spelled_as_the_site_wants_them(
    slurm: dict[str, Any], train: dict[str, Any], words: set[str]
) -> None:
    parts = {**FULL["components"], "train": {**FULL["components"]["train"], **train}}
    text = script({"slurm": slurm, "components": parts}).partition("# train")[2].partition("hetjob")[0]
    assert set(re.findall(r"#SBATCH --((?:mem|gres|gpus)\S*)", text)) == words


def test_a_component_may_leave_out_what_stands_above_it() -> None:
    planner = {"nodes": 1, "partition": "cpu,debug", "qos": "none", "account": "none", "constraint": "none"}
    text = script({"slurm": {"qos": "long", "account": "rl"}, "components": {**FULL["components"], "planner": planner}})
    first, second, _ = text.split("#SBATCH hetjob")
    assert "#SBATCH --partition=cpu,debug\n" in first
    assert "none" not in first.partition("# planner")[2]
    assert {"#SBATCH --qos=long", "#SBATCH --account=rl"} <= set(second.splitlines())


def test_options_are_read_as_getopt_reads_them() -> None:
    words = [
        "--exclude",
        "a800-3",
        "-x",
        "a",
        "-wb",
        "-Qv",
        "-C",
        "nvlink",
        "--exclusive",
        "--mem-bind=local",
        "--nice",
    ]
    text = script({"slurm": {"extra": words}})
    for option in ("--exclude=a800-3", "-xa", "-wb", "-Qv", "-Cnvlink", "--exclusive", "--mem-bind=local", "--nice"):
        assert text.count(f"#SBATCH {option}\n") == text.count("#SBATCH --nodes=")


def test_a_comment_of_the_run_files_stays_in_front_of_the_mark() -> None:
    comments = re.findall("--comment=(.*)", script({"slurm": {"extra": ["--comment", "project-7"]}}))
    assert comments == ["project-7", "project-7,libra-hpc:0123456789abcdef", *["project-7"] * (len(comments) - 2)]


def test_a_step_on_fewer_nodes_names_those_of_each_component() -> None:
    for parts, nodes, expected in FEWER:
        assert on_nodes(["srun", "-K0", *parts.split(), "bash", "x"], nodes, 1) == f"srun -K0 {expected} bash x".split()
    two = ["srun", "-K0", "--nodes=3", ":", "--nodes=1", "bash", "x"]
    assert on_nodes(two, [2, 1], 1, {"a800-3", "a800-1"}).count("--exclude=a800-1,a800-3") == 2


END = "--distribution=block"
FEWER = [
    (f"--nodes=5 --ntasks=6 {END}", [4], f"--nodes=4 --ntasks=5 {END}"),
    (
        f"--het-group=0 --nodes=2 --ntasks=3 {END} : -K0 --het-group=1",
        [2, 1],
        f"--het-group=0 --nodes=2 --ntasks=3 {END} : -K0 --het-group=1 --nodes=1 --ntasks=1 {END}",
    ),
]
"""Parts of a step as `step_parts` has them, the nodes that are left, and parts for these."""


def test_a_job_of_spot_nodes_joins_the_run_with_a_node_as_those_that_roll_out() -> None:
    spot = {"nodes": 2, "partition": "spot", "time_limit": "00:30:00"}
    config = validate({**FULL, "borrow": {"spot": spot}, "compute": {"env": {"A": "b"}, "local_dir": "/x"}})
    launch = Launch(job_request(config), RunDir("/data/my runs/demo-001"), 2, interpreter="/opt/env/bin/python")
    lines = spot_script(launch).splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert {"--nodes=1", "--partition=spot", "--time=00:30:00", "--gres=gpu:4", "--constraint=nvlink"} <= options
    assert {"--job-name=demo-spot", "--no-requeue", "--mem=32G", "--account=rl"} <= options
    assert f"--comment={launch.mark}" in options
    assert "export A=b" in lines
    assert lines[-2] == 'mkdir -pm 700 "$TMPDIR/cache-$UID"'
    assert lines[-1] == "exec /opt/env/bin/python -m libra_hpc_cli.app join '/data/my runs/demo-001' --spot"
