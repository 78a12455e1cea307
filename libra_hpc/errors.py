"""Exceptions whose message is one sentence for the user, and how to build that sentence.

The command line prints it on stderr and exits with `exit_code`.  Any other exception is a defect and shows its
traceback.
"""

from __future__ import annotations

import difflib
import errno
import resource
from collections.abc import Iterable

LONGEST_VALUE = 120
"""Most characters of a value in a message: a line of a foreign file may be a megabyte long."""


class UserError(Exception):
    """A mistake of the user; the message names the field, the value, what is valid, and the nearest match."""

    exit_code = 2


class OperationError(Exception):
    """A correct request that failed: a job failed, a daemon did not start."""

    exit_code = 1


class EnvironmentFailed(OperationError):
    """What a trajectory needs is away, through no fault of its policy: a server, a device, a licence.

    The author of a task, tool, reward or agent raises it; no other exception counts, because a policy can cause those.
    The trajectory is sampled again, and is no reward.
    """


class SlurmUnreachable(OperationError):
    """No Slurm controller answered."""

    exit_code = 3


def error_text(error: Exception) -> str:
    """The message of an exception; of an `OSError` without its number and file name."""
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f"{error.strerror} (ulimit -f: {resource.getrlimit(resource.RLIMIT_FSIZE)[0]} bytes)"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def nearest(value: str, valid: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the closest valid name; empty when none is close."""
    close = difflib.get_close_matches(value, list(valid), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def invalid(field: str, value: object, why: str, valid: Iterable[str] | str = ()) -> UserError:
    """Build a `UserError` for one field.

    ``valid`` is the list of valid names, of which the nearest is suggested, or words such as ``"an integer >= 0"``.
    """
    shown = repr(value)
    if len(shown) > LONGEST_VALUE:
        shown = f"{shown[:LONGEST_VALUE]}..."
    text = f"{field} = {shown}: {why}"
    if isinstance(valid, str):
        return UserError(f"{text}; valid: {valid}." if valid else f"{text}.")
    names = list(valid)
    if not names:
        return UserError(f"{text}.")
    return UserError(f"{text}; valid: {', '.join(names)}{nearest(str(value), names)}.")
