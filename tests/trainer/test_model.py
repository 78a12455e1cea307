"""Our Megatron-Core models against transformers: logits, a whole training step, names and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.models.architecture import hf_shapes
from libra_hpc.models.published import WRAPPERS
from libra_hpc.models.supported import TRAINED, in_float32
from libra_hpc.trainer.model.head import Head
from libra_hpc.trainer.model.packing import Pack, decode, pack
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.weights.blocks import to_hf
from libra_hpc.weights.names import ReplicaPlace, trained_entries

from .batches import loss_logprobs, loss_tokens, samples, train_step
from .settings import MICRO_TOKENS, optimizer
from .support import ALGORITHM, OPTIMIZER, build, make_model, save

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
IMAGES = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tied": True}),
    "qwen2 linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    "qwen3 tied": ("qwen3", {"tied": True}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 500.0}}),
    "ernie4_5": ("ernie4_5", {"tied": True}),
    "gemma3_text": ("gemma3_text", {}),
    "gemma3_text, tied and scaled": (
        "gemma3_text",
        {
            "tied": True,
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
        },
    ),
    "glm4_moe": ("glm4_moe", {"layers": 3}),
    "glm4_moe, norms and biases": (
        "glm4_moe",
        {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 0},
    ),
    "gpt_oss": ("gpt_oss", {}),
    "granite": ("granite", {}),
    "llama": ("llama", {}),
    "llama llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}),
    "mistral": ("mistral", {}),
    "ministral3": ("ministral3", {}),
    "mistral with windows": ("mistral", {"sliding_window": 8}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "olmo3 yarn": ("olmo3", {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 500.0}}}),
    "olmoe": ("olmoe", {}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"tied": True}),
    "smollm3, each third layer": ("smollm3", {"layers": 3, "no_rope_layers": None, "no_rope_layer_interval": 3}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, unscaled experts": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_5_text": ("qwen3_5_text", {"tied": True}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {}),
    "phi3": ("phi3", {}),
    "phi3 partial": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}),
    **{kind: (kind, {}) for kind in WRAPPERS},
    **{kind: (kind, {"rope_parameters": IMAGES}) for kind in ("qwen2_vl", "qwen2_5_vl")},
    "glm4v": ("glm4v", {"rope_parameters": {**IMAGES, "partial_rotary_factor": 0.5}, "hidden_size": 64}),
    "gemma3, tied": ("gemma3", {"tied": True}),
    "mistral3 of ministral3": ("mistral3", {"family": "ministral3"}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4 tied, without biases": ("glm4", {"tied": True, "attention_bias": False}),
    "glm4 yarn": ("glm4", {"rope_parameters": {**YARN, "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
}


def test_every_family_that_is_trained_is_compared() -> None:
    assert {kind for kind, _ in MODELS.values()} == {*TRAINED, *WRAPPERS}


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_gradients_and_files_equal_those_of_transformers(
    tmp_path: Path, world: ReplicaPlace, name: str
) -> None:
    kind, keys = MODELS[name]
    reference = make_model(kind, tmp_path / "model", **keys)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    engine, _ = build(tmp_path / "model", world)
    batch = sorted((decode(s) for s in samples(1)), key=lambda e: -len(e.tokens))
    found: list[torch.Tensor] = []

    def loss(head: Head, one: Pack) -> torch.Tensor:
        found.append(head.likelihood(one.targets, 1.0).logprobs)
        return -found[-1].sum() / count

    count = sum(int(e.mask.sum()) for e in batch)
    engine.forward_backward(pack(batch, MICRO_TOKENS, engine.device), loss)
    want = []
    for e in batch:
        where = e.mask.nonzero()[:, 0]
        want.append(reference(e.tokens[None]).logits[0].log_softmax(-1)[where - 1, e.tokens[where]])
        (-want[-1].sum() / count).backward()
    assert len(found) > 1
    assert (torch.cat(found) - torch.cat(want)).abs().max() < 5e-6

    # Hugging Face -> Megatron-Core -> Hugging Face is exact, also for the checkpoint that transformers loads.
    original = load_file(tmp_path / "model" / "model.safetensors")
    checkpoint.write_policy(engine, tmp_path / "model", tmp_path / "out")
    exported = {name: one for file in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(file).items()}
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
    save(engine, tmp_path / "model", tmp_path / "saved")
    loaded = type(reference).from_pretrained(tmp_path / "saved" / "policy")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), reference.parameters(), strict=True))
    assert (tmp_path / "saved" / "policy" / "tokenizer.json").is_file()

    # Gradients under the names of the files: transformers writes its own as if they were weights.
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
        for buffer in reference.buffers():
            buffer.zero_()
    reference.save_pretrained(tmp_path / "gradients")
    with checkpoint.TensorFiles(tmp_path / "gradients", engine.shape.wrapper) as files:
        expected = {name: files(name) for name in files.names()}
    parameters, sizes = engine.named_parameters(), hf_shapes(engine.shape)
    for ours, entry in trained_entries(engine.shape, world).items():
        gradient = parameters[ours].main_grad  # type: ignore[attr-defined]
        for theirs, part in zip(entry.hf, to_hf(entry, [gradient], engine.shape, sizes), strict=True):
            assert (part - expected.pop(theirs)).abs().max() < 1e-5, theirs
    assert all(map(in_float32, expected))


def test_steps_equal_plain_torch(tmp_path: Path, world: ReplicaPlace) -> None:
    """The same two GRPO steps through transformers, autograd, and torch's AdamW, written out."""
    reference = make_model("qwen2", tmp_path / "model")
    engine, trainer = build(tmp_path / "model", world)
    decayed = [p for p in reference.parameters() if p.dim() > 1]
    flat = [p for p in reference.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": flat, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=OPTIMIZER.eps,
    )
    for step in (1, 2):
        batch = list(train_step(step, 0).minibatches[0])
        total = torch.zeros(())
        for sample in batch:
            lp, behaviour = loss_logprobs(reference, sample, ALGORITHM.rollout.temperature)
            weight = (lp.detach() - behaviour).exp().clamp(max=ALGORITHM.algorithm.is_truncation)
            k3 = (behaviour - lp).exp() - 1 - (behaviour - lp)
            term = ALGORITHM.algorithm.kl_coef * k3 - (lp - lp.detach()).exp() * sample.advantage
            total = total + (weight * term).sum()
        loss = total / loss_tokens(batch)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), OPTIMIZER.grad_clip)
        for group in adam.param_groups:
            group["lr"] = OPTIMIZER.lr * step / OPTIMIZER.warmup_steps
        adam.step()
        done = trainer.step(train_step(step, 0))
        assert done.numbers["loss"] == pytest.approx(float(loss), abs=2e-6)
        assert done.numbers["grad_norm"] == pytest.approx(float(norm), rel=2e-5)
    checkpoint.write_policy(engine, tmp_path / "model", tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in reference.state_dict().items():
        assert (got[name] - tensor).abs().max() < 1e-5, name


def test_biases_that_choose_experts_stay_in_float32_and_choose_those_of_transformers(
    tmp_path: Path, world: ReplicaPlace
) -> None:
    reference = make_model("glm4_moe", tmp_path / "model")
    theirs = type(reference).from_pretrained(tmp_path / "model", dtype=torch.bfloat16).model.layers[1].mlp.gate
    engine, trainer = build(tmp_path / "model", world, torch.bfloat16, optimizer(lr=1e-2))
    ours, tokens = engine.module.decoder.layers[1].mlp.router, torch.randn(256, 1, 32, dtype=torch.bfloat16)

    chosen = ours(tokens)[1].nonzero()[:, 1].view(256, -1)
    assert torch.equal(chosen, theirs(tokens)[2].sort(-1).values)
    theirs.e_score_correction_bias.copy_(theirs.e_score_correction_bias.bfloat16())
    assert not torch.equal(chosen, theirs(tokens)[2].sort(-1).values), "these biases would not show a rounding"
    trainer.step(train_step(1, 0))
    checkpoint.write_policy(engine, tmp_path / "model", tmp_path / "out")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "out"))
    wide = {name: tensor for name, tensor in after.items() if tensor.dtype is torch.float32}
    assert wide.keys() == set(filter(in_float32, after)) == {n for n, t in wide.items() if torch.equal(before[n], t)}


def test_a_minibatch_without_loss_tokens_is_skipped(tmp_path: Path, world: ReplicaPlace) -> None:
    make_model("qwen2", tmp_path / "model")
    engine, trainer = build(tmp_path / "model", world)
    message = train_step(1, 0)
    done = trainer.step(type(message)(1, 0, ((), message.minibatches[0]), (0, message.divisors[0])))
    assert (engine.state.step, engine.state.updates) == (1, 1)
    assert done.numbers["grad_norm"] > 0
