"""Layouts that GPU memory cannot hold are refused with figures and a way out; what the planner proposes is not."""

from __future__ import annotations

from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.models.shapes import model_shape
from libra_hpc.planning.initial import initial_plan
from libra_hpc.preflight.checks import MODEL_CHECKS
from libra_hpc.preflight.gpu_memory import cache_type_runs, check_cpus, check_memory
from libra_hpc.preflight.job_checks import delta_nets_run

NODE = {"nodes": 1, "gpus": 8, "gpu_type": "a800", "cpus": 16, "mem": "256G"}


def configured(**sections: Any) -> RunConfig:
    return validate(run_file(**sections))


def run_file(**sections: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "slurm": {"device": "cuda"},
        "components": {name: {**NODE, "nodes": int(name != "hybrid")} for name in ("train", "hybrid", "rollout")},
        "model": {"path": "qwen3-14b"},
        "train": {"tp": 8},
        "rollout": {"tp": 2, "max_model_len": 32768},
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    return data


def checked(model: str, **sections: Any) -> list[str]:
    return check_memory(configured(**sections), model_shape(model)).warnings


def of_gpus(gpus: int, train: int = 1, hybrid: int = 0) -> dict[str, Any]:
    """Components of nodes with so many GPUs."""
    counts = {"train": train, "hybrid": hybrid, "rollout": 1}
    return {name: {**NODE, "nodes": nodes, "gpus": gpus} for name, nodes in counts.items()}


SHORT = {"train": {"tp": 4, "pp": 1, "recompute": True}, "rollout": {"max_model_len": 1024}}
TWO_GPUS = {"train": {"tp": 2, "recompute": True, "micro_tokens": 2048}, "rollout": {"max_model_len": 2048}}
LONG = {"train": {"tp": 8, "recompute": "full"}, "rollout": {"tp": 1, "max_model_len": 450_000}}


@pytest.mark.parametrize(
    ("model", "sections", "sentence"),
    [
        ("qwen3-14b", {"train": {"tp": 1}}, "train.tp = 1: training qwen3-14b with TP1 PP1 needs 182 GB"),
        ("qwen3-14b", {"train": {"tp": 1}}, "80 GB of one a800 can be used; valid: train.tp = 4, train.pp = 1"),
        ("llama-3.1-70b", {"rollout": {"tp": 4}}, "llama-3.1-70b with TP8 PP1 needs 190 GB a GPU (optimizer 107)"),
        ("llama-3.1-70b", {"rollout": {"tp": 4}}, "no layout of 1 node of 8 GPUs fits"),
        ("qwen3-32b", {"planner": {"device": "h200"}, "rollout": {"tp": 1, "max_model_len": 300_000}}, "tp = 2."),
        ("qwen3-14b", {"rollout": {"kv_cache_mb": 100}}, "it holds 1,280 tokens of qwen3-14b at TP2 and"),
        ("qwen3-14b", {"rollout": {"kv_cache_mb": 80_000}}, "an engine of qwen3-14b needs 102 GB a GPU"),
        ("qwen3-14b", {"rollout": {"tp": 1, "max_model_len": 400_000}}, "rollout.tp = 1: an engine of qwen3-14b"),
        ("qwen3-14b", {"planner": {"device": "a80"}}, "planner.device = 'a80': unknown device"),
        (
            "qwen3-14b",
            {"train": {"tp": 4}, "components": of_gpus(4)},
            'train.pp = 1, train.micro_tokens = 32768, train.recompute = "full" (the fastest that fits).',
        ),
        ("qwen3-14b", LONG, "rollout.tp = 1: an engine of qwen3-14b needs"),
        # The copy of several minibatches counts, beside replicas that may be lost.
        (
            "qwen3-14b",
            {**SHORT, "components": of_gpus(4, hybrid=1), "algorithm": {"minibatches": 2}},
            "TP4 PP1 needs 116 GB a GPU",
        ),
        # 12 of the core's 18 bytes a parameter are divided over its nodes.
        ("qwen3-14b", {**TWO_GPUS, "components": of_gpus(2, 1, 1)}, "GB a GPU (optimizer 90)"),
    ],
)
def test_a_layout_out_of_memory_is_refused_with_figures_and_a_way_out(
    model: str, sections: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        checked(model, **sections)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("model", "sections"),
    [
        (
            "qwen3-14b",
            {"train": {"tp": 4, "recompute": True}, "components": of_gpus(4), "rollout": {"max_model_len": 8192}},
        ),
        ("qwen3-14b", {**SHORT, "components": of_gpus(4), "algorithm": {"minibatches": 2}}),
        # A hybrid node trains without optimizer state: 18 bytes a parameter do not fit on two GPUs, 6 do.
        ("qwen3-14b", {**TWO_GPUS, "components": of_gpus(2, 4, 1)}),
        # Stages may differ by a layer.
        ("qwen3-8b", {"train": {"tp": 1, "pp": 8}, "rollout": {"max_model_len": 1024}}),
    ],
)
def test_a_layout_that_fits_passes(model: str, sections: dict[str, Any]) -> None:
    assert checked(model, **sections) == []


def test_caches_in_fp8_hold_twice_the_tokens() -> None:
    checked("qwen3-14b", train=LONG["train"], rollout={**LONG["rollout"], "kv_dtype": "fp8"})


def test_one_long_trajectory_is_a_warning_because_shorter_ones_may_never_ask_for_it() -> None:
    (line,) = checked("qwen3-14b", train={"tp": 8}, rollout={"max_model_len": 131072})
    why = "a pipeline full of micro-batches of 131,072 tokens needs "
    assert line.startswith(f"training may run out of GPU memory: {why}")


def test_a_gpu_in_no_table_is_a_warning_and_nothing_is_checked_on_cpus() -> None:
    kinds = {"train": "mi300", "hybrid": "mi300", "rollout": ""}
    odd = {name: {**NODE, "gpu_type": kind} for name, kind in kinds.items()}
    assert checked("qwen3-14b", components=odd, train={"tp": 1}) == [
        "GPUs of gpu_type = 'mi300' are in no table, so their memory was not checked (planner.device, planner.devices)",
        "without a gpu_type GPUs are in no table, so their memory was not checked (planner.device, planner.devices)",
    ]
    with pytest.raises(UserError, match="of one a100 can be used"):
        checked("qwen3-14b", components=odd, train={"tp": 1}, planner={"device": "a100"})
    assert checked("qwen3-14b", slurm={"device": "cpu"}, train={"tp": 1}) == []


def test_a_dry_run_is_checked_with_what_it_simulates() -> None:
    simulated = {"run": {"engine": "simulated"}, "slurm": {"device": "cpu"}, "planner": {"model": "qwen3-8b"}}
    assert check_memory(configured(**simulated, train={"tp": 4}, rollout={"max_model_len": 1024}), None).warnings == []
    with pytest.raises(UserError, match=r"training qwen3-8b with TP1 PP1 needs"):
        check_memory(configured(**simulated, train={"tp": 1}), None)


@pytest.mark.parametrize("model", ["qwen3-4b", "qwen3-8b", "qwen3-14b"])
@pytest.mark.parametrize("prompts", [1, 64])
@pytest.mark.usefixtures("few_batches")
def test_a_split_chosen_by_the_planner_is_never_refused(model: str, prompts: int) -> None:
    sections = {"components": {"split": "auto"}, "model": {"path": model}, "algorithm": {"prompts_per_step": prompts}}
    data = run_file(**sections)
    for section in ("train", "rollout"):
        del data[section]["tp"]
    made = initial_plan(validate(data))
    check_memory(made.config, model_shape(model))


def small(**changes: Any) -> dict[str, Any]:
    """Components of which the hybrid one is too small."""
    return {name: {**NODE, **(changes if name == "hybrid" else {})} for name in ("train", "hybrid", "rollout")}


@pytest.mark.parametrize("cpus", [1, 7])
def test_a_node_with_fewer_cpus_than_gpus_is_refused(cpus: int) -> None:
    with pytest.raises(UserError) as caught:
        check_cpus(configured(components=small(cpus=cpus)))
    why = "a node with 8 GPUs runs a process for each of them; valid: an integer >= 8."
    assert f"components.hybrid.cpus = {cpus}: {why}" in str(caught.value)
    local = {"device": "cuda", "executor": "local"}
    for sections in ({"slurm": {"device": "cpu"}}, {"slurm": local}, {"run": {"engine": "simulated"}}):
        check_cpus(configured(components=small(cpus=cpus), **sections))
    for changes in ({}, {"cpus": 8}, {"cpus": 1, "nodes": 0}):
        check_cpus(configured(components=small(**changes)))


@pytest.mark.parametrize(
    ("head", "sections", "sentence"),
    [
        (128, {}, ""),
        (96, {}, "on a800 vLLM reads such caches for heads of 64, 128, 256, 512 channels, and the model's have 96"),
        (96, {"planner": {"device": "h100"}}, ""),
        (96, {"slurm": {"device": "cpu"}}, ""),
        (80, {"slurm": {"device": "cpu"}}, "vLLM on CPUs needs heads of multiples of 32 channels, and the model's"),
    ],
)
def test_caches_in_fp8_need_a_kernel_that_reads_them(head: int, sections: dict[str, Any], sentence: str) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 512}
    model = {"model_type": "llama", "num_attention_heads": 8, "head_dim": head, **sizes}
    found = [
        error
        for check in MODEL_CHECKS
        if check is cache_type_runs
        for error in check(configured(rollout={"kv_dtype": "fp8"}, **sections), model)
    ]
    assert all(sentence in str(error) and str(error).endswith("valid: auto.") for error in found)
    assert len(found) == bool(sentence)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_gated_delta_nets_on_cpus_are_in_bfloat16(kind: str, device: str, dtype: str) -> None:
    config = configured(slurm={"device": device}, model={"dtype": dtype})
    found = [str(error) for error in delta_nets_run(config, {"model_type": kind})]
    assert len(found) == ((kind, device, dtype) == ("qwen3_next", "cpu", "float32"))
    assert all("model.dtype = 'float32': vLLM on CPUs computes" in error for error in found)
