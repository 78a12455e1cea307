"""The part of a batch script before its program: the site's set-up lines and the variables, strict (pure).

- A command of ``compute.setup`` fails, or leaves the script -> the script ends with that command as the cause.
- A value names a variable that is not set on the node -> the same.
- A signal ends the set-up -> the script ends, and Slurm knows why.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.slurm.queue.cause import SET_UP_ENDED

_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
"""``$NAME``, ``${NAME}``, and ``$$`` for a dollar sign.  Every other dollar sign stands for itself."""
CACHES = {
    "CUDA_CACHE_PATH": "cuda",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Variables of compilers, and their folders on the node's own disk.  By default all nodes share those of the home."""
CACHE_FOLDER = "$TMPDIR/cache-$UID"
"""Made with mode 0700 before an agent starts, which looks whose it is (`libra_hpc.process.agent_folders`)."""
STRICT = """\
# The first command below that fails, or leaves the script, ends the start and is named as its cause.
set -eo pipefail
set_up_command=
set_up_ended() {{
  code=$?
  trap - DEBUG EXIT
  # By a signal: Slurm has the reason.
  case $code in 138 | 143) exit "$code" ;; esac
  cause="{failed} '$set_up_command' with exit code $code (compute.setup, compute.env)"
  echo "$cause" >&2
  {end}
}}
trap 'set_up_command=$BASH_COMMAND' DEBUG
trap set_up_ended EXIT
trap 'trap - EXIT; exit 143' TERM
trap 'trap - EXIT; exit 138' USR1"""
LOGIN_SHELL = 'shopt -q login_shell || exec bash -l "$0" "$@"  # It reads /etc/profile and the like.'
BODY = """\
# Without -u: `module` and `conda activate` read variables that are not set.
set +u"""


def set_up_lines(
    config: RunConfig, variables: Mapping[str, str], end: str = "exit 1", first: Sequence[str] = ()
) -> list[str]:
    """Lines of bash: ``compute.setup``, then the exports ``first`` and those of ``variables``.

    ``end``: a command that ends the script after a failure, whose cause is in ``$cause``.
    """
    setup, login = config.compute.setup, [LOGIN_SHELL] if config.slurm.login_shell else []
    exports = [*first, *(f"export {name}={shell_text(value)}" for name, value in sorted(variables.items()))]
    if not setup and not any("$" in line for line in exports):
        return [*login, *exports]
    body = [*BODY.splitlines(), *setup, "set -u"] if setup else ["set -u"]
    strict = STRICT.format(failed=SET_UP_ENDED, end=end).splitlines()
    return [*login, *strict, *body, *exports, "trap - DEBUG EXIT TERM USR1"]


def local_exports(config: RunConfig) -> list[str]:
    """Lines that put temporary files and caches into ``compute.local_dir``; a cache that has a place keeps it.

    Caches have code, so their folder is of one user (`CACHE_FOLDER`).
    """
    local = config.compute.local_dir
    caches = (f'export {name}="${{{name}:-{CACHE_FOLDER}/{folder}}}"' for name, folder in CACHES.items())
    return [f'export TMPDIR="{local}"', *caches] if local else []


def shell_text(text: str) -> str:
    """A value as bash reads it: its variables are expanded there, all else stands for itself."""
    if not _VARIABLE.search(text):
        quoted = shlex.quote(text)
        # ``==`` looks like a test.
        return f"'{text}'" if text.startswith("=") and quoted == text else quoted
    made, place = [], 0
    for found in _VARIABLE.finditer(text):
        made.append(re.sub(r'([\\"$`])', r"\\\1", text[place : found.start()]))
        made.append(r"\$" if found[1] else f"${{{found[2] or found[3]}}}")
        place = found.end()
    made.append(re.sub(r'([\\"$`])', r"\\\1", text[place:]))
    return f'"{"".join(made)}"'


def expanded(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """``variables`` as `set_up_lines` exports them, for a start without a script; raises `UserError` for a variable
    that is not set."""
    known = dict(environ)
    for name, text in sorted(variables.items()):
        for found in _VARIABLE.finditer(text):
            wanted = found[2] or found[3]
            if wanted and wanted not in known:
                raise invalid(f"compute.env.{name}", text, f"${wanted} is not set here", "variables that are set")
        known[name] = _VARIABLE.sub(lambda found: "$" if found[1] else known[found[2] or found[3]], text)
    return {name: known[name] for name in variables}
