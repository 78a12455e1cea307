"""An MPI plugin that srun does not have is refused before the queue; what srun lists is believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.slurm.interpreter import check_plugin, mpi_plugins, parse_plugins
from tests.slurm.scripts import program

PRESENT = """MPI plugin types are...
	none
	cray_shasta
	pmi2
	pmix
specific pmix plugin versions available: pmix_v3,pmix_v4
"""
EARLIER = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n"


def configured(mpi: str, executor: str = "auto") -> RunConfig:
    return validate({"slurm": {"mpi": mpi, "executor": executor}})


def test_both_forms_of_the_list_are_read() -> None:
    assert parse_plugins(PRESENT) == ["none", "cray_shasta", "pmi2", "pmix", "pmix_v3", "pmix_v4"]
    assert parse_plugins(EARLIER) == ["none", "pmi2", "openmpi"]
    assert parse_plugins("srun: error: cannot find a configuration") == parse_plugins("") == []


@pytest.mark.parametrize(("text", "stream"), [(PRESENT, 1), (EARLIER, 2)])
def test_srun_is_asked_with_the_environment_that_is_given(text: str, stream: int, tmp_path: Path) -> None:
    answer = f'[ "$1" = --mpi=list ] && [ "$SLURM_CONF" = here ] && cat "{tmp_path}/list" >&{stream}'
    program(tmp_path / "srun", answer)
    (tmp_path / "list").write_text(text)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert mpi_plugins({"PATH": path, "SLURM_CONF": "here"}) == parse_plugins(text)
    assert mpi_plugins({"PATH": path}) == mpi_plugins({"PATH": str(tmp_path / "nowhere")}) == []


def test_the_list_of_srun_decides_and_the_known_names_where_it_does_not_answer() -> None:
    check_plugin(configured("site_own"), ["none", "site_own"])
    check_plugin(configured("pmix_v4"), [])
    check_plugin(configured("openmpi", "local"), [])
    with pytest.raises(
        UserError,
        match=r"slurm\.mpi = 'pmix': srun has no such MPI plugin here .*; valid: none, pmi2 \(did you mean 'pmi2'\?\)",
    ):
        check_plugin(configured("pmix"), ["none", "pmi2"])
    with pytest.raises(
        UserError,
        match=r"slurm\.mpi = 'openmpi': no Slurm has such an MPI plugin \(PyPI's mpich needs pmi2, .*; valid: pmi2, ",
    ):
        check_plugin(configured("openmpi"), [])
