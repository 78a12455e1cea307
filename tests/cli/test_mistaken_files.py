"""Run files and site profiles that are no TOML, or have values of a wrong type: one sentence, nothing queued."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Cli, Queue, one_line

FILES: dict[str, tuple[bytes, str]] = {
    "another encoding": (b'[run]\nname = "\xfc"\n', "bad.toml: not valid TOML: byte 14 is not UTF-8."),
    "UTF-16 of an editor": ('[run]\nname = "a"\n'.encode("utf-16"), "bad.toml: not valid TOML: byte 0 is not UTF-8."),
    "a byte order mark and a mistake": (b"\xef\xbb\xbf[run]\nsteps = 0\n", "run.steps = 0: out of range; valid: "),
    "a zero byte": (b'[run]\nname = "a\x00b"\n', "bad.toml:2: not valid TOML: illegal character"),
    "text without quotes": (b"[run]\nname = quick\n", "bad.toml:2: not valid TOML: invalid value"),
    "JSON": (b'{"run": {}}', "bad.toml:1: not valid TOML: invalid statement (column 1)."),
    "a key twice": (b"[run]\nname = 'a'\nname = 'b'\n", "bad.toml:3: not valid TOML: cannot overwrite a value"),
    "a section twice": (b"[run]\n[run]\n", "bad.toml:2: not valid TOML: cannot declare ('run',) twice"),
    "an open bracket": (b"[run\n", "bad.toml:1: not valid TOML: expected ']'"),
    "a time without quotes": (b"[slurm]\ntime_limit = 01:00:00\n", "'01:00:00': a date or time must be in quotes."),
    "a date for a task": (
        b"[task.options]\nday = 2026-01-01\n",
        "task.options.day = '2026-01-01': a date or time must",
    ),
    "not a number": (b"[optimizer]\nlr = nan\n", "optimizer.lr = nan: not a finite number."),
    "half a step": (b"[run]\nsteps = 1.5\n", "run.steps = 1.5: wrong type; valid: an integer >= 1."),
    "a number in quotes": (b"[run]\nsteps = '5'\n", "run.steps = '5': wrong type; valid: an integer >= 1."),
    "a truth for a number": (b"[run]\nsteps = true\n", "run.steps = True: wrong type"),
    "a section that is a value": (b"run = 'x'\n", "run = 'x': wrong type; valid: a table."),
    "a list of sections": (b"[[run]]\n", "run = [{}]: wrong type; valid: a table."),
    "a key outside of sections": (b"steps = 3\n", "steps = 3: unknown key in the run file; valid: algorithm, "),
    "an unknown component": (b"[components.judge]\nnodes = 1\n", "[components.judge]: unknown section in [components]"),
    "an unknown key of a component": (b"[components.train]\ngpu = 8\n", "reservation (did you mean 'gpus'?)."),
    "a list for text": (b"[slurm]\nextra = '--exclusive'\n", "slurm.extra = '--exclusive': wrong type; valid: a list"),
    "a number as a variable": (b"[compute.env]\nA = 1\n", "compute.env.A = 1: wrong type; valid: a table of variables"),
    "a variable's name": (b"[compute.env]\n'A-B' = '1'\n", "compute.env = 'A-B': malformed name; valid: a table of"),
    "lines as one text": (b"[compute]\nsetup = 'module load a'\n", "compute.setup = 'module load a': wrong type"),
    "nothing": (b"", "model.path = '': not given; valid: a Hugging Face folder"),
}


@pytest.mark.parametrize(("content", "sentence"), FILES.values(), ids=FILES)
def test_a_mistake_in_the_text_of_a_run_file(content: bytes, sentence: str, site: Path, queue: Queue, cli: Cli) -> None:
    (site / "bad.toml").write_bytes(content)
    assert sentence in one_line(cli("submit", "bad.toml"))
    assert queue.submitted == []
    assert not (site / "runs").exists()


PROFILES = {
    "another fact": ("[algorithm]\neta = 1\n", "algorithm.eta: not a fact of a site; valid sections: "),
    "nodes": ("[components.train]\nnodes = 3\n", "components.train.nodes: not a fact of a site; valid in "),
    "a wrong type": ("[slurm]\nmpi = 3\n", "slurm.mpi = 3: wrong type; valid: a string."),
    "an unknown key": ("[compute]\nimg = 'x'\n", "compute.img = 'x': unknown key in [compute]; valid: "),
    "no TOML": ("[slurm\n", "site.toml:1: not valid TOML"),
    "an unknown partition": ("[components.train]\npartition = 'a80'\n", "components.train.partition = 'a80': no such"),
}


@pytest.mark.parametrize(("text", "sentence"), PROFILES.values(), ids=PROFILES)
def test_a_mistake_in_a_site_profile(
    text: str, sentence: str, site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "site.toml").write_text(text)
    monkeypatch.setenv("LIBRA_HPC_SITE", str(site / "site.toml"))
    assert sentence in one_line(cli("submit", "run.toml"))
    assert queue.submitted == []
    assert not (site / "runs").exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("absent.toml", "absent.toml': there is no such file; valid: a site profile, or 'none'."),
        ("model", "model: the site profile cannot be read: Is a directory."),
    ],
)
def test_a_site_profile_that_is_missing_or_a_folder(
    name: str, sentence: str, site: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBRA_HPC_SITE", str(site / name))
    assert sentence in one_line(cli("check", "run.toml"))
