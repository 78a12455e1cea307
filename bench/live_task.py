"""The quickstart's task, held until all engines are up, so that every batch of a run has the same engines.

An engine of TP=2 starts about 10 s after one of TP=1.  No prompt is admitted before the environment host is ready, and
the host is ready when its task is constructed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.tasks.base import TaskTokenizer
from libra_hpc.tasks.keychain import KeyChain

POLL_S = 0.05


class HeldKeyChain(KeyChain):
    """`KeyChain` whose construction waits until ``engines`` are ready in the only run below ``runs``."""

    def __init__(self, tokenizer: TaskTokenizer, *, runs: str, engines: list[str], **options: Any) -> None:
        while not ready_engines(Path(runs)).issuperset(engines):
            time.sleep(POLL_S)
        super().__init__(tokenizer, **options)


def ready_engines(runs: Path) -> set[str]:
    """Engines that the run has reported as ready."""
    lines = (line for path in runs.iterdir() for line in read_lines(RunDir(path).events))
    return {line["engine"] for line in lines if line["kind"] == "engine_ready"}
