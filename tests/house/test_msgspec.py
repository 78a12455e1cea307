"""What msgspec reads into types is whole once their module is imported.

Of two threads that use a type first, the second sees a half of it and reads beyond it: the process dies of SIGSEGV.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from .sources import ROOT, hold, name, nodes, sources, syntax


def test_types_are_whole_when_their_module_is_imported() -> None:
    top = [ast.unparse(one) for path in sources() for one in syntax(path).body if isinstance(one, ast.Assign)]
    whole, found = {kind for line in top for kind in re.findall(r"Decoder\(([A-Za-z_]+)\)", line)}, set[str]()
    for path in sources():
        functions = (one for one in nodes(path) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)))
        for call in (one for each in functions for one in ast.walk(each) if isinstance(one, ast.Call)):
            called = ast.unparse(call.func)
            typed = called.endswith((".decode", ".convert")) and any(one.arg == "type" for one in call.keywords)
            half = called == "msgspec.convert" and ast.unparse(call.args[1]) not in whole
            if typed or half or called.rpartition(".")[2] in ("Decoder", "Encoder", "Codec"):
                found.add(f"{name(path)}: {called}({ast.unparse(call.args[-1]) if call.args else ''})")
    hold("late types", found)


@pytest.mark.parametrize("processes", [4, pytest.param(200, marks=pytest.mark.nightly)])
def test_nine_threads_are_the_first_to_decode_every_type(processes: int) -> None:
    subprocess.run([sys.executable, "-m", "tests.protocol.first_decodes", str(processes)], cwd=ROOT, check=True)
