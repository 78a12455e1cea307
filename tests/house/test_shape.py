"""Shape of functions, constructors, modules and folders."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from radon.visitors import ComplexityVisitor

from .sizes import is_text
from .sources import hold, imports, modules, name, nodes, sources, syntax

MOST_COMPLEX = 15
MOST_CALLBACKS = 3
MOST_MODULES = 15
"""Per folder, beside `__init__`."""
MOST_DOCSTRING = 15
"""Lines of a module's docstring."""


def test_functions_are_simple() -> None:
    found = []
    for path in sources():
        visitor = ComplexityVisitor.from_ast(syntax(path))
        methods = [method for one in visitor.classes for method in one.methods]
        for one in (*visitor.functions, *methods):
            if one.complexity > MOST_COMPLEX:
                owner = f"{one.classname}." if one.classname else ""
                found.append(f"{name(path)}: {owner}{one.name} {one.complexity}")
    hold("complexity", found)


def aliases() -> set[str]:
    """Names of types that are callables."""
    pairs = [
        (node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value)
        for path in sources()
        for node in syntax(path).body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
    ]
    return {ast.unparse(name) for name, value in pairs if ast.unparse(value).startswith("Callable[")}


def parameters(one: ast.ClassDef) -> Iterator[ast.expr]:
    """Annotations of a constructor's parameters; of the fields, if it has none of its own."""
    for node in one.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            named = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            yield from (argument.annotation for argument in named if argument.annotation is not None)
            return
    yield from (node.annotation for node in one.body if isinstance(node, ast.AnnAssign))


def test_constructors_take_few_callbacks() -> None:
    callables, found = {"Callable", *aliases()}, []
    for path in sources():
        for one in nodes(path):
            if isinstance(one, ast.ClassDef):
                names = [{part.id for part in ast.walk(kind) if isinstance(part, ast.Name)} for kind in parameters(one)]
                count = sum(bool(callables & used) for used in names)
                if count > MOST_CALLBACKS:
                    found.append(f"{name(path)}: {one.name} {count}")
    hold("callbacks", found)


def test_folders_hold_few_modules() -> None:
    counts = Counter(path.parent for path in sources() if path.name != "__init__.py")
    hold("folders", (f"{name(folder)} {count}" for folder, count in counts.items() if count > MOST_MODULES))


def test_every_module_says_in_a_few_lines_what_it_is() -> None:
    docs = {name(path): ast.get_docstring(syntax(path)) or "" for path in sources()}
    assert not [path for path, doc in docs.items() if not doc or len(doc.splitlines()) > MOST_DOCSTRING]


def test_docstrings_name_their_subject() -> None:
    """Telegrams ("Of the image; -1: none") cannot be understood without the code."""
    found = []
    for path in sources("libra_hpc", "cli", "envs"):
        texts = (node.value.value for node in nodes(path) if isinstance(node, ast.stmt) and is_text(node))
        found += [f"{name(path)}: {text}" for text in texts if re.match(r"\s*(Of|As|That of|Those)\b", text)]
    assert not found


def test_names_are_imported_from_where_they_are_made() -> None:
    """So nothing is exported a second time; packages import `compiled` only, which chooses their folder."""
    imported = {path: {one for _, one in imports(path) if one} for path in sources()}
    made = {path: {getattr(node, "name", "") for node in syntax(path).body} for path in sources()}
    found = [f"{name(path)}: import X as X" for path in sources() if same_alias(path)]
    for path in sources():
        for parts, one in imports(path):
            if one in imported[modules()[parts]] - made[modules()[parts]] and (*parts, one) not in modules():
                found.append(f"{name(path)}: {one} of {'.'.join(parts)}")
        if path.name == "__init__.py" and imported[path] - {"compiled"}:
            found.append(f"{name(path)}: a package that imports")
    hold("re-exports", found)


def same_alias(path: Path) -> bool:
    """Whether a module has an import of the form ``import X as X``."""
    found = (node for node in nodes(path) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return any(alias.name == alias.asname for node in found for alias in node.names)
