"""Tiny random models with reference log-probabilities of transformers, and a client of an engine process."""

from __future__ import annotations

import itertools
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from libra_hpc.engine.settings import EngineConfig, alone
from libra_hpc.engine.stats import INTERVAL_S
from libra_hpc.models.architecture import hf_shapes, read_shape
from libra_hpc.models.published import Shapes
from libra_hpc.protocol.codec import FrameBuffer, pack_i32, unpack_i32
from libra_hpc.protocol.engine import (
    Abort,
    FromEngine,
    Generate,
    Generated,
    ToEngine,
    UpdateWeights,
    Wake,
    WeightsApplied,
    WeightsRefused,
    from_engine,
    to_engine,
)
from libra_hpc.protocol.engine_state import Doing, EngineReady, EngineStats
from libra_hpc.trainer.saved.checkpoint import TensorFiles
from libra_hpc.weights.image import Image
from libra_hpc.weights.pieces import WHOLE, Encoded, TensorBlock, offer_path, payload_path, write_offer
from tests.stage.waiting import alive

Greedy = list[tuple[list[int], bytes]]
VOCAB = 128
PATIENCE_S = 280.0
"""Longest wait for a message before a test fails: a start-up on a loaded machine."""
PROMPTS = [[5, 17, 99, 3, 64, 21, 8], [1, 2, 3], list(range(10, 50))]
"""Of `EngineUnderTest.greedy`."""
WAITS_OR_AHEAD = ["each step waits", "steps ahead"]
"""The two kinds of the fixture `shared_engine`."""
versions = itertools.count(10)
"""Of the weights that an engine of several modules gets."""


IMAGELESS = Path(__file__).with_name("imageless")
"""Folder of what stands in for torchvision."""


class Model:
    """A model folder and its weights in transformers."""

    def __init__(self, folder: Path, reference: Any) -> None:
        self.folder = folder
        self.reference = reference.eval()

    @property
    def weights(self) -> Path:
        return self.folder / "model.safetensors"

    def image(self, folder: Path) -> Image:
        """One that lies in ``folder`` and has no version yet."""
        return Image(folder, hf_shapes(read_shape(self.folder)), "F32")

    def update(self, version: int) -> UpdateWeights:
        """Its weights as an image of its own."""
        (folder := self.folder / "image").mkdir(exist_ok=True)
        return bring(self.image(folder), version, text_tensors(self.weights))

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int], prompt: int, temperature: float = 1.0) -> list[float]:
        """log p of tokens[prompt:], each given all before it."""
        logits = self.reference(torch.tensor([tokens])).logits[0, prompt - 1 : -1].float()
        scaled = torch.log_softmax(logits / temperature, dim=-1)
        return scaled[torch.arange(len(tokens) - prompt), torch.tensor(tokens[prompt:])].tolist()

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]


def text_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of an engine's model in a folder's file."""
    with TensorFiles(file, read_shape(file.parent).wrapper) as files:
        return {name: files(name) for name in files.names()}


def bring(image: Image, version: int, tensors: Mapping[str, torch.Tensor], base: int = WHOLE) -> UpdateWeights:
    """Write tensors into an image, as one owner's offer."""
    encoded = []
    for name in image.shapes:
        values = np.ascontiguousarray(tensors[name].contiguous().view(torch.int32).numpy().reshape(-1))
        encoded.append(
            Encoded(TensorBlock(name, 0, 1, values.size, values.size), "F32", "dense", values.size, (values,))
        )
    offer = write_offer(image.path.parent, version, base, "t0.0", encoded)
    image.apply(version, [(offer, payload_path(offer_path(image.path.parent, version, "t0.0")).read_bytes())])
    return UpdateWeights(str(image.path), version)


def foreign(folder: Path, changes: Mapping[str, tuple[int, ...] | None], model: Model) -> UpdateWeights:
    """An image of a model with other tensors, or without those that are None."""
    shapes: dict[str, tuple[int, ...] | None] = {**hf_shapes(read_shape(model.folder)), **changes}
    whole: Shapes = {name: shape for name, shape in shapes.items() if shape is not None}
    return bring(Image(folder, whole, "F32"), 1, {name: torch.zeros(shape) for name, shape in whole.items()})


