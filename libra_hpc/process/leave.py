"""How an engine or an agent ends: at once, without Python taking itself apart.

With torch and vLLM in memory that takes one to five seconds on a busy core, and whoever stops engines waits for it: a
cancelled run, whose time is short, and one whose ranks are repartitioned.  What is to be closed has been closed by
then; memory, devices and sockets go with the process.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process with an exit code; what was printed is written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
