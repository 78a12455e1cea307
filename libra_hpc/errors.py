"""The one exception a user's mistake becomes: a sentence that names the field, the value, what is valid, and the
nearest match.

The command line prints it on stderr without a traceback and exits with 2.  Anything else that escapes is a defect of
ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_VALUE = 120
"""Characters of a value that a message repeats: a line of a file that is none of ours may be a megabyte long."""


class UserError(Exception):
    """A mistake in what the user gave us; the message is one complete sentence."""

    exit_code = 2


class OperationError(Exception):
    """The request was understood but could not be carried out (a job failed, a daemon did not start)."""

    exit_code = 1


class SlurmUnreachable(OperationError):
    """No Slurm controller answered."""

    exit_code = 3


def error_text(error: Exception) -> str:
    """What an exception says, without the number and the file name that an `OSError` puts around it: the sentence
    around it names the file."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def nearest(value: str, valid: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest valid name, or an empty string when nothing is close."""
    close = difflib.get_close_matches(value, list(valid), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def invalid(field: str, value: object, why: str, valid: Iterable[str] | str = ()) -> UserError:
    """Build a `UserError` for one field.

    ``valid`` is either the list of valid names (the nearest match is then suggested) or a sentence fragment such as
    ``"an integer >= 0"``.
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
