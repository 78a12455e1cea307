"""A benchmark lives as long as a page has a number of it."""

from __future__ import annotations

import re

from .sizes import user_pages
from .sources import ROOT

MODULES = {
    path.stem: files
    for path in (ROOT / "bench").glob("[a-z]*")
    if (files := [path] if path.suffix == ".py" else list(path.glob("*.py")))
}
"""Files by module, or by folder."""


def named(text: str) -> set[str]:
    """Modules and folders of bench in a text."""
    return set(re.findall(r"\bbench[./]([a-z_]+)", text)) & MODULES.keys()


def test_every_benchmark_is_on_a_page_in_the_makefile_or_part_of_one_that_is() -> None:
    makefile = (ROOT / "Makefile").read_text()
    listed = re.findall(r"[a-z_]+", makefile.partition("for name in ")[2].partition(";")[0])
    todo = named(makefile + "".join(page.read_text() for page in user_pages())) | (set(listed) & MODULES.keys())
    used = set[str]()
    while todo:
        used.add(one := todo.pop())
        todo |= named("".join(path.read_text() for path in MODULES[one])) - used
    assert used == MODULES.keys()
