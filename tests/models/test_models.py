"""Shapes: published parameter counts, Hugging Face configs, and the configs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_hpc.errors import UserError
from libra_hpc.models.shapes import ModelShape, model_shape, shapes

from .support import config_of

PUBLISHED = {
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
}
"""Elements of the published checkpoints (the safetensors index of each repository)."""

QWEN3_MOE: dict[str, Any] = (
    {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144}
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}
)
LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256} | {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}


@pytest.mark.parametrize("name", shapes())
def test_parameters_match_the_published_checkpoint(name: str) -> None:
    assert model_shape(name).params == pytest.approx(PUBLISHED[name], rel=1e-4)


@pytest.mark.parametrize(("name", "billions"), [("qwen3-30b-a3b", 3.3), ("mixtral-8x7b", 12.9)])
def test_flops_of_a_mixture_are_two_per_active_parameter_of_the_makers_figure(name: str, billions: float) -> None:
    shape = model_shape(name)
    active = shape.layer_flops_per_token // 2 + 2 * shape.head_params
    assert active / 1e9 == pytest.approx(billions, rel=0.03)


def test_kv_bytes_and_their_replication_beyond_the_kv_heads() -> None:
    per_device = [model_shape("qwen3-30b-a3b").kv_bytes_per_device(tp) for tp in (1, 2, 4, 8)]
    assert per_device == [2 * 48 * 4 * 128 * 2 // n for n in (1, 2, 4, 4)]


def test_flops_of_a_dense_model_are_two_per_weight() -> None:
    shape = model_shape("llama-3.1-8b")
    assert shape.layer_flops_per_token == 2 * (shape.params - 2 * shape.head_params - shape.hidden)


def test_a_window_limits_what_a_position_attends_to_in_its_layers(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "olmo3", "num_hidden_layers": 8, "sliding_window": 64}
    shape = model_shape(config_of(tmp_path / "m", config))
    assert shape.windows == (64, 64, 64, 0) * 2
    assert shape.pairs(1000, 1000**2) == (3 * 64 * 1000 + 500_000) / 4
    assert shape.pairs(100, 2 * 50**2) == 50**2


def of_kinds(tmp_path: Path, kind: str, layers: list[str], **more: Any) -> ModelShape:
    config = {**LLAMA, "model_type": kind, "num_hidden_layers": len(layers), "layer_types": layers, **more}
    return model_shape(config_of(tmp_path / "m", {**config, "torch_dtype": "bfloat16"}))


@pytest.mark.parametrize(
    ("windows", "full", "reserved_windows", "reserved_full"),
    [
        pytest.param(4, 2, 4, 2, id="groups of two"),
        pytest.param(3, 2, 4, 2, id="the last group of two is half empty"),
        pytest.param(4, 3, 4, 4, id="counts that are alike have groups of the larger one"),
    ],
)
def test_layers_with_windows_reserve_those_and_the_tokens_in_flight(
    tmp_path: Path, windows: int, full: int, reserved_windows: int, reserved_full: int
) -> None:
    layers = ["sliding_attention"] * windows + ["full_attention"] * full
    shape = of_kinds(tmp_path, "olmo3", layers, sliding_window=65)
    token = 2 * 8 * 128 * 2
    assert shape.kv_bytes_per_device(1) == (windows + full) * token
    # 64 tokens and 1024 in flight are 34 blocks, and a window begins within one more.
    reserved = reserved_windows * 35 * 32 + reserved_full * 32768
    assert shape.with_kv("auto", 32768).kv_bytes_per_device(1, 1024) == -(-token * reserved // 32768)
    short = shape.with_kv("auto", 256)
    assert short.kv_bytes_per_device(1) >= short.attention_layers * token, "all is within the tokens in flight"


def test_a_gated_delta_net_reserves_two_states_for_a_sequence(tmp_path: Path) -> None:
    heads = {
        "key_head_dim": 128,
        "value_head_dim": 128,
        "num_key_heads": 16,
        "num_value_heads": 32,
        "conv_kernel_dim": 4,
    }
    more = {f"linear_{key}": size for key, size in heads.items()} | {"num_key_value_heads": 2, "head_dim": 256}
    more |= {"num_attention_heads": 16, "mamba_ssm_dtype": "float32"}
    layers = (["linear_attention"] * 3 + ["full_attention"]) * 2
    shape = of_kinds(tmp_path, "qwen3_5_text", layers, **more)
    token, state = 2 * 2 * 256 * 2, 32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2
    block = -(-state // (32 * token)) * 32
    for longest in (block, 8 * block):
        whole, states = 2 * longest, 3 * 2 * 2 * block
        counted = shape.with_kv("auto", longest).kv_bytes_per_device(1)
        assert counted == -(-token * (whole + states) // longest)
    assert shape.with_kv("auto", block).kv_bytes_per_device(1) == 7 * shape.kv_bytes_per_device(1)


@pytest.mark.parametrize(("config", "name"), [(QWEN3_MOE, "qwen3-30b-a3b"), (LLAMA, "llama-3.1-8b")])
def test_a_config_file_gives_the_builtin_shape(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    assert model_shape(config_of(tmp_path / name, config)) == model_shape(name)
    assert model_shape(tmp_path / name / "config.json") == model_shape(name)


def test_mixtral_names_its_experts_in_its_own_way(tmp_path: Path) -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    config = {**LLAMA, **experts, "vocab_size": 32000, "sliding_window": None}
    assert model_shape(config_of(tmp_path / "mixtral-8x7b", config)) == model_shape("mixtral-8x7b")


def test_qwen2_has_biases_and_a_float32_model_twice_the_bytes(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "qwen2", "dtype": "float32"}
    shape, llama = model_shape(config_of(tmp_path / "m", config)), model_shape("llama-3.1-8b")
    assert shape.params - llama.params == 32 * (4096 + 2 * 1024)
    assert shape.kv_bytes_per_device(1) == 2 * llama.kv_bytes_per_device(1)
    assert shape.with_kv("fp8").kv_bytes_per_device(1) == llama.with_kv("fp8").kv_bytes_per_device(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, r"model_type = 'lama': unknown architecture; .* \(did you mean 'llama'\?\)"),
        ({"model_type": None}, "unknown architecture"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"num_hidden_layers": -3}, "num_hidden_layers = -3"),
        ({"num_hidden_layers": True}, "is no count"),
        ({"num_attention_heads": "32"}, "is no count"),
        ({"torch_dtype": "float8"}, "unknown type of weights"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding_window = 4096: sliding-window"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window = -1"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, "dense layers"),
    ],
)
def test_a_config_the_counts_would_be_wrong_for_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        model_shape(config_of(tmp_path / "m", {**LLAMA, **change}))


@pytest.mark.parametrize("content", ["{", "[]", '"llama"', "\x00"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"valid: a Hugging Face config.json"):
        model_shape(tmp_path)


def test_degrees_shard_the_heads_and_those_for_training_more() -> None:
    shape = model_shape("qwen2.5-7b")
    assert [tp for tp in range(1, 33) if shape.trains(tp)] == [1, 2, 4]
    assert [tp for tp in range(1, 33) if shape.divides(tp)] == [1, 2, 4, 28]
    why = r"tp = 8: does not divide the model's num_attention_heads = 28; valid: 1, 2, 4, 28\."
    with pytest.raises(UserError, match=why):
        shape.check_tp(8, "tp", rollout=True)
