"""Console blocks of the pages that a command produces, and a folder in which these commands run.

The line above such a block is a comment, which no reader sees:

- ``<!-- from: COMMAND -->``: the block is what the command prints, stdout and stderr.
- ``<!-- from, numbers vary: COMMAND -->``: the same, and any number may stand for any other.

COMMAND is a line of bash.  Lines of the block that begin with ``$ `` show the reader a command, and are not compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec

from libra_hpc.facts.status import encode_status
from libra_hpc.files import write_atomic
from tests.example_files import write_text_tokenizer
from tests.facts import synthetic
from tests.preflight.test_checks import write_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^<!-- from(?P<vary>, numbers vary)?: (?P<command>[^\n]+) -->\n(?P<fence>```\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
NUMBER = re.compile(r"\d[\d,.:]*")
GAP = re.compile(r" {2,}|─+|━+")
"""Widths of columns and rules, which follow the numbers in them."""
BUSY = re.compile(r"[a-z ]+(: \d+)? \(\d+ s\)")
"""What goes on, in a pipe."""
LIMIT_S = 120.0
"""Longest time of one command; a plan with simulation takes 6 s on one free core."""
QWEN3_14B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "vocab_size": 151936,
    "num_hidden_layers": 40,
    "max_position_embeddings": 40960,
}
"""Its published ``config.json``, as far as a run file needs it."""


class Block(msgspec.Struct, frozen=True):
    page: Path
    command: str
    text: str
    numbers_vary: bool

    @property
    def shown(self) -> str:
        """Its first lines that show a command."""
        return "".join(line for line in self.text.splitlines(keepends=True) if line.startswith("$ "))

    def differs(self, printed: str) -> bool:
        old, new = self.text.removeprefix(self.shown).rstrip(), printed.rstrip()
        return masked(old) != masked(new) if self.numbers_vary else old != new


def blocks(page: Path) -> list[Block]:
    return [
        Block(page, match["command"], match["text"], bool(match["vary"])) for match in BLOCK.finditer(page.read_text())
    ]


def masked(text: str) -> str:
    """Every number as ``#``; the width of a gap counts for nothing."""
    return GAP.sub(" ", NUMBER.sub("#", text))


def make_folder(folder: Path) -> None:
    """What the commands find: the examples, model folders, a finished run, and a program of this checkout."""
    (folder / "examples").symlink_to(ROOT / "examples")
    write_text_tokenizer(write_model(folder / "Qwen3-14B", QWEN3_14B))
    write_model(folder / "dynamic-rope", {**QWEN3_14B, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    run = synthetic.make_run(folder / "runs", "quickstart")
    write_atomic(run.status, encode_status(synthetic.make_status(run, state="completed")))
    (folder / "bin").mkdir()
    program = folder / "bin" / "libra-hpc"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from libra_hpc_cli.app import main; main()" "$@"\n')
    program.chmod(0o755)


def output(command: str, folder: Path) -> str:
    """What a command prints in a folder of `make_folder`, without spaces at the ends of lines."""
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(folder),
        "LIBRA_HPC_SITE": "none",
        # Other tests may have one up.
        "LIBRA_HPC_CLUSTER": str(folder / "no-cluster"),
    }
    environment.pop("SLURM_CONF", None)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    # Without lines that only a slow machine prints.
    lines = "\n".join(line.rstrip() for line in done.stdout.splitlines() if not BUSY.fullmatch(line)).strip("\n")
    return f"{lines}\n"
