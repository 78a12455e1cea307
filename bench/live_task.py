"""The quickstart's task, held until a file appears, so that every batch of a run sees the same engines.

An engine of two processes starts some ten seconds after one of one; by then a short run on the first alone would be
over.  The environment host reports ready only once its task is made, and without a host no prompt is admitted.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from libra_hpc.tasks.base import TaskTokenizer
from libra_hpc.tasks.keychain import KeyChain

LOOK_S = 0.05


class HeldKeyChain(KeyChain):
    """`KeyChain`, made as soon as ``gate`` exists; whoever holds it back ends the host otherwise."""

    def __init__(self, tokenizer: TaskTokenizer, *, gate: str, **options: Any) -> None:
        while not Path(gate).exists():
            time.sleep(LOOK_S)
        super().__init__(tokenizer, **options)
