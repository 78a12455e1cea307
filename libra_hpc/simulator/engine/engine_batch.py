"""The requests of one replica, and vLLM's rules for who takes part in the next step.

* Running requests are served first, in order of admission: a decode takes one token of the step's budget, an
  unfinished prefill what is left.
* A request lacks a block -> the running one with the largest (priority, arrival), perhaps itself, is preempted: it
  loses its KV and waits again.
* Nothing was preempted -> waiting requests are admitted by (priority, arrival), within sequences, budget and
  blocks for their uncached context.
"""

from __future__ import annotations

from heapq import heappop, heappush

from libra_hpc.simulator.settings import SimulationSettings

from .cache import BlockCache
from .simulated_request import Counters, SimulatedRequest


class SimulatedBatch:
    """Running and waiting requests; ``running`` is in order of admission, `SimulatedRequest.step` is set by `form`."""

    def __init__(self, cache: BlockCache, limits: SimulationSettings, counters: Counters) -> None:
        self.running: list[SimulatedRequest] = []
        self._waiting: list[tuple[int, int, SimulatedRequest]] = []
        self._cache, self._limits, self._counters = cache, limits, counters
        self._block = limits.block_size
        self._budget = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        """Most tokens of a step."""
        self._serial = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def open(self) -> bool:
        return len(self.running) < self._limits.max_num_seqs

    def add(self, request: SimulatedRequest) -> None:
        self._serial += 1
        request.serial = self._serial
        heappush(self._waiting, (request.priority, self._serial, request))

    def form(self) -> bool:
        """Choose the requests of the next step and give them blocks; returns whether anything was preempted."""
        cache, running, block = self._cache, self.running, self._block
        pure, crossing = True, []
        for request in running:
            if request.decoding:
                request.step = 1
                if request.computed == request.blocks * block:
                    crossing.append(request)
            else:
                pure = False
        if pure and len(crossing) <= cache.available and len(running) <= self._budget:
            if crossing:
                cache.take(len(crossing))
                for request in crossing:
                    request.blocks += 1
                    request.own += 1
            preempted, budget = False, self._budget - len(running)
        else:
            preempted, budget = self._serve_running()
            if preempted and running and not any(request.step for request in running):
                # The first request preempted itself and none is served: an empty step takes no time.
                return self.form()
        if self._waiting and not preempted:
            self._admit(budget)
        return preempted

    def _serve_running(self) -> tuple[bool, int]:
        """Give running requests blocks and budget; returns whether any was preempted, and the budget left."""
        cache, block, running = self._cache, self._block, self.running
        budget, place, preempted = self._budget, 0, False
        for request in running:
            request.step = 0
        while place < len(running) and budget > 0:
            request = running[place]
            step = min(request.tokens - request.computed, budget)
            need = -(-(request.computed + step) // block) - request.blocks
            while need > cache.available:
                victim = max(running, key=lambda request: (request.priority, request.serial))
                where = running.index(victim)
                del running[where]
                if where < place:
                    place -= 1
                budget += victim.step
                preempted = True
                self._counters.preemptions += 1
                self.put_back(victim, "preemption")
                if victim is request:
                    break
            if place >= len(running) or running[place] is not request:
                break
            if need:
                cache.take(need)
                request.blocks += need
                request.own += need
            request.step = step
            budget -= step
            place += 1
        for request in running:
            if request.step and not request.decoding:
                self._publish(request)
        return preempted, budget

    def _admit(self, budget: int) -> None:
        cache, block, running, waiting = self._cache, self._block, self.running, self._waiting
        most = self._limits.max_num_seqs
        while waiting and budget > 0 and len(running) < most:
            request = waiting[0][2]
            shared, own, bound = cache.find(
                request.trajectory, request.prompt, request.prompt_blocks, (request.tokens - 1) // block
            )
            found = shared + own
            if -(-request.tokens // block) - found > cache.available - bound:
                break
            heappop(waiting)
            cache.bind(request.trajectory, request.prompt, own)
            request.computed = found * block
            self._counters.cached += request.computed
            if not request.counted:
                request.cached = request.computed
            if request.again == "eviction" and found >= request.high // block:
                request.again = "partial_block"
            request.step = min(request.tokens - request.computed, budget)
            request.blocks = -(-(request.computed + request.step) // block)
            request.own = request.blocks - shared
            cache.take(request.blocks - found)
            self._publish(request)
            budget -= request.step
            running.append(request)

    def _publish(self, request: SimulatedRequest) -> None:
        full = min((request.computed + request.step) // self._block, request.prompt_blocks)
        request.own -= self._cache.publish(request.prompt, full)

    def release(self, request: SimulatedRequest) -> None:
        request.high = max(request.high, request.computed)
        own = max(0, request.computed // self._block - request.prompt_blocks)
        self._cache.release(request.trajectory, request.prompt, own, rest=request.own - own)
        request.blocks = request.own = request.computed = request.step = 0
        request.decoding = False

    def put_back(self, request: SimulatedRequest, cause: str) -> None:
        """Preempt a running request: it loses its blocks and waits again."""
        self.release(request)
        request.again = cause
        heappush(self._waiting, (request.priority, request.serial, request))

    def remove(self, request: SimulatedRequest) -> None:
        if request in self.running:
            self.running.remove(request)
            self.release(request)
        else:
            self._waiting.remove((request.priority, request.serial, request))
            self._waiting.sort()

    def put_all_back(self, cause: str) -> int:
        running, self.running = self.running, []
        for request in running:
            self.put_back(request, cause)
        return len(running)
