"""The engine: vLLM's core, stepped in this thread; turns in, answers out, weights swapped between two steps.

vLLM's `InprocClient` is driven directly, below its text front end: prompts are token ids, and an aborted request must
return what it has. Short turns are also faster this way than with ``LLM.generate``.

A weight update does not drain. By default running requests go back into the queue, and all KV and prefix caches are
dropped. Each request is recomputed under the new weights before its next token. Every recorded log-probability is
therefore that of one model over the whole context, named by its version. With ``kv_after_update = "keep"`` they go on.

Steps may be scheduled ahead (`.vllm_steps`); then the one in flight ends before weights change.

One thread only: two threads silently corrupt vLLM's per-process state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor

from libra_hpc.gate.gated_steps import GatedSteps
from libra_hpc.models.architecture import predicts_ahead, read_shape
from libra_hpc.models.published import text_shapes
from libra_hpc.protocol.engine import Generate, Generated, UpdateWeights, WeightsApplied, refusal
from libra_hpc.protocol.engine_state import EngineCapacity, EngineReady, EngineStats
from libra_hpc.weights.weightfile import WeightFileError, folder_shapes

from .expert_table import ExpertTable
from .settings import EngineConfig, engine_arguments, replays
from .stats import EngineCounters
from .steplog import BatchWatch, StepLog, StepLogHeader
from .turns import TurnInFlight, TurnRejected, read_prompt, sampling
from .update.staged_update import POLL_S, StagedUpdate
from .vllm_steps import VllmSteps, waiting_executor
from .warm_up import profile

SLEEP_LEVEL = 2
"""vLLM sleep level that frees the weights too: at waking they are stale anyway."""

FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class DuplicateRequest(Exception):
    """A request id that is still in flight."""


class RolloutEngine:
    """One vLLM replica.

    ``on_failure`` is called, from another thread, when a worker process of a tp > 1 engine dies. Raises what vLLM
    raises when it cannot start, and `WeightFileError` when ``config.weights`` does not fit the model.  ``wait`` is
    called before each step of the start.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_failure: Callable[[], None] | None = None,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        started = time.monotonic()
        run, rollout = config.run, config.run.rollout
        shape, files = read_shape(Path(run.model.path)), folder_shapes(run.model.path)
        own = (text_shapes(files) if shape.wrapper else files).items()
        self._expected = {name: size for name, size in own if not predicts_ahead(name, shape.layers)}
        args = EngineArgs(**engine_arguments(config))
        vllm_config = args.create_engine_config()
        model = vllm_config.model_config
        # vLLM's own configuration calls them untied where the files have a head that equals the embedding.
        self._tied = shape.tied_embeddings
        self._vocab_size = model.get_vocab_size()
        self._client = InprocClient(
            vllm_config,
            waiting_executor(Executor.get_class(vllm_config), wait),
            log_stats=True,
            executor_fail_callback=on_failure,
        )
        scheduler = self._client.engine_core.scheduler
        assert isinstance(scheduler, Scheduler)
        self._scheduler = scheduler
        self._steps = VllmSteps(self._client, scheduler)
        # Where layers have states besides keys and values, vLLM makes blocks as large as a state.
        self._max_model_len, self._block_tokens = model.max_model_len, vllm_config.cache_config.block_size
        if replays(run, shape) and current_platform.is_cpu():
            ExpertTable(scheduler, self._client.collective_rpc, shape)
        self._staged = StagedUpdate(self._client.collective_rpc, not current_platform.is_cpu())
        self._turns: dict[str, TurnInFlight] = {}
        self._ids: dict[str, str] = {}
        self._serial = 0
        self._counters = EngineCounters()
        self._keeps = rollout.kv_after_update == "keep"
        self._refuses = ""
        self._unsettled = False
        self._version = config.version
        self._client.set_weight_version(str(config.version))
        if config.weights:
            self._staged.take(UpdateWeights(config.weights, config.version), self._expected, self._tied)
            while not self._staged.ready():
                time.sleep(POLL_S)
            self._set_version(self._staged.switch())
        self.capacity = EngineCapacity(
            tp=config.tp,
            max_model_len=self._max_model_len,
            kv_tokens=vllm_config.cache_config.kv_cache_size_tokens or 0,
        )
        self.start_s = time.monotonic() - started
        limits = vllm_config.scheduler_config
        self._gate = GatedSteps(config.gate, scheduler, BatchWatch(scheduler)) if config.gate else None
        self.step_log = (
            StepLog(
                config.step_log,
                StepLogHeader(
                    tp=config.tp,
                    kv_tokens=self.capacity.kv_tokens,
                    block_size=self._block_tokens,
                    max_num_seqs=rollout.slots,
                    max_num_batched_tokens=limits.max_num_batched_tokens,
                ),
                BatchWatch(scheduler),
            )
            if config.step_log
            else None
        )

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._turns) or self._unsettled or self._steps.in_flight

    @property
    def version(self) -> int:
        return self._version

    @property
    def stands_still(self) -> bool:
        """Whether its turns are wanted back: the users of its device leave no room for steps."""
        return self._gate is not None and self._gate.stands_still

    def may_step(self) -> bool:
        """Whether the users of its device leave room for a step now."""
        return self._gate is None or self._gate.may_step(self.busy)

    def warm_up(self, before_step: Callable[[RolloutEngine], None] = lambda _: None) -> EngineReady:
        """Measure the warm-up profile before any turn; returns the first message to the agent."""

        def step() -> list[Generated]:
            before_step(self)
            return self.step()

        started = time.monotonic()
        reports = profile(self.submit, step, self.stats, self._max_model_len)
        self.drain()
        if self.step_log is not None:
            self.step_log.skip()
        self._client.reset_prefix_cache(reset_connector=True)
        self._counters = EngineCounters()
        self.capacity = msgspec.structs.replace(self.capacity, warm_up=reports)
        self.start_s += time.monotonic() - started
        return EngineReady(version=self._version, seconds=self.start_s, capacity=self.capacity)

    def submit(self, request: Generate) -> Generated | None:
        """Accept a request (None), or answer it at once with finish reason ``error``.

        Raises `DuplicateRequest` when its id is in flight: its answer would pass for that of the first.
        """
        if request.rid in self._ids:
            raise DuplicateRequest(f"request {request.rid!r} is already in flight.")
        if self._refuses:
            return refusal(request.rid, self._refuses)
        try:
            prompt = read_prompt(request, self._max_model_len, self._vocab_size)
        except TurnRejected as error:
            return refusal(request.rid, str(error))
        salt = self._salt(request)
        # vLLM's workers drop an id one step after its end, so a re-submitted id must be new to them.
        key = f"{self._serial:x}"
        self._serial += 1
        self._client.add_request(
            EngineCoreRequest(
                request_id=key,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=sampling(request.temperature, request.max_tokens, request.stop_ids),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=salt,
                data_parallel_rank=None,
                priority=request.priority,
            )
        )
        self._turns[key] = turn = TurnInFlight(request.rid, time.monotonic(), request.routed)
        if salt is not None:
            turn.kv_version, turn.oldest_kv = self._version, int(salt)
        self._ids[request.rid] = key
        return None

    def abort(self, rid: str) -> Generated | None:
        """Stop a request and answer it with its tokens so far; None when it has been answered already."""
        key = self._ids.get(rid)
        if key is None:
            return None
        self._client.abort_requests([key])
        return self._finish(key, "abort")

    def step(self) -> list[Generated]:
        """Run one pass of vLLM's steps and return the requests it finished."""
        started = time.monotonic()
        finished = self._collect(self._steps.run())
        seconds = self._passed(started)
        if self._gate is not None:
            self._gate.stepped(seconds)
        return finished

    def drain(self) -> list[Generated]:
        """Wait for the step in flight, if steps are scheduled ahead; returns the requests it finished."""
        started = time.monotonic()
        finished = [done for outputs in self._steps.drain() for done in self._collect(outputs)]
        self._passed(started)
        return finished

    def _passed(self, started: float) -> float:
        seconds = time.monotonic() - started
        self._counters.busy_s += seconds
        self._counters.steps, self._steps.ended = self._counters.steps + self._steps.ended, 0
        return seconds

    def check(self, update: UpdateWeights) -> None:
        """See `StagedUpdate.take`."""
        self._staged.take(update, self._expected, self._tied)

    def staged(self) -> bool:
        """Whether the update that passed `check` can be applied; raises `WeightFileError` for one that cannot."""
        return self._staged.ready()

    def settled(self) -> bool:
        """Whether weights may be swapped: no KV cache is on its way from host memory, also of an aborted request.

        While one is, no waiting request starts, so a few steps settle it.
        """
        scheduler = self._scheduler
        aborted = len(scheduler.requests) - sum(scheduler.get_request_counts())
        self._unsettled = bool(scheduler.kv_holding_waiting) or aborted > 0
        state = PauseState.PAUSED_NEW if self._unsettled else PauseState.UNPAUSED
        if scheduler.pause_state is not state:
            scheduler.set_pause_state(state)
        return not self._unsettled

    def apply(self, update: UpdateWeights) -> WeightsApplied:
        """Switch to an update that is `staged`, between two steps, when `settled` and drained (`drain`).

        Raises `WeightFileError`, with the old weights in place, when the engine is asleep. Any other exception leaves
        the engine unusable.
        """
        if self._client.is_sleeping():
            self._staged.drop()
            raise WeightFileError(f"{update.path}: the engine is asleep; wake it first.")
        assert not self._steps.in_flight
        started = time.monotonic()
        recomputed = 0 if self._keeps else self._drop_caches()
        version = self._staged.switch()
        self._set_version(version)
        for key, turn in self._turns.items():
            if self._keeps and not self._scheduler.requests[key].num_computed_tokens:
                turn.kv_version = version
        self._refuses = ""
        seconds = time.monotonic() - started
        self._counters.busy_s += seconds
        self._counters.update_s += seconds
        return WeightsApplied(version, seconds, self._staged.seconds, recomputed)

    def sleep(self) -> list[Generated]:
        """Become a warm standby: abort all requests, free the device memory, refuse requests until woken."""
        ended = self.drain()
        ended += [self._finish(key, "abort") for key in list(self._turns)]
        if not self._client.is_sleeping():
            self._staged.weights_lost()
            self._client.sleep(SLEEP_LEVEL, "abort")
        self._refuses = "the engine is asleep."
        return ended

    def wake(self) -> None:
        """Leave standby; requests are refused until the next `apply`, since the weights are lost or stale."""
        if self._client.is_sleeping():
            self._client.wake_up()
            self._refuses = "the engine has woken and has no current weights yet."

    def fail(self, why: str) -> list[Generated]:
        """Answer every request in flight with finish reason ``error`` and its tokens so far."""
        return [self._finish(key, "error", why) for key in list(self._turns)]

    def stats(self) -> EngineStats:
        running, waiting = self._scheduler.get_request_counts()
        return EngineStats(
            version=self._version,
            running=running,
            waiting=waiting,
            kv_use=self._scheduler.kv_cache_manager.usage,
            asleep=self._client.is_sleeping(),
            paused_s=self._gate.paused_s if self._gate is not None else 0.0,
            stands_still=self.stands_still,
            pause=self._gate.pause if self._gate is not None else "",
            **msgspec.structs.asdict(self._counters),
        )

    def close(self) -> None:
        if self.step_log is not None:
            self.step_log.close()
        self._client.shutdown()

    def _collect(self, outputs: EngineCoreOutputs) -> list[Generated]:
        if outputs.weight_version is None:
            return []
        version, finished = int(outputs.weight_version), []
        for output in outputs.outputs:
            turn = self._turns.get(output.request_id)
            if turn is None:
                continue
            for event in output.events or ():
                if event.type == EngineCoreEventType.SCHEDULED:
                    turn.scheduled = min(turn.scheduled, event.timestamp)
                elif event.type == EngineCoreEventType.PREEMPTED:
                    self._counters.preemptions += not turn.recomputed
                    turn.recomputed = max(0, turn.recomputed - 1)
            if output.prefill_stats is not None:
                turn.cached_tokens = output.prefill_stats.num_cached_tokens
                turn.kv_version = turn.oldest_kv if turn.cached_tokens else turn.kv_version
                self._counters.prefill_tokens += output.prefill_stats.num_computed_tokens
                self._counters.cached_tokens += turn.cached_tokens
            if output.new_token_ids:
                assert output.new_logprobs is not None
                # Column 0 is the sampled token's.
                turn.extend(output.new_token_ids, output.new_logprobs.logprobs[:, 0].tolist(), version)
                turn.route(output.routed_experts)
                self._counters.generated_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                reason = FINISH.get(output.finish_reason, "error")
                error = f"vLLM ended the request with {output.finish_reason}." if reason == "error" else ""
                finished.append(self._finish(output.request_id, reason, error))
        return finished

    def _finish(self, key: str, reason: str, error: str = "") -> Generated:
        turn = self._turns.pop(key)
        del self._ids[turn.rid]
        return turn.finish(reason, time.monotonic(), error)

    def _salt(self, request: Generate) -> str | None:
        """Requests with one salt find each other's KV caches; none has those of weights older than its salt."""
        if not self._keeps:
            return None
        return str(self._version if request.admitted < 0 else min(request.admitted, self._version))

    def _drop_caches(self) -> int:
        """Drop all KV caches; returns the tokens of running requests to compute again."""
        recomputed = 0
        for request in self._scheduler.running:
            self._turns[request.request_id].recomputed += 1
            recomputed += request.num_computed_tokens
        # KV caches in host memory are of the old weights too.
        self._client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        return recomputed

    def _set_version(self, version: int) -> None:
        self._client.set_weight_version(str(version))
        self._version = version
