"""The quickstart's task, held until a file appears, so that every batch of a run has the same engines.

An engine of TP=2 starts about 10 s after one of TP=1.  No prompt is admitted before the environment host is ready, and
the host is ready when its task is constructed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from libra_hpc.tasks.base import TaskTokenizer
from libra_hpc.tasks.keychain import KeyChain

POLL_S = 0.05


class HeldKeyChain(KeyChain):
    """`KeyChain` whose construction waits for the file ``gate``."""

    def __init__(self, tokenizer: TaskTokenizer, *, gate: str, **options: Any) -> None:
        while not Path(gate).exists():
            time.sleep(POLL_S)
        super().__init__(tokenizer, **options)
