"""One name, one thing: classes, modules, words of the glossary, and stems of messages."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from .sources import ROOT, hold, name, sources, syntax

GLOSSARY = (ROOT / "CONTRIBUTING.md").read_text()
STEM_FOLDERS = ("libra_hpc/protocol", "libra_hpc/policies/pool")
"""Folders whose classes are messages, events and effects."""
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def instead_of(heading: str) -> list[str]:
    """Words on the right of a glossary's table that stand without a bracket."""
    rows = re.findall(r"^\| .* \| (.*) \|$", GLOSSARY.partition(f"## {heading}")[2].partition("\n#")[0], re.MULTILINE)
    return [word for row in rows[2:] for word in row.split(", ") if "(" not in word]


def plain(text: str) -> str:
    """Text in lower-case words; identifiers are taken apart, and marks for the linter left out."""
    return " ".join(word.lower() for word in WORD.findall(re.sub(r"# noqa: .*", "", text)))


def classes(path: Path) -> Iterator[str]:
    """Public classes of a module."""
    yield from (node.name for node in syntax(path).body if isinstance(node, ast.ClassDef) and node.name[0] != "_")


def test_words_of_the_glossary_stand_nowhere_else() -> None:
    pages = (ROOT / "docs").glob("*.md")
    scripts = [*(path for path in (ROOT / "examples").iterdir() if path.is_file()), *(ROOT / "sbatch").glob("*.j2")]
    words = {word: re.compile(rf"\b{plain(word)}(e?s)?\b") for word in instead_of("Terms")}
    assert len(words) > 15
    texts = {path: plain(path.read_text()) for path in (*sources(), *pages, *scripts, ROOT / "README.md")}
    pairs = ((path, word) for path in texts for word in words)
    hold("words", (f"{name(path)}: {word}" for path, word in pairs if words[word].search(texts[path])))


def test_public_classes_have_names_of_their_own() -> None:
    places = defaultdict(list)
    for path in sources():
        for one in classes(path):
            places[one].append(name(path))
    hold("classes", (f"{one}: {', '.join(paths)}" for one, paths in places.items() if len(paths) > 1))


def test_modules_have_names_of_their_own() -> None:
    """A verb of `cli` may have the name of the one module it fronts."""
    places = defaultdict(list)
    for path in sources():
        if path.stem not in {"__init__", "__main__", "settings"} and path.parts[-2] != "cli":
            places[path.stem].append(name(path))
    hold("modules", (f"{one}: {', '.join(paths)}" for one, paths in places.items() if len(paths) > 1))


def test_one_stem_per_fact_in_messages_events_and_effects() -> None:
    stems = instead_of("Facts in the names of messages, events and effects")
    assert len(stems) > 10
    taken = re.compile(f"({'|'.join(stems)})(?![a-z])")
    pairs = ((path, one) for path in sources(*STEM_FOLDERS) for one in classes(path))
    hold("stems", (f"{name(path)}: {one}" for path, one in pairs if taken.search(one)))