def make_model(folder: Path, seed: int, *, tied: bool = False, hidden: int = 64) -> Model:
    """A Qwen2 of two layers with weights wide enough that greedy decoding has no near-ties."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    config = Qwen2Config(**sizes, **heads, **ids, tie_word_embeddings=tied, initializer_range=0.2)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    if tied:
        # Tools that write a checkpoint often write the head a second time.
        tensors = load_file(folder / "model.safetensors")
        head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})
    return Model(folder, model)


def engine_config(model: Model, **fields: object) -> EngineConfig:
    """``fields``: of `EngineConfig`, and keys of ``[rollout]``."""
    place = {name: fields.pop(name) for name in EngineConfig.__struct_fields__ if name in fields}
    # A CPU forms no step ahead but in `ahead_on_cpu`.
    rollout = {"max_model_len": 1024, "kv_cache_mb": 16, "async_steps": False, **fields}
    return alone(str(model.folder), "cpu", **{"dtype": "float32", "rollout": rollout, **place})


def turn(rid: str, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Generate:
    return Generate(rid=rid, prompt=pack_i32(prompt), max_tokens=max_tokens, **fields)


def tokens_of(done: Generated) -> list[int]:
    return unpack_i32(done.tokens)


def logprobs_of(done: Generated) -> list[float]:
    return np.frombuffer(done.logprobs, np.float32).tolist()


def descendants(pid: int) -> list[int]:
    """Process ids below ``pid``, whatever their group."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    out, front = [], [pid]
    while front:
        below = children.get(front.pop(), [])
        out += below
        front += below
    return out


