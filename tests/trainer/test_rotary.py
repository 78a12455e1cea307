"""Angles of every rotary embedding, and the defaults of missing keys, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from libra_hpc.models.architecture import read_shape
from libra_hpc.models.supported import FAMILIES, LAYER_TYPES, TRAINED, rope_settings, with_defaults
from libra_hpc.trainer.model.rotary import Rotary

SIZES = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
BASE = {"model_type": "qwen2", "max_position_embeddings": 131072, **SIZES, **HEADS}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SETTINGS: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn, original positions of the model": {"rope_type": "yarn", "factor": 4.0},
    "yarn, betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, attention factor": {**YARN, "attention_factor": 0.8},
    "yarn, mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, half an mscale": {**YARN, "mscale": 0.707},
    "yarn that stretches nothing": {**YARN, "factor": 1.0},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_angles_equal_those_of_transformers(name: str, old: bool, tmp_path: Path) -> None:
    settings = dict(SETTINGS[name])
    if old:
        settings["type"] = settings.pop("rope_type")
        config = {**BASE, "rope_theta": 1e6, "rope_scaling": settings}
    else:
        config = {**BASE, "rope_parameters": {"rope_theta": 1e6, **settings}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path)
    frequencies, scale = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, torch.device("cpu"))
    positions = torch.tensor([0, 1, 77, 4095, 100_000])
    angles = positions.float()[:, None] * frequencies
    table = Rotary(read_shape(tmp_path), torch.device("cpu"), torch.float32).tables(positions)[0]
    # An angle of 1e5 has steps of 0.008 in float32, so the frequencies must be the same bits up to rounding.
    assert (table.cos[:4, 0, :64] - angles[:4].cos() * scale).abs().max() < 2e-4
    assert (table.sin[:4, 0, 64:] - angles[:4].sin() * scale).abs().max() < 2e-4
    assert (table.cos[4, 0, :64] - angles[4].cos() * scale).abs().max() < 2e-2


@pytest.mark.parametrize("kind", TRAINED)
def test_a_missing_key_means_what_transformers_assumes(kind: str) -> None:
    theirs = AutoConfig.for_model(kind).to_dict()
    if "n_routed_experts" in theirs:
        theirs["num_experts"] = theirs["n_routed_experts"]
    if "num_local_experts" in theirs:
        theirs["num_experts"] = theirs["num_local_experts"]
    ours = with_defaults({"model_type": kind})
    assert FAMILIES[kind].defaults.keys() <= {*theirs, "partial_rotary_factor", "rope_theta", "num_experts"}
    heads = theirs["num_attention_heads"]
    assert ours.get("num_key_value_heads", heads) == theirs["num_key_value_heads"]
    width = theirs["hidden_size"] // heads
    assert ours.get("head_dim", width) == (theirs.get("head_dim") or width)
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"):
        assert ours.get(key) == theirs.get(key)
    assert ours.get("rms_norm_eps", 1e-6) == theirs["rms_norm_eps"]
    assert ours.get("attention_bias", False) == theirs.get("attention_bias", False)
    assert ours.get("tie_word_embeddings", False) == theirs["tie_word_embeddings"]
    window = None if FAMILIES[kind].window_switch else ours.get("sliding_window")
    assert window == (theirs.get("sliding_window") or None)
    every = theirs["rope_parameters"]
    for layer in LAYER_TYPES:
        angles = every.get(layer, every)
        assumed = {"beta_fast": 32.0, "beta_slow": 1.0, "type": "yarn"}
        assumed |= {"max_position_embeddings": theirs["max_position_embeddings"], **rope_settings(ours, layer)}
        assert assumed == assumed | angles
