"""Unsupported models are refused without torch, in a sentence that names the key; others pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.errors import UserError
from libra_hpc.models.architecture import read_shape
from libra_hpc.models.published import WRAPPERS, text_config
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.supported import FAMILIES, TRAINED, check_trained, most_positions, refusals, rope_settings

from .support import config_of

QWEN: dict[str, Any] = (
    {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu"}
    | {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 2}
)
WITH_POSITIONS = {"max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 8192
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **more}}


def no_rotary(key: str, kind: str, valid: str) -> str:
    return f"{key} = '{kind}': the trainer has no such rotary embedding; valid: {valid}"


VALID = (*TRAINED, *WRAPPERS)
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "cohere2"},
        f"model_type = 'cohere2': this version cannot train this architecture; valid: {', '.join(VALID)}.",
    ),
    (
        {"model_type": "paligemma", "text_config": {"model_type": "llama"}},
        "model_type = 'paligemma': this version cannot train this architecture; valid: its language model alone, in",
    ),
    (
        {"model_type": "gemma3_text"},
        "hidden_act = 'silu': the trainer has no such activation; valid: gelu_pytorch_tanh",
    ),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: the trainer has no such softcapping"),
    ({"model_type": "mixtral"}, "model_type = 'mixtral': a mixture of experts of another kind than Qwen3's"),
    ({"model_type": None}, "model_type = None"),
    # Windows: of a family without any, in some layers, no number.
    (
        {"use_sliding_window": True},
        "sliding_window = 4096: the trainer has no sliding-window attention for this family;"
        " valid: null (full attention).",
    ),
    ({"model_type": "llama"}, "sliding_window = 4096"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = 'sliding_attention'"),
    ({"model_type": "olmo3", "sliding_window": None}, "sliding_window = None: is no size"),
    ({"model_type": "mistral", "sliding_window": "none", **WITH_POSITIONS}, "sliding_window = 'none'"),
    # Layers.
    (
        {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
        "mlp_only_layers = [0]: the trainer has no dense layers among layers of experts",
    ),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu': the trainer has no such activation; valid: silu"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"use_bias": True}, "use_bias = True: the trainer has no such bias; valid: false or null."),
    ({"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    (
        {"model_type": "glm4_moe", "sliding_window": None, "n_group": 2},
        "n_group = 2: the trainer has no groups of experts; valid: 1.",
    ),
    (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 2},
        "layer_types = ['linear_attention']: no layer",
    ),
    (
        {"model_type": "gpt_oss", "layer_types": None, **rope("linear", factor=2.0)},
        no_rotary("rope_type", "linear", "yarn."),
    ),
    ({"model_type": "gpt_oss", "layer_types": ["full_attention"] * 2}, "layer_types = ['full_attention', 'full_"),
    (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config = {'quant_method': 'fp8'}: the trainer reads weights of bfloat16, float16 or float32; "
        "valid: no such key, as in the folder with BF16 in its name, if there is one.",
    ),
    (
        {"model_type": "gpt_oss", "layer_types": None, "quantization_config": {"quant_method": "mxfp4"}},
        "quantization_config = {'quant_method': 'mxfp4'}: the trainer reads weights of bfloat16, float16 or float32; "
        "valid: no such key, as in what transformers saves of a model loaded with Mxfp4Config(dequantize=True).",
    ),
    (
        {"model_type": "gpt_oss", "layer_types": None, "swiglu_limit": 5.0},
        "swiglu_limit = 5.0: vLLM has another number",
    ),
    # Rotary embeddings, under the old key and in the new section.
    (rope("dynamic", factor=4.0), no_rotary("rope_type", "dynamic", "default, linear, llama3, yarn")),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "type = 'dynamic'"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6}}, "rope_type = 'dynamic'"),
    ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": {"rope_type": "default"}}, "type = 'dynamic'"),
    (
        {"model_type": "phi3", "sliding_window": None, "rope_scaling": {"type": "longrope"}},
        no_rotary("type", "longrope", "default."),
    ),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters = {"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    (rope("yarn") | WITH_POSITIONS, "rope_scaling.factor = None: the yarn rotary embedding needs a number"),
    (rope("yarn", factor=4.0, beta_fast=None) | WITH_POSITIONS, "rope_scaling.beta_fast = None"),
    ({"rope_theta": "1e6"}, "rope_theta = '1e6': the default rotary embedding needs a number"),
    (rope("linear", factor=4), "rope_scaling.factor = 4: vLLM takes no integer for it; valid: 4.0."),
    (rope("llama3", factor=8.0), "rope_scaling.low_freq_factor = None"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_an_unsupported_model_is_refused_by_every_reader(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    config = {key: value for key, value in {**QWEN, **change}.items() if value is not ...}
    with pytest.raises(UserError) as caught:
        check_trained(config)
    assert str(caught.value).startswith(f"model.path: {sentence}")
    with pytest.raises(UserError) as trainer:
        read_shape(config_of(tmp_path, config))
    assert str(trainer.value) == str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model_type": "qwen2"},
        {"model_type": "llama", "sliding_window": None, "use_sliding_window": None},
        {"rope_scaling": None},
        {"rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
        rope("linear", factor=2.0),
        {"partial_rotary_factor": 1.0},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": ...},
        {"model_type": "phi3", "sliding_window": 2047, **WITH_POSITIONS},
        {"model_type": "phi3", "sliding_window": None, "partial_rotary_factor": 0.75},
        {"model_type": "glm4", "sliding_window": None, "attention_bias": True, "partial_rotary_factor": 0.5},
    ],
)
def test_a_supported_model_passes(change: dict[str, Any], tmp_path: Path) -> None:
    config = {key: value for key, value in {**QWEN, **change}.items() if value is not ...}
    assert list(refusals(config)) == []
    assert read_shape(config_of(tmp_path, config)).family in TRAINED
    assert model_shape(tmp_path).untrained == ""


def test_sizes_that_a_published_wrapper_omits_are_those_of_transformers(tmp_path: Path) -> None:
    """What Google and llava-hf have in theirs."""
    gemma = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    gemma |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    found = read_shape(config_of(tmp_path, {"model_type": "gemma3", "text_config": gemma, "torch_dtype": "bfloat16"}))
    assert (found.layers, found.heads, found.kv_heads, found.head_dim, found.vocab) == (34, 8, 4, 256, 262208)
    assert (found.tied_embeddings, found.family, found.wrapper) == (True, "gemma3_text", "gemma3")
    llava = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    found = read_shape(config_of(tmp_path, {"model_type": "llava", "text_config": llava}))
    assert (found.hidden, found.layers, found.heads, found.kv_heads, found.intermediate) == (4096, 32, 32, 32, 11008)
    assert text_config({"model_type": "qwen3"}) == {"model_type": "qwen3"}


def test_both_spellings_of_rotary_settings_mean_the_same() -> None:
    old, new = {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    assert rope_settings(old) == rope_settings(new)
    assert rope_settings({})["rope_type"] == "default"


def test_yarn_reaches_no_further_than_its_factor_times_the_original_positions() -> None:
    yarn = {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}}
    assert most_positions({**yarn, "max_position_embeddings": 32768}) == 8192
    assert most_positions({**yarn, "max_position_embeddings": 4096}) == 4096
    assert most_positions({"max_position_embeddings": 32768}) == 32768
    assert most_positions({}) is None


@pytest.mark.parametrize(
    ("sizes", "valid"),
    [
        ((8, 2, 16, 96, 64), [1, 2, 4, 8]),
        ((8, 1, 16, 96, 64), [1, 2, 4, 8]),
        ((6, 1, 128, 96, 96), [1, 2]),
        ((40, 10, 128, 17920, 100352), [1, 2]),
        ((8, 8, 16, 96, 100), [1, 2, 4]),
    ],
)
def test_key_value_heads_may_be_fewer_than_devices(sizes: tuple[int, ...], valid: list[int]) -> None:
    names = ("heads", "kv_heads", "head_dim", "intermediate", "vocab")
    shape = msgspec.structs.replace(model_shape("qwen3-8b"), **dict(zip(names, sizes, strict=True)))
    assert [tp for tp in range(1, shape.heads + 1) if not shape.fault(tp)] == valid
    with pytest.raises(UserError, match=rf"train\.tp = 5: .*; valid: {', '.join(map(str, valid))}\.$"):
        shape.check_tp(5)


def test_a_shape_names_why_it_is_for_study_only(tmp_path: Path) -> None:
    assert set(TRAINED) < set(FAMILIES)
    assert model_shape("qwen3-14b").untrained == ""
    assert "mixture of experts" in model_shape("mixtral-8x7b").untrained
    assert model_shape("qwen3-30b-a3b").untrained == ""
    dynamic = config_of(tmp_path, {**QWEN, "rope_scaling": {"type": "dynamic"}})
    assert model_shape(dynamic).untrained == "type = 'dynamic': the trainer has no such rotary embedding"
