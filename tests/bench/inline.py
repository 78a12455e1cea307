"""An executor for tests."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Any


class Inline(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done
