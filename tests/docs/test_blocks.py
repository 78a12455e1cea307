"""Every console block of a page that names its command is what this command prints today."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from .blocks import PAGES, Block, blocks, make_folder, masked, output

MARKED = [block for page in PAGES for block in blocks(page)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    make_folder(made)
    return made


def row(block: Block) -> Any:
    """A whole plan takes half a minute, in `check` too."""
    long = re.match("libra-hpc (plan|check)", block.command)
    return pytest.param(block, id=f"{block.page.stem}: {block.command[:60]}", marks=pytest.mark.nightly if long else ())


@pytest.mark.slow
@pytest.mark.parametrize("block", map(row, MARKED))
def test_a_block_is_what_its_command_prints(block: Block, folder: Path) -> None:
    printed = output(block.command, folder)
    assert not block.differs(printed), f"{block.page.name} is out of date; run: make docs\nit prints now:\n{printed}"


def test_every_marker_is_read() -> None:
    """A marker whose block does not follow at once would be skipped in silence."""
    for page in PAGES:
        markers = re.findall(r"^<!-- from", page.read_text(), re.MULTILINE)
        assert len(markers) == len(blocks(page)), page.name


def test_a_changed_word_and_a_changed_number_are_seen() -> None:
    exact = Block(Path("page.md"), "true", "$ true\nbest: 3 nodes\n", numbers_vary=False)
    assert not exact.differs("best: 3 nodes\n")
    assert exact.differs("best: 4 nodes\n")
    loose = Block(Path("page.md"), "true", "best: 3 nodes   12.5 s\n", numbers_vary=True)
    assert not loose.differs("best: 14 nodes  1,000 s\n")
    assert loose.differs("worst: 3 nodes   12.5 s\n")
    assert masked("────  1:02 ago") == masked("──  12 ago")
