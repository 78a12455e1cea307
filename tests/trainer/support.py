"""Tiny models, in-process references, and real worker processes behind their sockets."""

from __future__ import annotations

import math
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.config.learn import OptimizerSection
from libra_hpc.config.run import RunConfig
from libra_hpc.models.adapters import with_adapters
from libra_hpc.models.architecture import hf_shapes, read_shape
from libra_hpc.models.published import WRAPPERS
from libra_hpc.protocol import trainer as wire
from libra_hpc.protocol.codec import FrameBuffer
from libra_hpc.protocol.engine_state import Doing, EngineReady
from libra_hpc.protocol.trainer import Join, Joined, Saved, StepDone, to_worker
from libra_hpc.state import state_folders as folders
from libra_hpc.trainer.elastic import ElasticReplicas
from libra_hpc.trainer.grpo_trainer import GrpoTrainer
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.trainer.saved.checkpoint import ReferencePolicy
from libra_hpc.trainer.saved.shard_files import ShardFiles
from libra_hpc.trainer.saved.state_writer import Answer, StateWriter
from libra_hpc.trainer.settings import write_config
from libra_hpc.trainer.train_engine import TrainEngine
from libra_hpc.weights.image import Image, pin, write_pinned
from libra_hpc.weights.names import ReplicaPlace, trained_entries
from libra_hpc.weights.pieces import offer_path, payload_path, read_offer

from .batches import VOCAB, train_step
from .settings import algorithm, optimizer, worker_config
from .worker_process import WAIT_S, WorkerProcess

OPTIMIZER = optimizer(lr=1e-3, weight_decay=0.1, eps=1e-5, warmup_steps=2)
"""A large epsilon keeps Adam from magnifying rounding differences of near-zero gradients in the comparisons below."""
ALGORITHM = algorithm(kl_coef=0.1, temperature=0.8)

LINEAR = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
DELTA_NET: dict[str, Any] = {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
DELTA_NET |= {f"linear_{key}": value for key, value in zip(LINEAR, (8, 12, 2, 4), strict=True)}
VISION: dict[str, Any] = dict.fromkeys(
    ("hidden_size", "embed_dim", "intermediate_size", "out_hidden_size", "projection_dim"), 32
)
VISION |= dict.fromkeys(("num_attention_heads", "num_heads"), 2) | dict.fromkeys(("num_hidden_layers", "depth"), 1)
VISION |= {"image_size": 28, "patch_size": 14, "head_dim": 16}
VISION |= {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 4.0,
    },
    "ministral3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "olmoe": {**EXPERTS},
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2_moe": {"shared_expert_intermediate_size": 40, "moe_intermediate_size": 24, **EXPERTS},
    "qwen3": {"head_dim": 16},
    "qwen3_5_text": {**DELTA_NET},
    "qwen3_5_moe_text": {**DELTA_NET, "shared_expert_intermediate_size": 40, "moe_intermediate_size": 24, **EXPERTS},
    "qwen3_next": {**DELTA_NET, "shared_expert_intermediate_size": 40, "moe_intermediate_size": 24, **EXPERTS},
    "smollm3": {"no_rope_layers": [0, 1]},
    "seed_oss": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True, "moe_intermediate_size": 24, **EXPERTS},
}
"""Keys of a tiny model's config beyond those that all families have."""


