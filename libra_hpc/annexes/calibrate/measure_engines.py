"""Measures the steps of several engines of one machine at once, as they share it in a run.

Each engine is a process (`measure_steps` with ``--together``). They begin when all are up, and stay loaded until the
last one has measured.
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

from libra_hpc.engine.settings import EngineConfig, check_config
from libra_hpc.errors import OperationError, UserError
from libra_hpc.models.step_times.measured import Calibration, load
from libra_hpc.process.visible_devices import engine_environment

from .measure_steps import PREFIX

LEAVE_S = 30.0
"""Seconds an engine may take to end after its measurement."""
READ_BYTES = 1 << 16
"""Most bytes of one read from an engine's stdout."""
QUOTED = 2000
"""Characters of a failed engine's log in the error."""

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""


class _Process:
    def __init__(self, number: int, config: EngineConfig, *, device: str, model: str, folder: Path) -> None:
        self.out, self.log = folder / f"{number}.json", folder / f"{number}.log"
        self.up, self.done, self.total = False, 0, 0
        self._rest = b""
        path = folder / f"{number}.config.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(config, seed=config.seed + number)))
        command = [
            sys.executable,
            "-m",
            "libra_hpc.annexes.calibrate.measure_steps",
            "--config",
            str(path),
            "--device",
            device,
            "--model",
            model,
        ]
        run, tp = config.run, config.tp
        environment = engine_environment(
            os.environ, run.slurm.device, first=number * tp, count=tp, threads=run.rollout.threads
        )
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
        return self.total > 0 and self.done == self.total

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def read(self) -> None:
        """Read its progress; raises when it has ended instead."""
        chunk = os.read(self.stdout.fileno(), READ_BYTES)
        if not chunk:
            raise self.failure()
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for words in map(bytes.split, lines):
            if words[:1] != [PREFIX.encode()]:
                continue
            if words[1] == b"up":
                self.up = True
            else:
                self.done, self.total = int(words[1]), int(words[2])

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def leave(self) -> None:
        """Let it write its calibration and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def failure(self) -> UserError | OperationError:
        """The error of an engine that has ended too early."""
        code = self.process.wait()
        text = self.log.read_text(errors="replace").strip()
        if code == UserError.exit_code and text:
            return UserError(text.splitlines()[-1])
        return OperationError(
            f"The engine ended with {code} before it was measured: {text[-QUOTED:] or 'its log is empty'}"
        )

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.stdout.close()


def measure_engines(
    config: EngineConfig, engines: int, device: str, model: str, progress: Progress = lambda what, done, total: None
) -> Calibration:
    """Measure ``engines`` engines of one configuration at once, into one calibration.

    On CUDA the n-th engine has the n-th ``tp`` devices. Raises `UserError` for a model that cannot be served,
    `OperationError` when an engine fails.
    """
    check_config(config)
    parts: list[_Process] = []
    with tempfile.TemporaryDirectory(prefix="libra-calibrate-") as name:
        try:
            for number in range(engines):
                parts.append(_Process(number, config, device=device, model=model, folder=Path(name)))
            progress("starting", 0, engines)
            _until(parts, lambda part: part.up, lambda: progress("starting", sum(part.up for part in parts), engines))
            for part in parts:
                part.begin()
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


def _until(parts: Sequence[_Process], reached: Callable[[_Process], bool], progress: Callable[[], None]) -> None:
    """Read the progress of all processes until each has ``reached`` a point; ``progress()`` after every read."""
    with selectors.DefaultSelector() as selector:
        for part in parts:
            selector.register(part.stdout, selectors.EVENT_READ, part)
        while not all(map(reached, parts)):
            for key, _ in selector.select():
                key.data.read()
                progress()


def _merged(found: Sequence[Calibration]) -> Calibration:
    # The smallest cache: every engine has at least that.
    capacity = {tp: min(one.kv_capacity[tp] for one in found) for tp in found[0].kv_capacity}
    return msgspec.structs.replace(
        found[0], kv_capacity=capacity, points=[point for one in found for point in one.points]
    )
