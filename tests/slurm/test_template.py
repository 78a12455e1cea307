"""A site's own template may change anything, and is refused where it cannot be rendered."""

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
        (
            ("{{ command }}", "{{ comand }}"),
            "'comand' is undefined; valid: a copy of sbatch/run.sbatch.j2 with further",
        ),
        (("{% for", "{% fro"), "line 2: Encountered unknown tag 'fro'"),
    ],
)
def test_what_cannot_be_rendered_is_named(pair: tuple[str, str], why: str, path: Path) -> None:
    with pytest.raises(UserError, match=f"^slurm.template = '{path}': .*{why}"):
        made(path, changed(pair))


def test_a_template_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(UserError, match=r"it cannot be read \(No such file or directory\)"):
        script({"slurm": {"template": str(path)}})