def make_model(kind: str, folder: Path, *, tied: bool = False, layers: int = 2, **keys: Any) -> Any:
    """Write a random tiny Hugging Face model, with ``keys`` in its config, and return it."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
        "dtype": "float32",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        # The embedding of one would have no gradient in transformers.
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    if kind in WRAPPERS:
        model = _wrapper(kind, settings, keys)
    else:
        config = transformers.AutoConfig.for_model(kind, **{**settings, **OF_FAMILY.get(kind, {}), **keys})
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for router in (buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")):
            # As in trained models; bfloat16 has few values there.
            router.uniform_(6.8, 7.1)
        for parameter in model.parameters():
            # Biases and norms start at 0 and 1, where a wrong mapping would not show.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


def _wrapper(kind: str, settings: dict[str, Any], keys: dict[str, Any]) -> Any:
    """A tiny wrapper, all of it random; ``keys``: of its text model, ``family`` among them."""
    import transformers

    family = keys.pop("family", WRAPPERS[kind])
    ready = transformers.AutoConfig.for_model(kind)
    text = ready.get_text_config(decoder=True).model_type if family == WRAPPERS[kind] else family
    sections = {"text_config": {**settings, **OF_FAMILY.get(family, {}), **keys, "model_type": text}}
    sections["vision_config"] = {**VISION, "model_type": ready.vision_config.model_type}
    config = type(ready)(**sections, tie_word_embeddings=settings["tie_word_embeddings"])
    return transformers.AutoModelForImageTextToText.from_config(config)


def build(
    model_dir: Path,
    split: ReplicaPlace,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerSection = OPTIMIZER,
    settings: RunConfig = ALGORITHM,
) -> tuple[TrainEngine, GrpoTrainer]:
    """An engine and trainer in this process, alone in generation 0, with the model's weights."""
    shape = with_adapters(read_shape(model_dir), *settings.lora.arguments)
    engine = TrainEngine(shape, torch.device("cpu"), dtype, split, optimizer)
    checkpoint.load_policy(engine, model_dir)
    replicas = ElasticReplicas(engine, 60.0, 60.0)
    frozen = ReferencePolicy(engine, Path(folder)) if (folder := settings.algorithm.reference_folder("")) else None
    trainer = GrpoTrainer(engine, replicas, settings, reference=frozen)
    replicas.join(Join(0, 0, 1, ""))
    return engine, trainer


def save(engine: TrainEngine, model_dir: Path, folder: Path) -> Saved:
    """Write a checkpoint of this process alone, and wait for its files."""
    answers: list[Answer] = []
    writer = StateWriter(engine, model_dir, answers.append)
    writer.copy(folder)()
    writer.wait()
    (answer,) = answers
    assert isinstance(answer, Saved)
    checkpoint.write_policy(engine, model_dir, folder / "policy")
    return answer


def fixed_run(
    model_dir: Path, split: ReplicaPlace, steps: int, minibatches: int = 1, settings: RunConfig = ALGORITHM
) -> tuple[list[StepDone], dict[str, torch.Tensor]]:
    """The reference, one replica without parallelism: every step's report, and the final state."""
    engine, trainer = build(model_dir, split, settings=settings)
    done = [trainer.step(train_step(step, 0, minibatches=minibatches)) for step in range(1, steps + 1)]
    folder = model_dir.parent / f"reference-{model_dir.name}-{steps}-{minibatches}"
    save(engine, model_dir, folder)
    return done, read_tensors(folder, settings)


def read_tensors(folder: Path, settings: RunConfig = ALGORITHM) -> dict[str, torch.Tensor]:
    """Weights and Adam moments of a checkpoint, by Hugging Face name."""
    return {**load_file(folder / "policy" / "model.safetensors"), **read_state_tensors(folder, settings)}


def read_state_tensors(folder: Path, settings: RunConfig = ALGORITHM) -> dict[str, torch.Tensor]:
    """What the ranks of a checkpoint wrote, as ``KIND/NAME`` with Hugging Face names."""
    found: dict[str, torch.Tensor] = {}
    shape = with_adapters(read_shape(folder / "policy"), *settings.lora.arguments)
    with ShardFiles(folder, shape) as files:
        for entry in trained_entries(shape, ReplicaPlace(tp=1, tp_rank=0, pp=1, pp_rank=0)).values():
            for kind in ("exp_avg", "exp_avg_sq", "master"):
                if files.has(kind):
                    found |= dict(zip([f"{kind}/{name}" for name in entry.hf], files.whole(kind, entry), strict=True))
    return found


def assert_same_step(got: StepDone, want: StepDone, loss: float) -> None:
    """The loss to ``loss``, the rest to ten times that; Adam hides a wrong gradient from weights, not from the norm."""
    assert got.numbers["loss"] == pytest.approx(want.numbers["loss"], abs=loss)
    assert got.numbers["grad_norm"] == pytest.approx(want.numbers["grad_norm"], rel=10 * loss)
    assert got.numbers["entropy"] == pytest.approx(want.numbers["entropy"], abs=10 * loss)


