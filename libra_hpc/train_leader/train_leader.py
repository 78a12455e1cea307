"""The train leader: forms membership generations, runs global batches, commits steps.

It runs in the agent of the first node of the core and holds no weights. One loop:

- At a step boundary -> the newest ordered generation is formed (`Join`).
- A batch is there -> it is sharded over the members; every member answers `StepDone`. Portions may go ahead of it.
- A step is committed -> its weights are offered and published, its prompts reported as trained.
- A checkpoint is due -> the core copies its state and trains on (`libra_hpc.train_leader.saves`), or a snapshot.
- The core is to rest and nothing is left to do -> its trainers go into standby, until the next generation.
- Something is to be done meanwhile -> the coordinator is asked for that generation (`TrainReport.core_wanted`).
- The coordinator is lost -> it is formed without being asked for, and the run is saved.
- A step failed and the core committed it -> it counts as committed; else it is done again on the same batch.
- The core was rebuilt from a snapshot -> the last `TrainLeader.retain` batches are replayed to the committed step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.process.lease import Fence
from libra_hpc.protocol.agents import (
    Batch,
    Committed,
    MemberJoined,
    MeshMessage,
    StepReport,
    ToReplica,
    TrainReport,
    WeightsOffered,
)
from libra_hpc.protocol.engine_state import Doing, ObservedEngine
from libra_hpc.protocol.layout import Layout
from libra_hpc.protocol.trainer import (
    FromWorker,
    Joined,
    Offered,
    OfferFailed,
    OfferWeights,
    PortionDone,
    Saved,
    SaveFailed,
    SaveStarted,
    SaveState,
    Standby,
    StepDone,
    StepFailed,
    Tier,
    WorkerFailed,
)
from libra_hpc.state.state_folders import DataOrder
from libra_hpc.trainer.shards import loss_tokens_of, tokens_of

from .publisher import RequestedOffers, WeightPublisher
from .saves import Saves, StateStore
from .step_metrics import offer_metrics, train_metrics
from .step_requests import StepRequests

LAST_RETRIES, LAST_PAUSE_S = 3, 3.0
"""Retries and pause in seconds of the last checkpoint of a run that was stopped: it has only seconds."""
MOST_RETAINED = 4
"""Times `TrainLeader.retain`, for which batches stay while no newer state is complete."""


class TrainLeader(StepRequests):
    """See the module docstring. The agent's message handler calls the ``on_*`` methods; `run` is the one task."""

    def __init__(
        self,
        config: RunConfig,
        core: tuple[int, ...],
        step: int,
        order: DataOrder,
        send: Callable[[int, MeshMessage], None],
        rollout_leader: int,
        receivers: Callable[[], tuple[int, ...]],
        stores: Sequence[StateStore],
        clock: Callable[[], float] = time.monotonic,
        *,
        rendezvous: Path,
        begins: Tier | None = None,
        fence: Fence | None = None,
    ) -> None:
        """``begins``: tier of the state with which the trainers begin; None: there is none."""
        super().__init__(config, core, send, clock, step=step, order=order, rendezvous=rendezvous)
        self._steps = config.run.steps
        self.report = TrainReport()
        self.changed: Callable[[], None] = lambda: None
        """Called where `report` has changed."""
        self._ends: dict[int, int] = {}
        """Ends of the trainers of each node."""
        every = {"checkpoint": config.checkpoint.every, "snapshot": config.train.snapshot_every}
        self._storage_s = config.deadlines.storage_s
        whole = config.run.engine == "simulated" or config.model.dtype == "float32"
        self._element_bytes = 4 if whole else 2
        self._tiers = {
            store.tier: Saves(
                core,
                step,
                every[store.tier],
                complete=store.tier == begins,
                store=store,
                storage_s=config.deadlines.storage_s,
                clock=clock,
                log=self._log,
                changed=self._saves_changed if store.tier == "checkpoint" else self._wake.set,
            )
            for store in stores
        }
        self._saves, self._snapshots = self._tiers["checkpoint"], self._tiers["snapshot"]
        self.retain = config.retained_batches
        self._rollout_leader, self._fence = rollout_leader, fence
        self.weights = WeightPublisher(core, lambda: self._with_joining(receivers()), send)
        self._stop_reason, self._start = "", step
        self._last_commit = clock()
        # The first weights are published too: an engine that wakes from standby needs them before the first step.
        self._offers = RequestedOffers(core, step - 1)
        self._reports: list[StepReport] = []
        """Committed steps whose records are not known to be durable; a checkpoint carries them."""
        self._offer_failure = ""
        self._rest_wanted = self._rests = False
        """Whether the trainers of the core are to go into standby, and whether they are there."""
        self._alone = False
        """Whether nobody orders generations any more."""

    # --- inputs ---

    def on_layout(self, layout: Layout) -> None:
        self._rest_wanted = layout.rest
        self._awaited = layout.awaited, layout.await_s
        if layout.stop is not None:
            self.on_stop(layout.stop.reason, layout.stop.after)
        # Records up to this step are durable.
        self._reports = [report for report in self._reports if report.step > layout.recorded]
        self.on_generation(layout.generation, layout.members)

    def on_batch(self, batch: Batch) -> None:
        if batch.step > self.step and batch.step not in self._batches:
            self._batches[batch.step] = batch
        self._wake.set()

    def on_reply(self, rank: int, message: FromWorker | WeightsOffered) -> None:
        """An answer of a node; answers to an older generation or attempt are ignored."""
        match message:
            case Doing():
                self._busy_at[rank] = self._clock()
            case Joined(generation=generation, attempt=attempt):
                if (generation, attempt) == (self.generation, self._joins):
                    self._replies[rank] = message
            case PortionDone():
                self._on_portion(rank, message)
            case StepDone() | StepFailed():
                self._on_step_answer(rank, message)
            case SaveStarted():
                self._saves.on_started(message)
            case Saved() | SaveFailed():
                self._tiers[message.tier].on_answer(rank, message)
            case WeightsOffered(offers=offers):
                self._on_offered(rank, offers)
            case OfferFailed() if rank in self._core:
                self._on_offer_failed(message)
            case WorkerFailed():
                self._on_worker_error(rank, message)
        self._wake.set()

    def _on_offered(self, rank: int, offers: tuple[Offered, ...]) -> None:
        published = self._offers.answered(rank, offers)
        if published is not None and not (self._fence and self._fence.taken):
            self.weights.publish(published)

    def _on_step_answer(self, rank: int, message: StepDone | StepFailed) -> None:
        # While its members join again, the step is given up.
        if message.generation != self.generation or self._joining:
            return
        self._replies[rank] = message
        if isinstance(message, StepFailed):
            self._failed = self._failed or f"replica {rank}: {message.error}"

    def _on_offer_failed(self, message: OfferFailed) -> None:
        if not self._offers.expects(message.version):
            # A newer version follows, or another node has failed as well.
            return
        self._log("offer_failed", step=message.version, reason=message.reason)
        now = self._clock()
        self._offers.lost(message.version)
        if self._offers.failed(now):
            what = f"the weights of step {message.version} could not be offered to the rollout engines"
            self._offer_failure = f"{what}: {message.reason}"
        else:
            asyncio.get_running_loop().call_later(self._offers.wait_s(now), self._wake.set)

    def _on_worker_error(self, rank: int, message: WorkerFailed) -> None:
        current = (message.generation, message.attempt) == (self.generation, self._joins)
        of_a_step = message.generation < 0 and (message.fatal or not self._joining)
        if (current or of_a_step) and (rank in self.members or rank in self._joining):
            self._failed = self._failed or f"replica {rank}: {message.what}"
            self._replies[rank] = message

    def on_engines(self, rank: int, observed: Mapping[str, ObservedEngine]) -> None:
        """Engines of a node as they are now: its trainers may have ended."""
        for engine in observed.values():
            if engine.kind == "train" and engine.ends > self._ends.get(rank, 0):
                self._ends[rank] = engine.ends
                self.on_replica_down(rank, engine.reason)

    def on_replica_down(self, rank: int, reason: str) -> None:
        super().on_replica_down(rank, reason)
        if rank in self._core:
            for saves in self._tiers.values():
                saves.core_lost(reason)
            self._offers.core_lost()
            self._rest_wanted = self._rests = False

    def on_stop(self, reason: str, after: int = 0) -> None:
        """Save and finish at the next step boundary, or with ``after`` once that step is committed."""
        if after > self.step:
            self._steps = min(self._steps, after)
        else:
            self._stop_reason = reason
        self._wake.set()

    def on_coordinator_lost(self) -> None:
        self._alone = True
        self.on_stop("the coordinator was lost")

    @property
    def unsaved(self) -> bool:
        """Whether steps were trained that neither the state of the start nor a checkpoint has."""
        return self.step > self._start and not self._saves.has(self.step)

    # --- the loop ---

    async def run(self) -> None:
        """Train to the last step and save it. Then nodes may still roll out an evaluation; returns once stopped."""
        while self.step < self._steps and not self._stop_reason:
            if not await self._membership():
                return
            if self._state_step < self.step:
                await self._replay()
                continue
            self._offer()
            if self._save_now():
                self._ask_to_save()
            if self._snapshots.possible() and not self._saves.writing:
                self._to_core(self._snapshots.ask(self.step, self.order, self._reports))
            self._stream()
            if self._rest_due():
                self._rest()
                continue
            waiting = self._clock()
            await self._until(self._batch_or_change)
            if self._offer_failure:
                self._fail(self._offer_failure)
                return
            if self._membership_due() or self.step + 1 not in self._batches:
                continue
            self._offer()
            if not await self._all_here(self.step + 1, self._change):
                continue
            if not await self._train(self._batches[self.step + 1], self._clock() - waiting):
                return
        if await self._save_last():
            self._report(done=self.step)
            await self._after_training()

    async def _after_training(self) -> None:
        """Let the nodes go that roll out an evaluation of the last step."""
        while not self._stop_reason and await self._membership():
            await self._until(lambda: self._membership_due() or self._rest_wanted or bool(self._stop_reason))
            if self._rest_wanted and not self._membership_due():
                self._rest()

    def _batch_or_change(self) -> bool:
        return self.step + 1 in self._batches or self._change()

    def _change(self) -> bool:
        changed = self._membership_due() or bool(self._stop_reason or self._offer_failure)
        return changed or self._offer_due() or self._save_now() or self._rest_due()

    def _rest_due(self) -> bool:
        """Whether the core is to rest, and has nothing to do."""
        here = self._rest_wanted and not self._membership_due() and self._state_step == self.step
        saves, snapshots = self._saves, self._snapshots
        stores = saves.writing or saves.possible() or snapshots.taking or snapshots.possible()
        # Portions that went ahead are trained again: perhaps nothing rolls out the rest of their batch meanwhile.
        return here and not stores and self.step + 1 not in self._batches and self._offers.written(self.step)

    def _rest(self) -> None:
        self._rest_wanted, self._rests = False, True
        # The core forms the next generation when it is back.
        self._broken = True
        self._to_core(Standby())

    async def _order_or_retry(self) -> bool:
        while self._rests and not self._ordered_newer():
            await self._until(lambda: self._ordered_newer() or self._core_wanted())
            if self._alone and not self._ordered_newer():
                self.on_generation(max(self.generation, self._ordered[0]) + 1, self._core)
            if not self._ordered_newer():
                self._report(core_wanted=True)
                await self._until(self._ordered_newer)
                self._report(core_wanted=False)
        self._rests = False
        return await super()._order_or_retry()

    def _core_wanted(self) -> bool:
        now = self._clock()
        due = self._offers.due(self.step, now) or self._saves.possible()
        return due or not self._rests or bool(self._stop_reason) or self.step + 1 in self._batches

    async def _membership(self) -> bool:
        """Form the newest ordered generation; False when the run cannot go on."""
        while self._membership_due():
            if not await self._order_or_retry():
                return self._fail(f"training failed and no node died: {self._failed}")
            started = self._clock()
            self.generation, ordered = self._ordered
            wanted = (*self._core, *(rank for rank in ordered if rank not in self._core))
            if not await self._join(wanted):
                continue
            self._offers.ask_again()
            # Members that join have no portions.
            self._ahead, self._unanswered = [], set()
            self.members, self._broken = wanted, False
            self._state_step = self._replies[self._core[0]].step
            self._report(joined=self._joined(wanted, self._clock() - started))
            if self._state_step == self.step + 1 and self._state_step in self._batches:
                self._commit(self._batches[self._state_step], [], 0.0, 0.0)
            elif not (
                self._state_step == self.step
                or all(s in self._batches for s in range(self._state_step + 1, self.step + 1))
            ):
                newest = max(self._snapshots.saved_step, self._saves.saved_step)
                where = f"the trainers hold step {self._state_step}, the run is at step {self.step}"
                return self._fail(f"{where}, and the batches between are gone", restart=newest > 0)
        return True

    def _joined(self, members: tuple[int, ...], seconds: float) -> tuple[MemberJoined, ...]:
        answers: dict[int, Joined] = {rank: self._replies[rank] for rank in members}
        return tuple(
            MemberJoined(rank, self.generation, one.step, one.received_bytes, seconds, one.source)
            for rank, one in answers.items()
        )

    async def _replay(self) -> None:
        """Train a committed batch again on a state that is behind."""
        if await self._ask(self._batches[self._state_step + 1]):
            self._state_step += 1

    async def _train(self, batch: Batch, waited_s: float) -> bool:
        """Run and commit one step, or leave it to the next generation; False when the run cannot go on."""
        if not any(loss_tokens_of(sample) for group in batch.groups for sample in group.samples):
            return self._fail(f"the batch of step {batch.step} has no token to train on")
        started = self._clock()
        if not await self._ask(batch):
            return True
        self._state_step = batch.step
        answers = [self._replies[world[0]] for world in self._worlds(self.members)]
        self._commit(batch, answers, waited_s, self._clock() - started)
        return self._fail(self.hopeless) if self.hopeless else True

    def _commit(self, batch: Batch, replies: list[StepDone], waited_s: float, wall_s: float) -> None:
        self.step = batch.step
        for saves in self._tiers.values():
            saves.committed(self.step)
        indices = (*(group.index for group in batch.groups), *batch.given_up)
        self.order.trained(indices)
        # A snapshot waits while a checkpoint is written.
        newest = max(self._snapshots.saved_step, self._saves.saved_step)
        oldest = max(min(self.step - self.retain, newest), self.step - MOST_RETAINED * self.retain)
        self._batches = {step: kept for step, kept in self._batches.items() if step > oldest}
        self._cuts = {step: cut for step, cut in self._cuts.items() if step > oldest}
        self._ended = {}
        gaps = replies[0].engine_gaps if replies else {}
        self._send(self._rollout_leader, Committed(self.step, indices, gaps))
        now = self._clock()
        tokens = sum(tokens_of(sample) for group in batch.groups for sample in group.samples)
        # Without replies, the step was found committed in a member that joined.
        trained = train_metrics(replies, tokens, wall_s) if replies else {}
        metrics: dict[str, float] = {
            **batch.stats,
            "generation": self.generation,
            "train_nodes": len(self.members),
            "replicas": self.replicas,
            "wait_s": max(0.0, waited_s - trained.get("train_ahead_s", 0.0)),
            "tokens": tokens,
            "step_s": now - self._last_commit,
            "version": self.step,
            **trained,
            **offer_metrics(self._offers.offers, self.step - 1, self._element_bytes),
        }
        if replies:
            self._note_skipped(batch.step, replies[0])
        self._last_commit = now
        self._reports.append(
            StepReport(self.step, {name: float(value) for name, value in metrics.items()}, time.time())
        )
        self._send(0, self._reports[-1])
        self._offer()

    def _offer(self) -> None:
        """Have the newest weights offered and published, once; only at a step boundary, where the core has them."""
        if self._offer_due() and self._offers.ask(self.step, self._clock()):
            self._to_core(OfferWeights("", self.step, self._offers.base))

    @property
    def arriving(self) -> int:
        return self.step if self._offers.asked(self.step) else -1

    def _with_joining(self, receivers: tuple[int, ...]) -> tuple[int, ...]:
        """A node that joins takes its weights from its image."""
        return (*receivers, *(rank for rank in self._joining if rank not in (*receivers, *self.members)))

    def _offer_due(self) -> bool:
        here = not self._broken and self._state_step == self.step
        return here and self._offers.due(self.step, self._clock())

    def _to_core(self, message: OfferWeights | SaveState | Standby) -> None:
        for rank in self._core:
            self._send(rank, ToReplica(message))

    def _save_now(self) -> bool:
        """Whether to ask for a checkpoint; the core has one copy of its state in host memory at a time."""
        return self._saves.possible() and not self._snapshots.taking

    def _ask_to_save(self) -> None:
        self._to_core(self._saves.ask(self.step, self.order, self._reports))
        self._report(saving=True)

    def _saves_changed(self) -> None:
        self._wake.set()
        self._report(saving=self._saves.writing, save_s=self._saves.save_s)

    def _report(self, **changes: Any) -> None:
        self.report = msgspec.structs.replace(self.report, **changes)
        self.changed()

    async def _save(self) -> str | None:
        """Save this step, again when the core dies and is rebuilt; "" saved, None the run cannot go on, else why not.

        A checkpoint that is being written ends first.
        """
        asked = False
        while not self._saves.has(self.step):
            # The policy of a checkpoint comes from the version that is published.
            self._offer()
            if self._offer_failure:
                self._fail(self._offer_failure)
                return None
            if self._saves.writing:
                await self._until(lambda: not self._saves.writing or self._offer_due() or bool(self._offer_failure))
            elif self._membership_due():
                asked = False
                if not await self._membership():
                    return None
            elif self._state_step < self.step:
                await self._replay()
            elif asked:
                return self._saves.failure
            else:
                self._ask_to_save()
                asked = True
        return ""

    async def _save_last(self) -> bool:
        """Save at the end of the run; False when that fails.

        A stopped run has seconds; a finished one waits up to ``storage_s`` for room.
        """
        began, left = self._clock(), LAST_RETRIES
        while reason := await self._save():
            if not self._stop_reason and self._clock() - began < self._storage_s:
                await self._until(lambda: bool(self._stop_reason), self._saves.retry.wait_s(self._clock()))
            elif self._stop_reason and left:
                left -= 1
                await asyncio.sleep(LAST_PAUSE_S)
            else:
                return self._fail(f"the last step could not be saved: {reason}")
        return reason is not None
