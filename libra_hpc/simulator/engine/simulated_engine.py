"""One simulated vLLM replica: continuous batching, chunked prefill, KV blocks, priorities, preemption, weight updates.

* `engine_batch` chooses the requests of a step; `StepTimes` gives its seconds.
* A request whose whole context is computed gets one token at the end of the step.
* Several prefill chunks n_i in one step are priced as one chunk of n = sum of n_i.  Its context preserves the number
  of attended pairs: (sum of n_i * (context_i + n_i / 2)) / n - n / 2.
* Time is an argument.  The caller must call `advance` at `next_at`, the next step boundary that matters (`stretch`).
"""

from __future__ import annotations

import math

from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.protocol.engine_state import EngineStats
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.simulator.stretch import Stretch
from libra_hpc.simulator.timeline import Timeline

from .cache import BlockCache
from .engine_batch import SimulatedBatch
from .simulated_request import Counters, SimulatedRequest

IDLE = math.inf


class Engine:
    """One replica; ``number`` orders engines whose steps end at the same moment."""

    def __init__(
        self, name: str, tp: int, steps: StepTimes, settings: SimulationSettings, number: int, version: int, now: float
    ) -> None:
        self.name, self.tp, self.number, self.version = name, tp, number, version
        self.up_at = now
        self.counters = Counters()
        self.timeline = Timeline()
        self.next_at = IDLE
        """Time at which to call `advance`."""
        self._step_s = steps.step_s
        self._limits = settings
        self._block = settings.block_size
        self._cache = BlockCache(steps.kv_capacity // settings.block_size)
        self._batch = SimulatedBatch(self._cache, settings, self.counters)
        self._aborted: list[SimulatedRequest] = []
        self._arrived: list[SimulatedRequest] = []
        self._swap: tuple[int, float] | None = None
        self._pausing: int | None = None
        self._pause_at = now
        self._stretch = Stretch()
        self._report_at = -math.inf
        self._worked = self._due = False

    @property
    def requests(self) -> int:
        return len(self._batch.running) + self._batch.waiting + len(self._arrived)

    @property
    def blocks(self) -> int:
        return self._cache.total

    def submit(self, request: SimulatedRequest, now: float) -> None:
        """Add a request; it takes part from the next step boundary on, or the one after (`SimulationSettings`)."""
        if self._limits.async_steps and self._stretch.steps:
            self._arrived.append(request)
        else:
            self._batch.add(request)
        if self._batch.open:
            self._interrupt(now)

    def abort(self, request: SimulatedRequest, now: float) -> None:
        request.aborted = True
        self._aborted.append(request)
        self._interrupt(now)

    def swap(self, version: int, seconds: float, now: float) -> None:
        """Update the weights at the next step boundary, in ``seconds``; replaces an update that has not begun."""
        self._swap = (version, seconds)
        self._interrupt(now)

    def advance(self, now: float) -> list[SimulatedRequest]:
        """End what is due at `next_at` and start the next step; returns the requests that ended."""
        done = self._settle(now) if self._stretch.steps else []
        if self._pausing is not None:
            self._end_pause(now)
        if self._aborted:
            done += self._remove_aborted(now)
        self._due = self._worked and now >= self._report_at
        if self._due:
            self._report_at = now + self._limits.report_s
        if self._swap is not None:
            self._begin_pause(now)
        else:
            self._form(now)
        if self.next_at == IDLE:
            self._due = self._worked
        self._worked = self._worked and not self._due
        return done

    def _form(self, now: float) -> None:
        """Begin the next step.  Without others, what arrived takes part at once."""
        arrived, self._arrived = self._arrived, []
        late = arrived if self.requests else []
        for request in [] if late else arrived:
            self._batch.add(request)
        self._run(now, self._batch.form())
        for request in late:
            self._batch.add(request)
        if late:
            self._interrupt(now)

    def report(self, now: float) -> EngineStats | None:
        """Load and totals if a report is due: every `SimulationSettings.report_s`, and when it becomes idle."""
        if not self._due:
            return None
        self._due = False
        return self.snapshot()

    def snapshot(self) -> EngineStats:
        cache, counters = self._cache, self.counters
        return EngineStats(
            version=self.version,
            running=len(self._batch.running),
            waiting=self._batch.waiting + len(self._arrived),
            kv_use=cache.held / cache.total,
            generated_tokens=counters.generated,
            prefill_tokens=counters.first_prefill,
            cached_tokens=counters.first_cached,
            preemptions=counters.preemptions + counters.recomputed,
            steps=counters.steps,
            busy_s=counters.busy_s,
            update_s=counters.paused_s,
        )

    def _interrupt(self, now: float) -> None:
        if self.next_at == IDLE:
            self.next_at = now
        elif self._stretch.steps > 1:
            self._stretch.cut(now)
            self.next_at = self._stretch.end

    def _settle(self, now: float) -> list[SimulatedRequest]:
        """The stretch ended: give its tokens to the requests; returns those that ended."""
        start, steps, running, block, counters = (
            self._stretch.start,
            self._stretch.steps,
            self._batch.running,
            self._block,
            self.counters,
        )
        self._stretch.steps = 0
        counters.steps += steps
        counters.busy_s += now - start
        self.timeline.add(start, now, len(running))
        self._worked = True
        generated = extra = 0
        ended = False
        for request in running:
            if request.decoding:
                if not request.step:
                    continue
                request.computed = computed = request.computed + steps
                request.tokens += steps
                request.generated += steps
                request.left -= steps
                generated += steps
                missing = -(-computed // block) - request.blocks
                if missing > 0:
                    request.blocks += missing
                    request.own += missing
                    extra += missing
            elif request.step:
                generated += self._prefilled(request)
            if not request.left:
                ended = True
        counters.generated += generated
        if extra:
            self._cache.take(extra)
        if not ended:
            return []
        done = [request for request in running if not request.left]
        self._batch.running = [request for request in running if request.left]
        for request in done:
            self._batch.release(request)
        return done

    def _prefilled(self, request: SimulatedRequest) -> int:
        """A chunk of a request is computed; returns the tokens sampled (0 or 1)."""
        counters = self.counters
        again = min(request.computed + request.step, request.high) - request.computed
        if again > 0:
            counters.again[request.again] = counters.again.get(request.again, 0) + again
        counters.prefilled += request.step
        request.computed += request.step
        if request.computed < request.tokens:
            return 0
        if not request.counted:
            request.counted = True
            counters.first_prefill += request.tokens - request.cached
            counters.first_cached += request.cached
        request.decoding = True
        request.tokens += 1
        request.generated += 1
        request.left -= 1
        return 1

    # --- steps

    def _run(self, now: float, preempted: bool) -> None:
        running = self._batch.running
        decodes = kv_tokens = prefill = pairs = 0
        left = self._limits.max_stretch
        for request in running:
            if request.decoding:
                if request.step:
                    decodes += 1
                    kv_tokens += request.tokens
                    if request.left < left:
                        left = request.left
            elif request.step:
                prefill += request.step
                pairs += request.step * (2 * request.computed + request.step)
        if not decodes and not prefill:
            self.next_at = IDLE
            return
        stretch = self._stretch
        if prefill:
            context = max(0, round((pairs / prefill - prefill) / 2.0))
            stretch.begin(now, self._step_s(decodes, kv_tokens, prefill, context))
        else:
            stretch.begin(now, self._step_s(decodes, kv_tokens))
            # After a preemption, which admits nothing, the next step may admit again.
            if left > 1 and decodes == len(running) and not preempted:
                self._extend(left, kv_tokens)
        self.next_at = stretch.end

    def _extend(self, steps: int, kv_tokens: int) -> None:
        decodes, stretch = len(self._batch.running), self._stretch
        # Steps only get longer, so at most this many end before the next report is due.
        steps = min(steps, max(1, math.ceil((self._report_at - stretch.start) / stretch.first)))
        if decodes * -(-(steps - 1) // self._block) > self._cache.available:
            steps = self._affordable(steps)
        if steps > 1:
            stretch.extend(steps, self._step_s(decodes, kv_tokens + decodes * (steps - 1)))
            stretch.cut(self._report_at)

    def _affordable(self, steps: int) -> int:
        """The most steps up to ``steps`` for which there are blocks; the first one has its blocks already."""
        block, room = self._block, self._cache.available
        low, high = 1, steps
        while low < high:
            middle = (low + high + 1) // 2
            need = sum(-(-(request.computed + middle) // block) - request.blocks for request in self._batch.running)
            if need <= room:
                low = middle
            else:
                high = middle - 1
        return low

    # --- between steps

    def _remove_aborted(self, now: float) -> list[SimulatedRequest]:
        gone = [request for request in self._aborted if request.left]
        self._aborted = []
        for request in gone:
            if request in self._arrived:
                self._arrived.remove(request)
            else:
                self._batch.remove(request)
        return gone

    def _begin_pause(self, now: float) -> None:
        assert self._swap is not None
        self._pausing, seconds = self._swap
        self._swap = None
        if not self._limits.keep_kv:
            self.counters.recomputed += self._batch.put_all_back("swap")
            self._cache.clear()
        self._pause_at = now
        self.next_at = now + seconds

    def _end_pause(self, now: float) -> None:
        assert self._pausing is not None
        self.version, self._pausing = self._pausing, None
        seconds = now - self._pause_at
        self.counters.busy_s += seconds
        self.counters.paused_s += seconds
        self.timeline.add(self._pause_at, now, 0.0)
        self._worked = True
