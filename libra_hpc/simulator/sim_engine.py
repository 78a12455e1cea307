"""One simulated vLLM replica: continuous batching, chunked prefill, KV blocks, priorities, preemption, weight updates.

Who takes part in a step is `engine_batch`'s business.  The step lasts what `StepTimes` says of its decodes and prefill
chunks; a request whose context is computed completely gets one token at its end.

Chunks of several requests in one step are given to `StepTimes` as one chunk after a context chosen so that the number
of attended pairs is kept: (sum of n_i * (context_i + n_i / 2)) / n - n / 2, with n their sum.

Time is an argument.  The engine says in `next_at` when it wants `advance` to be called: at the next boundary between
two steps that matters (see `stretch`).
"""

from __future__ import annotations

import math

from libra_hpc.hardware.steps import StepTimes
from libra_hpc.protocol.rollout import EngineStats

from .cache import BlockCache
from .engine_batch import SimulatedBatch
from .settings import SimSettings
from .sim_request import Counters, SimRequest
from .stretch import Stretch
from .timeline import Timeline

IDLE = math.inf


class Engine:
    """See the module; ``number`` orders engines that act at the same moment."""

    def __init__(
        self, name: str, tp: int, steps: StepTimes, settings: SimSettings, number: int, version: int, now: float
    ) -> None:
        self.name, self.tp, self.number, self.version = name, tp, number, version
        self.up_at = now
        self.counters = Counters()
        self.timeline = Timeline()
        self.next_at = IDLE
        """When to call `advance`."""
        self._step_s = steps.step_s
        self._limits = settings
        self._block = settings.block_size
        self._cache = BlockCache(steps.kv_capacity // settings.block_size)
        self._batch = SimulatedBatch(self._cache, settings, self.counters)
        self._aborted: list[SimRequest] = []
        self._stale: list[tuple[str, bool]] = []
        """Trajectories whose cache changes at the next boundary, and whether it is dropped."""
        self._swap: tuple[int, float] | None = None
        self._pausing: int | None = None
        self._pause_at = now
        self._stretch = Stretch()
        self._report_at = -math.inf
        self._worked = self._due = False

    @property
    def blocks(self) -> int:
        """KV blocks in all."""
        return self._cache.total

    @property
    def busy(self) -> bool:
        """Whether it has requests."""
        return bool(self._batch.running or self._batch.waiting)

    def submit(self, request: SimRequest, now: float) -> None:
        """A request arrives; it takes part in the first step that starts from now on."""
        self._batch.add(request)
        if self._batch.open:
            self._interrupt(now)

    def abort(self, request: SimRequest, now: float) -> None:
        """End a request at the next boundary; `advance` returns it there."""
        request.aborted = True
        self._aborted.append(request)
        self._interrupt(now)

    def swap(self, version: int, seconds: float, now: float) -> None:
        """Update the weights at the next boundary, which takes ``seconds``; a newer update replaces one that has not
        begun."""
        self._swap = (version, seconds)
        self._interrupt(now)

    def drop(self, trajectory: str, now: float) -> None:
        """A trajectory starts anew with other tokens: what is cached of it is of no use from the next boundary on."""
        self._at_boundary(trajectory, True, now)

    def ended(self, trajectory: str, now: float) -> None:
        """A trajectory is complete: from the next boundary on its KV is kept no longer."""
        self._at_boundary(trajectory, False, now)

    def _at_boundary(self, trajectory: str, dropped: bool, now: float) -> None:
        # Steps that have begun take their blocks before; which ones must not hang on how many steps one event stands
        # for.
        if self._cache.holds(trajectory, dropped):
            self._stale.append((trajectory, dropped))
            if self._stretch.steps:
                self._interrupt(now)
            else:
                self._refresh(now)

    def _refresh(self, now: float) -> None:
        for trajectory, dropped in self._stale:
            if dropped:
                self._cache.drop(trajectory)
            else:
                self._cache.unkeep(trajectory, now)
        self._stale.clear()

    def advance(self, now: float) -> list[SimRequest]:
        """Do what is due at `next_at`; returns the requests that ended now."""
        done = self._settle(now) if self._stretch.steps else []
        if self._stale:
            self._refresh(now)
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
            self._run(now, self._batch.form(now))
        if self.next_at == IDLE:
            self._due = self._worked
        self._worked = self._worked and not self._due
        return done

    def report(self, now: float) -> EngineStats | None:
        """The counters, if the last `advance` made a report due: at a boundary every `SimSettings.report_s`, and
        when it fell idle."""
        if not self._due:
            return None
        self._due = False
        return self.snapshot(now)

    def snapshot(self, now: float) -> EngineStats:
        """The counters at any time."""
        cache, counters = self._cache, self.counters
        cache.expire(now)
        return EngineStats(
            self.version,
            len(self._batch.running),
            self._batch.waiting,
            cache.held / cache.total,
            counters.generated,
            counters.first_prefill,
            counters.first_cached,
            counters.preemptions + counters.recomputed,
            counters.steps,
            counters.busy_s,
            cache.kept / cache.total,
            counters.paused_s,
        )

    def _interrupt(self, now: float) -> None:
        if self.next_at == IDLE:
            self.next_at = now
        elif self._stretch.steps > 1:
            self._stretch.cut(now)
            self.next_at = self._stretch.end

    def _settle(self, now: float) -> list[SimRequest]:
        """The stretch under way ended: hand out its tokens."""
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
            self._batch.release(request, now, request.keep_s)
        return done

    def _prefilled(self, request: SimRequest) -> int:
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
    # ----------------------------------------------------------------------------------------------

    def _run(self, now: float, preempted: bool) -> None:
        running = self._batch.running
        decodes = held = prefill = pairs = 0
        left = self._limits.max_stretch
        for request in running:
            if request.decoding:
                if request.step:
                    decodes += 1
                    held += request.tokens
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
            stretch.begin(now, self._step_s(decodes, held, prefill, context))
        else:
            stretch.begin(now, self._step_s(decodes, held))
            # After a preemption, which admits nothing, the next step may admit again.
            if left > 1 and decodes == len(running) and not preempted:
                self._extend(left, held)
        self.next_at = stretch.end

    def _extend(self, steps: int, held: int) -> None:
        """Let the step under way become a stretch of at most ``steps``."""
        decodes, stretch = len(self._batch.running), self._stretch
        # Steps only get longer: no more than this many end before the next report is due.
        steps = min(steps, max(1, math.ceil((self._report_at - stretch.start) / stretch.first)))
        if decodes * -(-(steps - 1) // self._block) > self._cache.available:
            steps = self._affordable(steps)
        if steps > 1:
            stretch.extend(steps, self._step_s(decodes, held + decodes * (steps - 1)))
            stretch.cut(self._report_at)

    def _affordable(self, steps: int) -> int:
        """The most steps up to ``steps`` for which there are blocks, the first of them being paid for."""
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
    # ----------------------------------------------------------------------------------------------

    def _remove_aborted(self, now: float) -> list[SimRequest]:
        gone = [request for request in self._aborted if request.left]
        self._aborted = []
        for request in gone:
            self._batch.remove(request, now)
        return gone

    def _begin_pause(self, now: float) -> None:
        assert self._swap is not None
        self._pausing, seconds = self._swap
        self._swap = None
        self.counters.recomputed += self._batch.put_all_back(now, "swap")
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
