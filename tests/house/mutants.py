"""Whether the tests notice small mistakes: ``make mutants`` changes one expression at a time and runs the room's tests.

- ``draw FILE``: writes which expressions change, drawn by lot from the product.
- ``run FILE``: changes each in this checkout, runs the tests of its room, restores it, and notes the outcome: *killed*,
  *alive*, or *gone* where the expression is no longer in a function of that name. A file of earlier outcomes is
  compared: what was killed then and is alive now fails.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .sources import ROOT, name, sources

SEED, COUNT = 38, 60
SECONDS = 90
"""At most for the tests of a room; what they have not noticed by then is alive."""
OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
}


def changed(node: ast.AST) -> ast.AST | None:
    """The expression with one mistake in it; None if it has nothing to change."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare) and type(other.ops[0]) in OPPOSITE:
        other.ops[0] = OPPOSITE[type(other.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(other, (ast.BoolOp, ast.BinOp)) and type(other.op) in OPPOSITE:
        other.op = OPPOSITE[type(other.op)]()  # type: ignore[assignment]
    elif isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not):
        return other.operand
    else:
        return None
    return other


def expressions(path: Path) -> Iterator[tuple[str, str, str, int, int]]:
    """(function, text, text with a mistake, first byte, byte after the last) of what can be changed in a file."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def inside(node: ast.AST, function: str) -> Iterator[tuple[str, str, str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from inside(child, f"{function}.{child.name}".lstrip("."))
                continue
            other = changed(child) if function and not isinstance(node, ast.JoinedStr) else None
            if other is not None and isinstance(child, ast.expr) and child.end_lineno and child.end_col_offset:
                first, last = (
                    starts[child.lineno - 1] + child.col_offset,
                    starts[child.end_lineno - 1] + child.end_col_offset,
                )
                yield function, text[first:last].decode(), f"({ast.unparse(other)})", first, last
            if not isinstance(child, (ast.JoinedStr, ast.arguments, ast.AnnAssign)):
                yield from inside(child, function)

    return inside(ast.parse(text), "")


def draw(count: int, seed: int) -> list[dict[str, Any]]:
    """So many expressions of the product, each with a mistake."""
    found = [(path, *one) for path in sources() for one in expressions(path)]
    return [
        {"file": name(path), "function": function, "text": text, "instead": instead}
        for path, function, text, instead, *_ in sorted(random.Random(seed).sample(found, count))
    ]


def room_tests(path: Path) -> str:
    """The nearest folder of tests that mirrors a file's folders."""
    folder = ROOT / "tests" / path.relative_to(ROOT / "libra_hpc" if path.is_relative_to(ROOT / "libra_hpc") else ROOT)
    return str(next(above for above in folder.parents if above.is_dir()))


def outcome(mutant: dict[str, Any]) -> str:
    """Run the tests of the room with the mistake in place."""
    places = [
        (path, one)
        for path in sources()
        for one in expressions(path)
        if one[:2] == (mutant["function"], mutant["text"])
    ]
    places.sort(key=lambda place: Path(place[0]).name != Path(mutant["file"]).name)
    if not places:
        return "gone"
    path, (*_, first, last) = places[0]
    whole = path.read_bytes()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not (nightly or chaos)", room_tests(path)]
    try:
        path.write_bytes(whole[:first] + mutant["instead"].encode() + whole[last:])
        done = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LIBRA_HPC_INTERPRETED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            return "killed" if done.wait(SECONDS) else "alive"
        except subprocess.TimeoutExpired:
            done.terminate()
            done.wait()
            return "alive"
    finally:
        path.write_bytes(whole)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["draw", "run"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    chosen = parser.parse_args()
    if chosen.what == "draw":
        chosen.file.parent.mkdir(parents=True, exist_ok=True)
        chosen.file.write_text(json.dumps(draw(chosen.count, chosen.seed), indent=1))
        return
    mutants, worse = json.loads(chosen.file.read_text()), 0
    for index, mutant in enumerate(mutants, 1):
        before, mutant["outcome"] = mutant.get("outcome"), outcome(mutant)
        worse += before == "killed" and mutant["outcome"] == "alive"
        chosen.file.write_text(json.dumps(mutants, indent=1))
        print(
            f"{index}/{len(mutants)} {mutant['outcome']:6} {mutant['file']} {mutant['function']}: {mutant['instead']}",
            flush=True,
        )
    sys.exit(f"{worse} that were killed before are alive" if worse else 0)


if __name__ == "__main__":
    main()