def assert_same_state(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Weights within 2e-5 (they moved by about 1e-3 per step), first moments (averaged gradients) within 1e-6."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        tolerance = 1e-6 if name.startswith("exp_avg") else 2e-5
        assert (got[name] - tensor).abs().max() <= tolerance, name


class Replica:
    """The worker processes of a core of one world, or of an elastic replica, and the agents' ends of their sockets."""

    def __init__(self, base: Path, name: str, model_dir: Path, **options: Any) -> None:
        """``options``: fields of the workers' configuration, the degrees of parallelism among them."""
        degrees = {degree: options.pop(degree, 1) for degree in ("tp", "pp", "cp", "dp")}
        self.folder = base / name
        self.folder.mkdir(parents=True)
        self.model_dir, self._run = model_dir, options.get("run", ALGORITHM)
        self._image = (
            hf_shapes(read_shape(model_dir)),
            "F32" if options.get("dtype", "float32") == "float32" else "BF16",
        )
        """Shapes and type of the tensors."""
        files = {"model_dir": str(model_dir), "world_rendezvous": str(self.folder / "world")}
        settings = {**files, "run": ALGORITHM, "optimizer": OPTIMIZER, **degrees, **options}
        self.processes: list[WorkerProcess] = []
        self._sockets: list[socket.socket] = []
        self._buffers: list[tuple[FrameBuffer, list[Any]]] = []
        for rank in range(math.prod(degrees.values())):
            write_config(worker_config(rank=rank, **settings), self.folder / f"{rank}.json")
            connection, theirs = socket.socketpair()
            connection.settimeout(WAIT_S)
            with theirs:
                self.processes.append(WorkerProcess(theirs, self.folder / str(rank)))
            self._sockets.append(connection)
            self._buffers.append((FrameBuffer(), []))

    def ready(self) -> EngineReady:
        return self.receive(EngineReady)

    def send(self, message: Any) -> None:
        for connection in self._sockets:
            connection.sendall(to_worker.frame(message))

    def receive(self, kind: type[Any]) -> Any:
        """Local rank 0's answer, once all processes answered with a ``kind``."""
        answers = [self.receive_from(rank) for rank in range(len(self._sockets))]
        for rank, answer in enumerate(answers):
            assert isinstance(answer, kind), (answer, (self.folder / f"{rank}.log").read_text()[-3000:])
        return answers[0]

    def send_to(self, rank: int, message: Any) -> None:
        self._sockets[rank].sendall(to_worker.frame(message))

    def receive_from(self, rank: int) -> Any:
        """The next answer of one process; `Doing` is skipped."""
        pending = self._buffers[rank][1]
        while not pending:
            self._read(rank)
        return pending.pop(0)

    def alive(self, rank: int) -> Doing:
        """The next `Doing` of one process."""
        found: list[Doing] = []
        while not found:
            found = self._read(rank)
        return found[-1]

    def _read(self, rank: int) -> list[Doing]:
        buffer, pending = self._buffers[rank]
        chunk = self._sockets[rank].recv(1 << 20)
        if not chunk:
            raise EOFError((self.folder / f"{rank}.log").read_text()[-3000:])
        messages = [wire.from_worker.decode(body) for body in buffer.feed(chunk)]
        pending.extend(message for message in messages if not isinstance(message, Doing))
        return [message for message in messages if isinstance(message, Doing)]

    def ask(self, message: Any, kind: type[Any]) -> Any:
        self.send(message)
        return self.receive(kind)

    def save(self, folder: Path, step: int, kind: type[Any] = Saved, tier: wire.Tier = "checkpoint") -> Any:
        """Have a checkpoint written, its policy as a node's carrier does; returns local rank 0's answer."""
        if kind is Saved:
            self._save_policy(folder / "policy" / "model.safetensors", step)
        self.ask(wire.SaveState(str(folder), step, tier), wire.SaveStarted)
        return self.receive(kind)

    def _save_policy(self, path: Path, step: int) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder) as node:
            self.send(wire.OfferWeights(node, step, -1))
            answers = [self.receive_from(rank) for rank in range(len(self._sockets))]
            paths = [offer_path(Path(node), step, answer.writer) for answer in answers]
            image = Image(Path(node), *self._image)
            image.apply(step, [(read_offer(path), payload_path(path).read_bytes()) for path in paths])
            _, copy = pin(image.path)
            with copy:
                write_pinned(copy, path)

    def snapshot(self, folder: Path, step: int) -> None:
        """Take a snapshot, and complete it as an agent does."""
        folder.mkdir(parents=True)
        self.ask(wire.SaveState(str(folder), step, "snapshot"), wire.SaveStarted)
        self.receive(Saved)

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Weights and moments, read from a checkpoint."""
        folder = self.folder / f"check-{step}-{len(list(self.folder.iterdir()))}"
        self.save(folder, step)
        assert folders.read_state(folder).step == step
        return read_tensors(folder, self._run)

    def kill(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def close(self) -> list[int]:
        """Close the sockets, as an agent that ends; returns the exit codes."""
        for connection in self._sockets:
            connection.close()
        return [process.wait(timeout=WAIT_S) for process in self.processes]


class Layout(NamedTuple):
    """Degrees of a world."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 0

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        return "-".join(
            f"{name}{value}" for name, value in self._asdict().items() if value > (name != "etp") or name == "dp"
        )


