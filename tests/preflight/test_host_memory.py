"""Host memory and /dev/shm: refused where a node's work cannot fit, a warning where sizes are unknown."""

from __future__ import annotations

from math import ceil
from typing import Any

import msgspec
import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.models import host_memory
from libra_hpc.models.devices import CPU, MIB
from libra_hpc.models.host_memory import WEIGHTS, NodeWork, node_memory
from libra_hpc.models.memory import activation_bytes_per_token
from libra_hpc.models.shapes import model_shape
from libra_hpc.preflight import host_memory_needs as preflight
from libra_hpc.preflight.host_memory_needs import check_boxes, check_hosts, host_needs, with_caches, with_packs
from libra_hpc.slurm.queue.query import Partition
from libra_hpc.weights.offers import KEEP_VERSIONS

from .test_gpu_memory import NODE, configured

MODEL = model_shape("qwen3-14b")
SMALL = model_shape("qwen3-4b")
GB = 1e9


def nodes(mem: str = "", hybrid: int = 1, **changes: Any) -> dict[str, Any]:
    counts = {"train": 1, "hybrid": hybrid, "rollout": 1}
    return {name: {**NODE, "nodes": count, "mem": mem, **changes} for name, count in counts.items()}


def partition(memory_gb: float) -> Partition:
    return Partition("gpu", True, "up", 4, 4, 64, int(memory_gb * GB) >> 20, {"a800": 8}, None)


def checked(memory_gb: float | None, **sections: Any) -> list[str]:
    known = () if memory_gb is None else (partition(memory_gb),)
    return check_hosts(host_needs(configured(**sections), MODEL, known))


def test_a_node_has_the_files_that_the_runtime_keeps() -> None:
    assert host_memory.KEPT_WHOLE == KEEP_VERSIONS
    trains = node_memory(MODEL, NodeWork(snapshots=True, core_nodes=1))
    assert trains.snapshots == 24 * MODEL.params
    core = node_memory(MODEL, NodeWork(snapshots=True, core_nodes=4))
    assert core.snapshots == 12 * MODEL.params, "with the copies of another node's part"
    assert (core.weight_image, core.weight_offers) == (4 * MODEL.params, 4 * MODEL.params), "each twice"
    assert core.weight_staging == 0.0, "it has no engines"
    whole = node_memory(msgspec.structs.replace(MODEL, dtype_bytes=4), NodeWork())
    assert whole.weight_offers == 3 * 4 * MODEL.params, "two versions are kept, and none has only what changed"
    assert core.checkpoint_copy == 3 * MODEL.params, "of the optimizer's state, a quarter"
    assert core.optimizer == 0.0
    assert node_memory(MODEL, NodeWork(core_nodes=4, states=2)).optimizer == 6 * MODEL.params
    assert trains.shared.keys() == {*WEIGHTS, "snapshots"}
    rolls = node_memory(MODEL, NodeWork(rolls=True, engines=4, environment_bytes=7.0))
    assert rolls.terms().keys() == {*WEIGHTS, "weight staging", "environments", "processes"}
    assert rolls.weight_staging == 4 * 2 * MODEL.params, "every engine copies its weights to its GPUs from there"


def test_every_training_world_holds_one_reference_policy() -> None:
    parts = {**nodes(hybrid=4), "train": {**NODE, "nodes": 2}}
    parts["hybrid"] = {**parts["hybrid"], "nodes_per_replica": 4}
    found = host_needs(configured(components=parts, algorithm={"reference_kl_coef": 0.001}), MODEL)
    sizes = [need.terms.get("reference policy", 0.0) for need in found]
    assert sizes == [MODEL.params, MODEL.params / 2, 0.0], "2 bytes each, over two and four nodes; none for rollout"
    assert not any("reference policy" in need.terms for need in host_needs(configured(components=parts), MODEL))


def test_core_nodes_keep_snapshots() -> None:
    (train, hybrid, _) = host_needs(configured(components=nodes()), MODEL)
    assert "snapshots" in train.terms
    assert train.terms["checkpoint copy"] == 12 * MODEL.params
    assert hybrid.terms.keys() == {*WEIGHTS, "weight staging", "processes"}
    two = {**nodes(), "train": {**NODE, "nodes": 2}}
    assert host_needs(configured(components=two), MODEL)[0].terms["snapshots"] == 24 * MODEL.params


