"""A site's own template may add lines, and is refused where it lacks one that the run needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_hpc.errors import UserError

from .test_writer import FULL, script

BUILT_IN = (Path(__file__).parents[2] / "sbatch" / "run.sbatch.j2").read_text()
SETUP = {"compute": {"setup": ["module load cuda"]}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "my.sbatch.j2"


def made(path: Path, text: str, config: dict[str, Any] = FULL) -> str:
    path.write_text(text)
    return script({**config, "slurm": {**config.get("slurm", {}), "template": str(path)}})


def changed(*pairs: tuple[str, str]) -> str:
    text = BUILT_IN
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def replacing(old: str, new: str, text: str) -> str:
    """A template that changes what another one makes."""
    return f"{{% filter replace('{old}', '{new}') %}}{text}{{% endfilter %}}"


def test_a_template_with_the_built_in_lines_makes_the_same_script(path: Path) -> None:
    assert made(path, BUILT_IN) == script(FULL)


def test_a_template_may_add_lines_and_words_and_choose_the_memory_of_the_step(path: Path) -> None:
    text = changed(
        ("#!/bin/bash\n", "#!/bin/bash -l\n# Of site S.\n#SBATCH --licenses=lustre\n"),
        ("unset CUDA", "ulimit -c 0\nunset CUDA"),
        ("  srun ", "  srun --network=ib "),
    )
    found = made(path, replacing("--mem=0", "--mem=900G", text), {**FULL, **SETUP})
    lines = {"#SBATCH --licenses=lustre", "ulimit -c 0", "module load cuda", "#SBATCH hetjob"}
    assert lines <= set(found.splitlines())
    assert "  srun --network=ib --export=ALL " in found
    assert " -K0 -W0 --mem=900G " in found


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        (("#SBATCH {{ option }}", "#SBATCH {{ option | lower }}"), "lacks the line '#SBATCH --signal=B:USR1@120'"),
        (("#SBATCH hetjob\n", ""), "lacks the line '#SBATCH hetjob'"),
        (("unset CUDA_VISIBLE_DEVICES", "unset"), "lacks the line 'unset CUDA_VISIBLE_DEVICES "),
        (("{{ line }}", "# {{ line }}"), "lacks the line 'set -eo pipefail'"),
        (("exec {{ owner }} -- ", "exec "), "lacks the word 'libra_hpc.owner.owner'"),
        (("{{ command }}", "{{ command }}\ntrue"), "lacks the line 'exec |lacks the word 'exec'"),
        (("exec {{ output }}>&2; ", ""), "lacks the word 'ulimit"),
        (
            ("unset CUDA", "#SBATCH --nodes=9\nunset CUDA"),
            "line '#SBATCH --nodes=9' changes what libra-hpc sets itself",
        ),
        (("unset CUDA", "#SBATCH hetjob\nunset CUDA"), "line '#SBATCH hetjob' changes what libra-hpc sets itself"),
        (("#!/bin/bash\n", "#!/bin/bash\ndate\n"), "sbatch does not read its line '#SBATCH --job-name=demo', which"),
        (
            ("{{ command }}", "{{ comand }}"),
            "'comand' is undefined; valid: a copy of sbatch/run.sbatch.j2 with further",
        ),
        (("{% for", "{% fro"), "line 2: Encountered unknown tag 'fro'"),
        (("{{ command }}", "'"), r"it cannot be read \(No closing quotation\)"),
    ],
)
def test_what_a_template_lacks_is_quoted(pair: tuple[str, str], why: str, path: Path) -> None:
    with pytest.raises(UserError, match=f"^slurm.template = '{path}': .*(?:{why})"):
        made(path, changed(pair), {**FULL, **SETUP})


def test_the_step_needs_its_options_and_an_exec(path: Path) -> None:
    for old, new, word in ((" --no-kill -K0", " -K0", "--no-kill"), ("--export=ALL", "--export=NONE", "--export=ALL")):
        with pytest.raises(UserError, match=f"lacks the word '{word}'"):
            made(path, replacing(old, new, BUILT_IN))


def test_a_template_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(UserError, match=r"it cannot be read \(No such file or directory\)"):
        script({"slurm": {"template": str(path)}})
