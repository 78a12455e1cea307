"""Which boxes work on a node and what they cost: `libra-hpc env probe`, `doctor` and `check` try them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from libra_hpc.config.job import EnvSection
from libra_hpc.errors import OperationError, UserError, error_text

from .box import Box
from .providers import chosen

TRIALS = 5
"""Boxes of each kind: their median leaves out the first one, which reads cold files."""
LIMIT_S = 20.0
"""A command that does nothing takes 30 ms; an image on a cold file system takes seconds."""


class TriedBox(NamedTuple):
    """What came of the trial of one kind."""

    sandbox: str
    """``bwrap``, ``none``, or the program of ``env.box``."""
    why: str
    """Why it does not work, as a sentence; empty: it works."""
    start_s: float = 0.0
    """Median seconds until a new box has run a first command."""
    command_s: float = 0.0
    """Median seconds of a further command."""

    @property
    def cost(self) -> str:
        return f"{1e3 * self.start_s:.0f} ms a start, {1e3 * self.command_s:.0f} ms a command"


def tried(env: EnvSection) -> TriedBox:
    """The kind that ``[env]`` asks for, on this node."""
    own = env.box[0] if env.box and env.sandbox == "auto" else "bwrap"
    name = "none" if env.sandbox == "none" else Path(own).name
    try:
        return asyncio.run(_tried(name, env))
    except (UserError, OperationError) as error:
        return TriedBox(name, str(error))
    except OSError as error:
        return TriedBox(name, f"A box cannot be made on this node: {error_text(error)}.")


def tried_all(env: EnvSection) -> list[tuple[str, str, float, float]]:
    """Every kind, as plain tuples of `TriedBox`, which an interpreter without this package can read."""
    found = [tried(_of(env, sandbox="bwrap"))]
    if env.box:
        found.append(tried(_of(env, sandbox="auto")))
    else:
        there = "needs an image, which env.box names" if shutil.which("apptainer") else "is not on this node"
        found.append(TriedBox("apptainer", f"Apptainer {there}."))
    return [(*one,) for one in (*found, tried(_of(env, sandbox="none")))]


def _of(env: EnvSection, sandbox: str) -> EnvSection:
    return msgspec.structs.replace(env, sandbox=sandbox)


async def _tried(name: str, env: EnvSection) -> TriedBox:
    provider = chosen(env)
    starts, commands = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="libra-box-") as folder:
        for _ in range(TRIALS):
            began = time.perf_counter()
            box = Box(folder, provider, env)
            try:
                for seconds in (starts, commands):
                    ran = await box.run(["true"], timeout_s=LIMIT_S)
                    seconds.append(time.perf_counter() - began)
                    began = time.perf_counter()
                    if ran.exit_code:
                        how = f"took longer than {LIMIT_S:g} s" if ran.limit else f"ended with {ran.exit_code}"
                        output = ran.output.strip()[-200:]
                        raise OperationError(f"A command that does nothing {how}{output and f': {output}'}.")
            finally:
                await box.close()
    return TriedBox(name, "", median(starts), median(commands))