def assert_equals_one_process(base: Path, world: ReplicaPlace, layout: Layout, **options: Any) -> None:
    """A world trains ``base / "model"`` as one process does, and the states of both load into the other."""
    model_dir, steps, run = base / "model", 3, options.get("run", ALGORITHM)
    replica = Replica(base, "split", model_dir, **layout._asdict(), **options)
    want, state = fixed_run(model_dir, world, steps, settings=run)
    replica.ready()
    join_all([replica], 0, base / "meet")
    for step, reference in enumerate(want, 1):
        (done,) = step_all([replica], step, 0)
        assert_same_step(done, reference, 2e-6)
        assert done.numbers["ratio_mean"] == pytest.approx(reference.numbers["ratio_mean"], rel=2e-5)
        for name in ("trained_tokens", "loss_tokens", "ratio_truncated"):
            assert done.numbers[name] == reference.numbers[name]
    folder = base / "saved"
    replica.save(folder, steps)
    assert_same_state(read_tensors(folder, run), state)

    # Across splits: one process continues from the split replica's checkpoint, and the split replica from one
    # process's.
    engine, trainer = build(model_dir, world, settings=run)
    checkpoint.load_state(engine, folder)
    assert (engine.state.step, engine.state.updates) == (steps, steps)
    alone = trainer.step(train_step(steps + 1, 0))
    (together,) = step_all([replica], steps + 1, 0)
    assert_same_step(alone, together, 2e-6)
    save(engine, model_dir, base / "alone")
    assert_same_state(replica.tensors(steps + 1), read_tensors(base / "alone", run))
    assert replica.close() == [0] * layout.ranks
    start_dir = str(base / f"reference-model-{steps}-1")
    split = Replica(base, "from-one-process", model_dir, **layout._asdict(), start_dir=start_dir, run=run)
    assert split.ready().version == steps
    after = split.tensors(steps)
    assert all((after[name] == state[name]).all() for name in state)
    assert split.close() == [0] * layout.ranks


def join_all(replicas: list[Replica], generation: int, rendezvous: Path, **weights: Any) -> list[Any]:
    """Form a generation of ``replicas``, the core first; returns their answers."""
    for rank, replica in enumerate(replicas):
        replica.send(Join(generation, rank, len(replicas), str(rendezvous), **weights))
    return [replica.receive(Joined) for replica in replicas]


def step_all(
    replicas: list[Replica], step: int, generation: int, kind: type[Any] = StepDone, minibatches: int = 1
) -> list[Any]:
    """Run one step of the fixed run over ``replicas``."""
    for rank, replica in enumerate(replicas):
        replica.send(train_step(step, generation, replica=rank, replicas=len(replicas), minibatches=minibatches))
    return [replica.receive(kind) for replica in replicas]