def cpu_ticks(pid: int) -> int:
    """User and system time of all threads of a process, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def not_spinning(pids: list[int]) -> bool:
    """Whether these processes together used less than a tenth of a second of the last second."""
    before = sum(map(cpu_ticks, pids))
    time.sleep(1)
    return sum(map(cpu_ticks, pids)) - before <= 0.1 * os.sysconf("SC_CLK_TCK")


class EngineUnderTest:
    """An engine process started as its agent starts it."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        ahead_on_cpu = config.run.rollout.async_steps and config.run.slurm.device == "cpu"
        self.config = config
        self.module = "tests.engine.ahead_on_cpu" if ahead_on_cpu else "libra_hpc.engine"
        folder.mkdir(parents=True, exist_ok=True)
        self.config_path = folder / "engine.json"
        self.config_path.write_bytes(msgspec.json.encode(config))
        self.log_path = folder / "engine.log"
        self._connection, theirs = socket.socketpair()
        with theirs, open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    self.module,
                    "--socket",
                    str(theirs.fileno()),
                    "--config",
                    str(self.config_path),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._buffer = FrameBuffer()
        self._inbox: list[tuple[FromEngine, int]] = []
        self._turns: list[str] = []
        """Ids of the turns sent since `begin`."""
        self.stats: list[EngineStats] = []
        self.doing = Doing()
        self.loaded: Greedy = []
        """What it said with the weights that it had loaded itself."""
        self.reported = 0
        """Reports that came before the message received last."""

    def ready(self) -> EngineReady:
        return self.expect(EngineReady)

    def send(self, *messages: ToEngine) -> None:
        self._turns += [message.rid for message in messages if isinstance(message, Generate)]
        self._connection.sendall(b"".join(to_engine.frame(message) for message in messages))

    def receive(self) -> FromEngine:
        """The next message but `Doing` and `EngineStats` (the latter are appended to ``stats``)."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._inbox:
            self._hear(deadline)
        message, self.reported = self._inbox.pop(0)
        return message

    def _hear(self, deadline: float) -> None:
        """Take what the engine sends next."""
        left_s = max(0.0, deadline - time.monotonic())
        assert select.select([self._connection], [], [], left_s)[0], f"no such message; {self.stats[-1:]}\n{self.log()}"
        chunk = self._connection.recv(1 << 20)
        assert chunk, f"the engine closed the socket\n{self.log()}"
        for body in self._buffer.feed(chunk):
            message = from_engine.decode(body)
            if isinstance(message, EngineStats):
                self.stats.append(message)
            elif isinstance(message, Doing):
                self.doing = message
            else:
                self._inbox.append((message, len(self.stats)))

    def expect(self, kind: type[Any]) -> Any:
        message = self.receive()
        assert isinstance(message, kind), f"{message}\n{self.log()}"
        return message

    def generate(self, *requests: Generate) -> list[Generated]:
        """Send requests and return their answers in the order of the requests."""
        self.send(*requests)
        answers = {}
        for _ in requests:
            done = self.expect(Generated)
            answers[done.rid] = done
        return [answers[request.rid] for request in requests]

    def greedy(self) -> Greedy:
        """Tokens of some prompts, and the bits of their log-probabilities."""
        done = self.generate(*(turn(f"g{i}", prompt, 16, temperature=0.0) for i, prompt in enumerate(PROMPTS)))
        return [(tokens_of(one), one.logprobs) for one in done]

    def apply(self, update: UpdateWeights) -> WeightsApplied:
        self.send(update)
        applied: WeightsApplied = self.expect(WeightsApplied)
        return applied

    def begin(self, update: UpdateWeights) -> None:
        """Begin a test with these weights: the turns of an earlier one, which may have failed, are ended.

        An engine takes its messages in order, so what the earlier test left unread comes before this update's answer.
        """
        self.send(Wake(), *map(Abort, self._turns), update)
        self._turns.clear()
        while not isinstance(message := self.receive(), WeightsApplied) or message.version != update.version:
            pass

    def refuse(self, update: UpdateWeights) -> str:
        self.send(update)
        return self.expect(WeightsRefused).what

    def wait_stats(self, since: int, condition: Callable[[EngineStats], bool]) -> EngineStats:
        """The first report from number ``since`` on that fulfils ``condition``; other messages stay queued."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := [report for report in self.stats[since:] if condition(report)]):
            self._hear(deadline)
        return found[0]

    def wait_phase(self, phase: str) -> None:
        """Until it reports that phase."""
        deadline = time.monotonic() + PATIENCE_S
        while phase not in self.doing.now:
            self._hear(deadline)

    def idle(self) -> EngineStats:
        """The report of an engine that has just fallen idle."""
        self.generate(turn("probe", [1], 1))
        # A report before the probe's answer may be of work that ended before the probe began.
        return self.wait_stats(self.reported, lambda report: report.running == report.waiting == 0)

    def start(self, *requests: Generate) -> EngineStats:
        """Send requests to an idle engine; returns the first report with tokens of theirs."""
        before = self.idle()
        since = len(self.stats)
        # Once the interval is over, a report is due at the first step.
        time.sleep(INTERVAL_S)
        self.send(*requests)
        return self.wait_stats(since, lambda report: report.generated_tokens > before.generated_tokens)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """End the process, hard if need be, and everything below it."""
        below = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in below:
            if alive(pid):
                os.kill(pid, 9)
        self._connection.close()


def assert_bit_for_bit(engine: EngineUnderTest, old: Model, new: Model, tmp_path: Path) -> None:
    """The weights of the folder's files were loaded by vLLM; they come back after others were staged in their place."""
    image, version = old.image(tmp_path), next(versions)
    applied = engine.apply(bring(image, version, text_tensors(new.weights)))
    assert (applied.version, applied.stage_s > 0) == (version, True)
    requests = [turn(f"n{i}", prompt, 8) for i, prompt in enumerate(PROMPTS)]
    for request, done in zip(requests, engine.generate(*requests), strict=True):
        context = list(memoryview(request.prompt).cast("i"))
        expected = new.logprobs(context + tokens_of(done), len(context))
        assert logprobs_of(done) == pytest.approx(expected, abs=1e-3)
    engine.apply(bring(image, next(versions), text_tensors(old.weights), base=version))
    assert engine.greedy() == engine.loaded
