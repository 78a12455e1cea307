"""Experts of a node's samples, from the rollout leader to the processes that train them; no other node has them.

- A step or a portion comes -> it waits for the experts of what the node's own data-parallel ranks train.
- None came for `deadlines.floor_s` -> it goes on without the rest, whose tokens route by themselves, counted.
- The trainers get another order -> what waits is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.protocol.agents import ExpertsWanted, SampleExperts
from libra_hpc.protocol.codec import MAX_FRAME
from libra_hpc.protocol.trainer import Sample, TrainPortion, TrainStep
from libra_hpc.trainer.settings import WorkerConfig, sample_work
from libra_hpc.trainer.shards import spread

MOST_BYTES = MAX_FRAME // 2
"""Most experts in a message to the trainers; half of what a frame may have is left for all else."""


class ExpertPull:
    """``forward`` sends to the node's processes."""

    def __init__(self, context: AgentContext, forward: Callable[[TrainStep | TrainPortion], None]) -> None:
        self._context, self._forward, self._work = context, forward, sample_work(context.config)
        self._dp, self._ranks = 1, {0}
        self._held: deque[TrainStep | TrainPortion] = deque()
        self._wanted: set[str] = set()
        self._found: dict[str, bytes] = {}

    def of(self, workers: Sequence[WorkerConfig]) -> None:
        """Set the processes of the node."""
        world = workers[0].world
        self._dp, stride = world.dp, world.degrees.tp * world.degrees.cp
        self._ranks = {worker.rank // stride % world.dp for worker in workers}

    def drop(self) -> None:
        self._held.clear()

    def hold(self, message: TrainStep | TrainPortion) -> None:
        """Forward a message once its experts are here, after those before it."""
        self._held.append(message)
        if len(self._held) == 1:
            self._begin()

    def _begin(self) -> None:
        message, context = self._held[0], self._context
        parts = message.minibatches if isinstance(message, TrainStep) else (message.samples,)
        shards = [spread(part, self._dp, self._work) for part in parts if any(sample.routed for sample in part)]
        self._wanted = {one.uid for shard in shards for rank in self._ranks for one in shard[rank] if one.routed}
        self._found = {}
        if self._wanted:
            context.send(context.layout.rollout_leader, ExpertsWanted(context.rank, tuple(sorted(self._wanted))))
            self._watch(message, -1)
        else:
            self._release()

    def on_experts(self, message: SampleExperts) -> None:
        if self._held and message.sample in self._wanted:
            self._found[message.sample] = message.experts
            if len(self._found) == len(self._wanted):
                self._release()

    def _watch(self, message: TrainStep | TrainPortion, found: int) -> None:
        if not self._held or message is not self._held[0]:
            return
        if found == len(self._found):
            self._release()
        else:
            wait_s = self._context.config.deadlines.floor_s
            asyncio.get_running_loop().call_later(wait_s, self._watch, message, len(self._found))

    def _release(self) -> None:
        message, left = self._held.popleft(), MOST_BYTES

        def filled(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
            nonlocal left
            out = []
            for sample in samples:
                experts = self._found.get(sample.uid, b"")
                left -= len(experts)
                out.append(replace(sample, experts=experts if left >= 0 else b""))
            return tuple(out)

        if isinstance(message, TrainStep):
            self._forward(replace(message, minibatches=tuple(map(filled, message.minibatches))))
        else:
            self._forward(replace(message, samples=filled(message.samples)))
        if self._held:
            self._begin()
