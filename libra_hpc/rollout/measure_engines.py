"""Calibrate several engines of one machine at once: what each takes while the others work, which is what a run will
see.

Each engine is a process of its own (`libra_hpc.rollout.measure_steps` with ``--together``).  They begin when all are
up, and stay loaded until the last one has measured.  An engine alone is the case of one.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from libra_hpc.errors import OperationError, UserError
from libra_hpc.hardware.measured import Calibration, load
from libra_hpc.process.visible_devices import engine_environment
from libra_hpc.rollout.engine.settings import EngineConfig, check_config

from .measure_steps import SAYS

LEAVE_S = 30.0
"""For an engine to end when it was told to."""
READ_BYTES = 1 << 16
QUOTED = 2000
"""Characters of a failed engine's log in the error."""

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""


class _Part:
    """One engine's process."""

    def __init__(self, number: int, config: EngineConfig, device: str, model: str, folder: Path) -> None:
        self.out, self.log = folder / f"{number}.json", folder / f"{number}.log"
        self.up, self.done, self.total = False, 0, 0
        self._rest = b""
        path = folder / f"{number}.config.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(config, seed=config.seed + number)))
        command = [
            sys.executable,
            "-m",
            "libra_hpc.rollout.measure_steps",
            "--config",
            str(path),
            "--device",
            device,
            "--model",
            model,
        ]
        environment = engine_environment(os.environ, config.device, number * config.tp, config.tp, config.threads)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--out", str(self.out), "--together"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )

    @property
    def finished(self) -> bool:
        """Whether every plan is measured."""
        return self.total > 0 and self.done == self.total

    @property
    def stdout(self) -> IO[bytes]:
        """What it says."""
        assert self.process.stdout is not None
        return self.process.stdout

    def read(self) -> None:
        """Take in what it has said; raises when it has ended instead."""
        chunk = os.read(self.stdout.fileno(), READ_BYTES)
        if not chunk:
            raise self.failure()
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for words in map(bytes.split, lines):
            if words[:1] != [SAYS.encode()]:
                continue
            if words[1] == b"up":
                self.up = True
            else:
                self.done, self.total = int(words[1]), int(words[2])

    def say(self) -> None:
        """Begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def leave(self) -> None:
        """Tell it to write what it found and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def failure(self) -> UserError | OperationError:
        """What went wrong."""
        code = self.process.wait()
        text = self.log.read_text(errors="replace").strip()
        if code == UserError.exit_code and text:
            return UserError(text.splitlines()[-1])
        return OperationError(
            f"The engine ended with {code} before it was measured: {text[-QUOTED:] or 'it said nothing'}"
        )

    def kill(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.stdout.close()


def measure_engines(
    config: EngineConfig, engines: int, device: str, model: str, progress: Progress = lambda what, done, total: None
) -> Calibration:
    """Measure ``engines`` engines of one configuration at once; their steps are those of one calibration.

    On CUDA the n-th engine has the n-th ``tp`` devices.  Raises `UserError` for a model that cannot be served,
    `OperationError` when an engine fails.
    """
    check_config(config)
    parts: list[_Part] = []
    with tempfile.TemporaryDirectory(prefix="libra-calibrate-") as name:
        try:
            for number in range(engines):
                parts.append(_Part(number, config, device, model, Path(name)))
            progress("starting", 0, engines)
            _until(parts, lambda part: part.up, lambda: progress("starting", sum(part.up for part in parts), engines))
            for part in parts:
                part.say()
            _until(
                parts,
                lambda part: part.finished,
                lambda: progress("measuring", sum(part.done for part in parts), sum(part.total for part in parts)),
            )
            for part in parts:
                part.leave()
            for part in parts:
                if part.process.wait(LEAVE_S):
                    raise part.failure()
            return _merged([load(part.out) for part in parts])
        except subprocess.TimeoutExpired as error:
            raise OperationError(f"An engine did not end within {LEAVE_S:.0f} s after it was measured.") from error
        finally:
            for part in parts:
                part.kill()


def _until(parts: Sequence[_Part], reached: Callable[[_Part], bool], heard: Callable[[], None]) -> None:
    """Read what the processes say until each has reached something."""
    with selectors.DefaultSelector() as selector:
        for part in parts:
            selector.register(part.stdout, selectors.EVENT_READ, part)
        while not all(map(reached, parts)):
            for key, _ in selector.select():
                key.data.read()
                heard()


def _merged(found: Sequence[Calibration]) -> Calibration:
    # The smallest cache is what every engine has.
    capacity = {tp: min(one.kv_capacity[tp] for one in found) for tp in found[0].kv_capacity}
    return msgspec.structs.replace(
        found[0], kv_capacity=capacity, points=[point for one in found for point in one.points]
    )
