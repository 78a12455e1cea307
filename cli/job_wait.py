"""Wait for a queued job of one function: its state on stderr; Ctrl-C cancels it."""

from __future__ import annotations

import time

from libra_hpc.slurm.single import Handle

from .output import busy, print_note

POLL_S = 0.5


def wait_for(handle: Handle) -> None:
    """Return when the job has ended, in whatever way; an interrupt cancels it first."""
    said = ""
    try:
        with busy("waiting for the job"):
            while not handle.done():
                state = handle.state().value.lower()
                if state != said:
                    print_note(f"job {handle.job_id}: {state}")
                    said = state
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        handle.cancel()
        print_note(f"job {handle.job_id} is cancelled")
        raise