def test_too_little_memory_is_refused_with_the_largest_term_and_a_way_out() -> None:
    sentence = (
        r"components.train.mem = '380G': a train node needs 654 GB of host memory \(snapshots 354\) and has 408 GB;"
        r" valid: at least 609G; train.snapshot_every = 0 takes the snapshots away\.$"
    )
    with pytest.raises(UserError, match=sentence):
        checked(None, components=nodes("380G"))
    with pytest.raises(UserError, match=r"at least 609G; train.snapshot_every = 0 takes the snapshots away\.$"):
        checked(500.0, components=nodes())
    assert checked(2000.0, components=nodes("720G")) == []
    assert checked(2000.0, components=nodes()) == []
    assert checked(2000.0, components=nodes("400G"), train={"snapshot_every": 0}) == []


def test_limits_of_tools_count_on_rollout_nodes() -> None:
    task = {"hosts": 4, "tool_processes": 16, "tool_memory_mb": 2048}
    (train, _, last) = host_needs(configured(components=nodes(), task=task), MODEL)
    assert "environments" not in train.terms
    assert last.terms["environments"] == 64 * 2**31


def test_half_of_the_nodes_memory_is_assumed_for_shared_memory() -> None:
    (line,) = checked(880.0, components=nodes())
    assert line == (
        "snapshots do not fit: a train node needs 473 GB (snapshots 354) of /dev/shm, which has 440 GB, by"
        " compute.shm_share; without snapshots: train.snapshot_every = 0"
    )
    sentence = (
        "compute.shm_share = 0.1: image and offers of weights of a train node take 118 GB of /dev/shm, which has 80 GB;"
        " valid: the share of a node's memory that /dev/shm really has."
    )
    with pytest.raises(UserError, match=f"^{sentence}$"):
        checked(800.0, components=nodes(), compute={"shm_share": 0.1})
    assert checked(1000.0, components=nodes(), compute={"shm_share": 0.6}) == []
    assert checked(1000.0, components=nodes(), train={"snapshot_every": 0}) == []


def test_boxes_that_may_take_more_than_their_node_has_are_a_warning() -> None:
    def warned(memory_gb: float | None, limit: str = "4G", env: int = 0, **algorithm: int) -> list[str]:
        parts = {**nodes(hybrid=0), "env": {"nodes": env, "seats": 32}}
        config = configured(components=parts, env={"limits": {"memory": limit}}, algorithm=algorithm)
        config = msgspec.structs.replace(config, given=frozenset({"env.limits.memory"}))
        known = () if memory_gb is None else (partition(memory_gb),)
        return check_boxes(config, host_needs(config, MODEL, known), known)

    assert warned(100.0, env=2) == [
        "env.limits.memory = '4G': 32 boxes of an environment node may take 137 GB, and it has 100 GB for them;"
        " 2980M or components.env.seats = 23 would fit"
    ]
    assert warned(140.0, env=2) == warned(100.0, "2980M", env=2) == []
    assert warned(100.0, env=2, prompts_per_step=1, group_size=4) == [], "no more boxes than trajectories"
    batch = {"prompts_per_step": 8, "group_size": 8, "eta": 0}
    (line,) = warned(300.0, **batch)
    assert "64 boxes of the rollout leader's node may take 275 GB" in line, "its engines take a part of the node"
    assert line.endswith("or environment nodes (components.env) would fit")
    assert warned(900.0, **batch) == warned(None, **batch) == warned(300.0, "0", **batch) == []


def test_an_unknown_size_is_a_warning_with_what_is_needed() -> None:
    (line,) = checked(None, components=nodes())
    assert line == (
        "the size of the nodes is not known, so host memory was not checked: a train node needs 654 GB, 473 GB of"
        " it in /dev/shm (snapshots 354)"
    )


