"""Cross-field checks as pure functions of configuration and model shape."""

from __future__ import annotations

from typing import Any

import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.preflight import checks

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_hidden_layers": 6,
    "max_position_embeddings": 8192,
}


GPUS = {"train": 8, "hybrid": 8, "rollout": 4}


def configured(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def messages(config: RunConfig, model: dict[str, Any] | None = MODEL) -> list[str]:
    return [str(error) for error in checks.problems(config, model)]


def test_the_default_configuration_has_no_problem() -> None:
    assert messages(RunConfig()) == []


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"components": {"planner": {"nodes": 2}}},
            "components.planner.nodes = 2: rank 0 is the one planner; valid: 0 or 1.",
        ),
        ({"components": {"train": {"nodes": 0}}}, "components.train.nodes = 0"),
        ({"components": {"rollout": {"nodes": 0}}}, "components.rollout.nodes = 0"),
        ({"rollout": {"policy": "cmlqf"}}, "(did you mean 'cmlfq'?)"),
        ({"rollout": {"policy": "seer"}}, "rollout.policy = 'seer': unknown policy"),
        (
            {"algorithm": {"prompts_per_step": 2, "group_size": 2, "minibatches": 5}},
            "algorithm.minibatches = 5: a global batch has 4 trajectories",
        ),
        ({"slurm": {"time_limit": "1h"}}, "slurm.time_limit = '1h': malformed"),
        ({"slurm": {"time_limit": "0"}}, "slurm.time_limit = '0': no time at all"),
        ({"train": {"tp": 3}}, "train.tp = 3: does not divide the model's num_attention_heads = 8; valid: 1, 2, 4, 8."),
        (
            {"train": {"tp": 16}},
            "train.tp = 16: does not divide the model's num_attention_heads = 8; valid: 1, 2, 4, 8.",
        ),
        ({"train": {"pp": 7}}, "train.pp = 7: the model has only 6 layers; valid: 1 to 6."),
        ({"rollout": {"tp": 3}}, "rollout.tp = 3: does not divide"),
        ({"rollout": {"tp": [1, 3]}}, "rollout.tp = 3: does not divide"),
        (
            {"rollout": {"tp": [1, 2, 4]}, "components": {"hybrid": {"nodes": 1}}},
            (
                "rollout.tp = [1, 2, 4]: a list has one entry for each of the 1 hybrid and 1 rollout nodes, in this"
                " order, and this one has 3;"
            ),
        ),
        ({"rollout": {"engines_per_node": []}}, "rollout.engines_per_node = []: a list has one entry for each"),
        (
            {
                "slurm": {"device": "cuda"},
                "rollout": {"tp": [1, 2, 8]},
                "components": {
                    "train": {"gpus": 1},
                    "hybrid": {"nodes": 1, "gpus": 2},
                    "rollout": {"nodes": 2, "gpus": 4},
                },
            },
            "rollout.tp = 8: rollout.tp * rollout.engines_per_node needs 8 GPUs and components.rollout has 4 per node",
        ),
        (
            {"rollout": {"max_model_len": 9000}},
            "rollout.max_model_len = 9000: the model's max_position_embeddings is 8192",
        ),
        (
            {
                "slurm": {"device": "cuda"},
                "rollout": {"tp": 2, "engines_per_node": 4},
                "components": {n: {"gpus": g} for n, g in GPUS.items()},
            },
            (
                "rollout.engines_per_node = 4: rollout.tp * rollout.engines_per_node needs 8 GPUs and"
                " components.rollout has 4 per node"
            ),
        ),
        (
            {"slurm": {"device": "cuda"}, "components": {"hybrid": {"nodes": 0}, "rollout": {"gpus": 1}}},
            "components.train.gpus = 0: training needs one; valid: an integer >= 1",
        ),
    ],
)
def test_problems_name_field_value_and_limit(sections: dict[str, Any], sentence: str) -> None:
    found = messages(configured(**sections))
    assert found
    assert any(sentence in message for message in found), found
    assert all(message.endswith(".") for message in found)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"model_type": "cohere2"},
            (
                "model.path: model_type = 'cohere2': this version cannot train this architecture; valid: glm4, llama,"
                " mistral, phi3, qwen2, qwen3, qwen3_moe."
            ),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "model.path: type = 'dynamic': the trainer has no such rotary embedding; valid: default, linear, llama3,"
            " yarn.",
        ),
        ({"hidden_size": None}, "model.path: the model's config has no 'hidden_size'; valid: an integer >= 1."),
        ({"num_hidden_layers": "six"}, "model.path: num_hidden_layers = 'six': is no count; valid: an integer >= 1."),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_its_parallelism(
    change: dict[str, Any], sentence: str
) -> None:
    assert str(next(checks.problems(configured(train={"tp": 3}), {**MODEL, **change}))) == sentence


def test_nodes_of_different_degree_that_fit_are_no_problem() -> None:
    gpus = {"train": {"gpus": 1}, "hybrid": {"nodes": 1, "gpus": 2}, "rollout": {"nodes": 2, "gpus": 4}}
    assert (
        messages(
            configured(
                slurm={"device": "cuda"}, rollout={"tp": [2, 1, 2], "engines_per_node": [1, 4, 2]}, components=gpus
            )
        )
        == []
    )
    swapped = messages(
        configured(slurm={"device": "cuda"}, rollout={"tp": [4, 1, 1], "engines_per_node": 1}, components=gpus)
    )
    assert swapped == [
        "rollout.tp = 4: rollout.tp * rollout.engines_per_node needs 4 GPUs and components.hybrid has 2 per node;"
        " valid: a product <= 2."
    ]


def test_more_processes_than_cpus_is_no_problem() -> None:
    assert messages(configured(train={"tp": 4}, components={"train": {"cpus": 1}})) == []
