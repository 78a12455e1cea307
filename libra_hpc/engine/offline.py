"""The same engine in the caller's own process, without a socket: for evaluation, benchmarks and tests.

One per process, one thread only. Construct it before anything imports vLLM, best before torch: it sets the environment
that they read at import.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from libra_hpc.protocol.engine import Generate, Generated

from .settings import EngineConfig, check_config, prepare_process

if TYPE_CHECKING:
    from .core import RolloutEngine


class OfflineEngine:
    """`generate` runs one batch; `submit` and `poll` make multi-turn loops, where a turn joins the batch at any step.

    Raises `UserError` for a model folder that cannot be served. Use it as a context manager, or `close` it.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_config(config)
        prepare_process(config)
        # vLLM reads its environment when it is imported.
        from .core import RolloutEngine

        self.engine: RolloutEngine = RolloutEngine(config)
        self._refused: list[Generated] = []

    def submit(self, request: Generate) -> None:
        """Queue one request; raises `DuplicateRequest` when its id is in flight."""
        refused = self.engine.submit(request)
        if refused is not None:
            self._refused.append(refused)

    def poll(self) -> list[Generated]:
        """Run one step and return the requests that it finished or refused; more may come while `pending`."""
        done, self._refused = self._refused, []
        if self.engine.busy:
            done += self.engine.step()
        return done

    @property
    def pending(self) -> bool:
        """Whether a further `poll` can return anything."""
        return bool(self._refused) or self.engine.busy

    def generate(self, requests: Iterable[Generate]) -> list[Generated]:
        """Run requests to their ends and return the answers in the order of ``requests``."""
        order = []
        for request in requests:
            self.submit(request)
            order.append(request.rid)
        answers: dict[str, Generated] = {}
        while self.pending:
            answers.update((done.rid, done) for done in self.poll())
        return [answers[rid] for rid in order]

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