def test_all_parts_of_one_node_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(components={**nodes("800G", hybrid=0), "one_node": True})
    (need,) = host_needs(config, MODEL)
    assert (need.where, need.room.memory) == ("the node", 2 * 800 * 2**30)
    assert need.terms["processes"] == 2 * host_memory.PROCESS_BYTES
    monkeypatch.setattr(preflight, "_size", lambda folder: 64e9)
    monkeypatch.setattr("os.sysconf", lambda name: 2**30 if name == "SC_PHYS_PAGES" else 4096)
    local = {"slurm": {"device": "cuda", "executor": "local"}, "train": {"snapshot_every": 0}}
    with pytest.raises(
        UserError, match=r"image and offers of weights of this machine take 207 GB of /dev/shm, which has 64 GB"
    ):
        check_hosts(host_needs(configured(components=nodes(hybrid=0), **local), MODEL))


def on_cpus(mem: str, **train: Any) -> RunConfig:
    small = {"rollout": {"tp": 1, "max_model_len": 1024}, "train": {"tp": 1, "snapshot_every": 0, **train}}
    config = configured(components=nodes(mem, hybrid=0), slurm={"device": "cpu"}, **small)
    return msgspec.structs.replace(config, given=frozenset(f"train.{key}" for key in train))


def test_on_cpus_trainers_and_engines_count_in_the_memory_of_their_node() -> None:
    (train, rolls) = host_needs(on_cpus("500G"), SMALL)
    layers = SMALL.layers * 8192 * activation_bytes_per_token(SMALL, "none")
    assert train.terms["activations"] == layers * CPU.activation_factor
    assert {"weights", "gradients", "optimizer", "checkpoint copy"} <= train.terms.keys()
    assert rolls.terms["KV cache"] >= 1024 * SMALL.kv_bytes_per_device(1)
    assert "engine weights" in rolls.terms.keys() - train.terms.keys()
    assert sum(host_needs(on_cpus("500G", tp=2), SMALL)[0].terms.values()) > sum(train.terms.values())


def test_packs_on_cpus_are_halved_until_they_fit_where_the_user_gave_no_length() -> None:
    whole, given = sum(host_needs(on_cpus("500G"), SMALL)[0].terms.values()) / MIB, {"micro_tokens": 8192}
    # A trajectory is one micro-batch at least.
    for mem, train, tokens in (
        (whole + 1, {}, 8192),
        (whole - 1, {}, 4096),
        (whole - 1, given, 8192),
        (1024, {}, 1024),
    ):
        assert with_packs(on_cpus(f"{int(mem)}M", **train), SMALL, ()).train.micro_tokens == tokens


def test_caches_on_cpus_take_what_the_node_has_beside_the_rest() -> None:
    longest = host_needs(on_cpus("1G"), SMALL)[1].terms["KV cache"]
    sizes = [with_caches(one, SMALL, ()).rollout.kv_cache_mb for one in map(on_cpus, ("900G", "70G", "1G", ""))]
    assert sizes[0] == 256 * longest / MIB
    assert sizes[2:] == [ceil(longest / MIB), 0], "one trajectory; an unknown node is left to vLLM"
    assert with_caches(on_cpus("90G").changed(rollout={"kv_cache_mb": 64}), SMALL, ()).rollout.kv_cache_mb == 64
    rolls = host_needs(on_cpus("70G").changed(rollout={"kv_cache_mb": sizes[1]}), SMALL)[1]
    assert 0.8 < sum(rolls.terms.values()) / (70 << 30) <= 0.9
    assert rolls.terms["engine workspace"] == SMALL.vocab * (20 * 256 + 4 * SMALL.hidden)


def test_a_trainer_that_its_cpu_node_cannot_hold_is_refused_with_the_key_that_lessens_it() -> None:
    refused = r"components.train.mem = .* a train node needs .* at least \d+G"
    for train, key in ({"micro_tokens": 8192}, "train.micro_tokens"), ({}, "rollout.max_model_len"):
        whole = sum(host_needs(on_cpus("500G", **(train or {"micro_tokens": 1024})), SMALL)[0].terms.values())
        config = on_cpus(f"{int(whole / MIB) - 1}M", **train)
        with pytest.raises(UserError, match=rf"{refused}, or a smaller {key}\.$"):
            check_hosts(host_needs(with_packs(config, SMALL, ()), SMALL))
    with pytest.raises(UserError, match=rf"{refused}\.$"):
        check_hosts(host_needs(on_cpus("1G"), SMALL))
