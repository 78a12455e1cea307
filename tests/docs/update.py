"""Write the console blocks of the pages anew: ``python -m tests.docs.update [PAGE...]``, or ``make docs``."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from .blocks import BLOCK, PAGES, Block, blocks, make_folder, output


def updated(page: Path, folder: Path) -> str:
    """The page's text with what its commands print today; a block that still holds keeps its numbers."""
    found = iter(blocks(page))

    def written(match: re.Match[str]) -> str:
        block: Block = next(found)
        printed = output(block.command, folder)
        text = block.shown + printed if block.differs(printed) else block.text
        return match[0].replace(f"{match['fence']}\n{match['text']}", f"{match['fence']}\n{text}")

    return BLOCK.sub(written, page.read_text())


def main(names: list[str]) -> None:
    pages = [Path(name).resolve() for name in names] or PAGES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder)
        for page in pages:
            if (text := updated(page, folder)) != page.read_text():
                page.write_text(text)
                print(f"{page}: written")


if __name__ == "__main__":
    main(sys.argv[1:])
