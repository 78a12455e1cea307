"""Options of sbatch as a user writes them, read as getopt reads them: ``-t10``, ``-Qt 10``, ``--sig=B:TERM``.

An option that the script sets itself is refused in every spelling, with the key of the run file that is meant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from libra_hpc.errors import invalid

_KEYS = {
    "run.name": "--job-name -J",
    "components.*.nodes": "--nodes -N",
    "components.*.cpus": "--cpus-per-task -c",
    "components.*.gpus": "--gpus -G --gpus-per-node --gpus-per-task --gpus-per-socket",
    "components.*.mem": "--mem --mem-per-cpu --mem-per-gpu",
    "components.*.partition": "--partition -p",
    "slurm.time_limit": "--time -t",
    "slurm.preempted": "--requeue --no-requeue",
    "no such option": "--signal --output -o --error -e --open-mode --ntasks -n --ntasks-per-node --array -a --parsable"
    " --wrap --wait -W --test-only --kill-on-invalid-dep --no-kill -k --chdir -D --help -h --usage --version -V",
}
RESERVED = {option: key for key, options in _KEYS.items() for option in options.split()}
"""Options that the script needs as they are, or that keep sbatch from queueing, and the key that sets them."""
_BARE = re.compile("[HIOQVWhksv]")
"""Short options without a value; all others of sbatch have one."""
_FLAGS = {
    *("contiguous", "exclusive", "get-user-env", "hold", "ignore-pbs", "nice", "no-bell", "oversubscribe"),
    *("overcommit", "quiet", "reboot", "share", "spread-job", "stepmgr", "use-min-nodes", "verbose"),
}
"""Long options whose value, if they take one, stands behind an equals sign."""


def joined(field: str, words: Sequence[str]) -> list[str]:
    """``words`` as one text an option: ``["-x", "a800-3"]`` becomes ``["-xa800-3"]``.

    Raises `UserError` for a word that belongs to no option, and for one of `RESERVED`.
    """
    found: list[str] = []
    open_option = False
    for index, word in enumerate(words):
        place = f"{field}[{index}]"
        if not word.startswith("-") and open_option and word.isprintable() and not word.startswith("="):
            found[-1] += f"={_one_word(place, word)}" if found[-1].startswith("--") else _one_word(place, word)
            open_option = False
            continue
        name, *_ = [*re.split(r"[=\s]", word, maxsplit=1), ""]
        if not re.fullmatch(r"-[A-Za-z].*|--[A-Za-z].*", name) or not word.isprintable():
            raise invalid(place, word, "not an sbatch option", "one option such as '--exclusive'")
        if any(character.isspace() for character in word):
            raise invalid(place, word, "it has a space", f"{name}=VALUE")
        names, open_option = _long(word) if word.startswith("--") else _short(word)
        for option in names:
            _refuse_reserved(place, word, option)
        found.append(word)
    return found


def _one_word(field: str, word: str) -> str:
    if any(character.isspace() for character in word):
        raise invalid(field, word, "it has a space", "a value without one")
    return word


def _refuse_reserved(field: str, word: str, option: str) -> None:
    # getopt takes a beginning of a long option for it; one of several options is not for a script to try.
    begun = [name for name in RESERVED if option.startswith("--") and name.startswith(option)]
    own = option if option in RESERVED else begun[0] if begun and option[2:] not in _FLAGS else ""
    if own:
        why = f"libra-hpc sets {own} itself"
        raise invalid(field, word, why if own == option else f"short for {own}, and {why}", RESERVED[own])


def _long(word: str) -> tuple[list[str], bool]:
    """Name of a long option, and whether the next word may be its value."""
    name, equals, _ = word.partition("=")
    return [name], not equals and name.removeprefix("--") not in _FLAGS


def _short(word: str) -> tuple[list[str], bool]:
    """Names of the short options that stand together in a word, and whether the next word may be a value."""
    names = []
    for place, letter in enumerate(word[1:], start=2):
        names.append(f"-{letter}")
        if not _BARE.match(letter):
            return names, place == len(word)
    return names, False
