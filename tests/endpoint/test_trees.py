"""Samples of an episode grow side by side: their turns run together, and each token is trained once, where it was
sampled, whatever engine or environment host is lost meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import pytest

from libra_hpc.endpoint.agent_task import AgentEnvironment
from libra_hpc.host.host import Host
from libra_hpc.protocol.codec import FrameBuffer, unpack_i32
from libra_hpc.protocol.engine import Generate
from libra_hpc.protocol.env import HostLost, from_host
from libra_hpc.rollout.recovery.recovery_log import records
from libra_hpc.rollout.trajectory import Trajectory
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.rollout.plant import Plant

from .played import AGENTS, call, play, task_for

ONE = f"{AGENTS}:one"
TREES = AGENTS.with_name("tree_agents.py")


def task_of(tokenizer: TaskTokenizer, folder: Path, agent: str, **row: Any) -> AgentEnvironment:
    given = {"env": {"sandbox": "none"}, "context": 1000}
    return task_for(tokenizer, folder, {"prompt": "x", **row}, reward=ONE, given=given, agent=f"{TREES}:{agent}")


async def test_requests_of_one_episode_have_their_turns_at_the_same_time(
    tokenizer: TaskTokenizer, tmp_path: Path
) -> None:
    seconds = list[float]()
    for requests in (1, 1, 4, 4, 4):
        began = time.perf_counter()
        played = await play(
            task_of(tokenizer, tmp_path, "at_once", requests=requests), lambda context: "yes", delay_s=0.5
        )
        seconds.append(time.perf_counter() - began)
        assert (played.end.info["agent_failed"], played.end.info["turns"], played.samples) == (0, requests, requests)
        assert len(played.trajectory.samples_for_training(1.0)) == requests
    assert played.end.info["new_parallel"] == 3
    assert min(seconds[2:]) < 1.2 * seconds[1], "other work of the machine may cost one of three"


async def test_two_sub_agents_by_turns_are_two_samples_however_they_keep_their_history(
    tokenizer: TaskTokenizer, tmp_path: Path
) -> None:
    said = f"<think>\nhm\n</think>\n\nI look.\n{call('look')}"
    played = await play(task_of(tokenizer, tmp_path, "interleaved"), lambda context: said)
    assert (played.end.info["agent_failed"], played.end.info["turns"], played.samples) == (0, 8, 2)
    own = len(tokenizer.encode(said)) + 1
    assert [sum(one.loss_mask) for one in played.trajectory.samples_for_training(1.0)] == [4 * own] * 2


class Wire(asyncio.WriteTransport):
    """From a host to the leader of a plant."""

    def __init__(self, plant: Grove) -> None:
        super().__init__()
        self.plant, self.frames, self.dead = plant, FrameBuffer(), False

    def write(self, data: Any) -> None:
        for body in self.frames.feed(data):
            message: Any = from_host.decode(body)
            if not self.dead:
                self.plant.leader.on_host(0, message)


class Grove(Plant):
    """A plant with a real host of a task, whose engines say random words and keep what was sampled behind what."""

    def __init__(self, make: Any, tokenizer: TaskTokenizer, draw: random.Random, **options: Any) -> None:
        self.make, self.tokenizer, self.draw = make, tokenizer, draw
        self.sampled = Counter[tuple[bytes, int]]()
        self.turns_said = self.lost = 0
        super().__init__(**options)
        self.begin_host()

    def begin_host(self) -> None:
        self.task: AgentEnvironment = self.make()
        self.wire, self.served = Wire(self), Host("tree", self.task, cast(Any, None))
        asyncio.get_running_loop().call_soon(self.served.connection_made, self.wire)

    def host_up(self, step_timeout_s: float | None = None, host: int = 0) -> None:
        """It says so itself."""

    def to_host(self, host: int, message: Any) -> None:
        asyncio.get_running_loop().call_soon(self.served._handle, message)

    async def lose_host(self) -> None:
        self.wire.dead = True
        self.served.connection_lost(None)
        await self.served.left()
        await self.task.endpoint.stop()
        self.begin_host()
        self.leader.on_host(0, HostLost("killed"))

    def generate(self, engine: str, request: Generate) -> None:
        words = " ".join(self.draw.choice(["yes", "no", "look", "then"]) for _ in range(self.draw.randrange(1, 5)))
        tokens = [*self.tokenizer.encode(words), request.stop_ids[-1]]
        self.turns_said += 1
        whole = self.draw.random() < 0.8
        tokens = tokens if whole else tokens[: self.draw.randrange(len(tokens))]
        context = unpack_i32(request.prompt)
        for at, token in enumerate(tokens):
            self.sampled[place_of([*context, *tokens[:at]]), token] += 1
        self.answer(engine, request, tokens, "stop" if whole else "abort")

    async def sow(self, losses: int) -> None:
        """Play until there is a batch, and lose engines and hosts on the way."""
        while not self.batches:
            await asyncio.sleep(0.001)
            self.leader.report()
            self.draw.shuffle(self.inbox)
            for engine, request in self.inbox[: self.draw.randrange(4)]:
                self.generate(engine, request)
            if self.lost < losses and self.turns_said > 2 * self.lost:
                self.lost += 1
                if self.draw.random() < 0.5:
                    await self.lose_host()
                else:
                    self.down("e0")
                    self.up("e0", self.engines["e0"][0])


def place_of(context: list[int]) -> bytes:
    return blake2b(array("i", context).tobytes(), digest_size=12).digest()


@pytest.mark.parametrize("trees", [24, pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(36000)])])
async def test_each_token_of_random_trees_is_trained_once_where_it_was_sampled(
    tokenizer: TaskTokenizer, tmp_path: Path, trees: int
) -> None:
    """Half of the runs lose an engine or an environment host, or several."""
    samples, lost, said = 0, 0, tmp_path / "said"
    for seed in range(trees // 2):
        draw = random.Random(seed)

        def make(seed: int = seed) -> AgentEnvironment:
            row, given = {"prompt": "x", "seed": seed, "said": str(said)}, {"env": {"sandbox": "none"}, "context": 1000}
            task = task_for(tokenizer, tmp_path, row, reward=f"{TREES}:length", given=given, agent=f"{TREES}:tree")
            return task

        said.write_text("")
        grove = Grove(make, tokenizer, draw, prompts=1, group=2, steps=1)
        grove.start()
        await grove.sow(seed % 2 * draw.randrange(1, 4))
        lost += grove.lost
        (batch,) = grove.batches
        trained = Counter[str]()
        for sample in batch.groups[0].samples:
            tokens = unpack_i32(sample.tokens)
            for at, own in enumerate(sample.loss_mask):
                if own:
                    grove.sampled[place_of(tokens[:at]), tokens[at]] -= 1
            trained.update(turns_of(tokenizer, tokens, sample.loss_mask))
            samples += 1
        assert min(grove.sampled.values()) >= 0, "nothing is trained that was not sampled there, or twice"
        read = Counter(text for one in grove.ended for text in read_by(one, tokenizer))
        assert trained == read, "all that the agents of the finished episodes read is trained"
        for one in grove.ended:
            assert records.decode(records.encode(one)).sound
            assert json.dumps(sorted(read_by(one, tokenizer))) in said.read_text().splitlines(), (
                "an agent has read just that"
            )
        await grove.lose_host()
        grove.served.connection_lost(None)
    assert samples > 3 * trees / 2
    assert lost >= trees // 4


def turns_of(tokenizer: TaskTokenizer, tokens: list[int], mask: bytes) -> list[str]:
    """The texts of a sample's turns."""
    own = "".join(tokenizer.decode([one]) if mine else "\0" for one, mine in zip(tokens, mask, strict=True))
    return [one.removesuffix("<|im_end|>") for one in own.split("\0") if one]


def read_by(one: Trajectory, tokenizer: TaskTokenizer) -> list[str]:
    return turns_of(tokenizer, unpack_i32(one.tokens), one.mask)
