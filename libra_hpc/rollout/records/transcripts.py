"""The text of the policy: ``transcripts/step-N.jsonl.zst`` has the trajectories that step N was trained on.

It also has attempts that failed meanwhile. ``step-N-NAME.jsonl.zst`` has the trajectories of the evaluation ``NAME``.

One Zstandard frame per trajectory, each one line of JSON (`Transcript`); a file is complete when it is there. A step
that is trained again replaces its file. Beyond the run's budget the oldest files go, so that the newest are kept.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard

from libra_hpc.files import write_atomic
from libra_hpc.protocol.agents import Group
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.rollout.trajectory import Trajectory

_NAME = re.compile(r"^step-(\d+)(?:-(.*))?\.jsonl\.zst$")
LEVEL = 3
"""Level of compression: a token id takes about two bytes; 9 saves a tenth for five times the time."""
CHUNK_BYTES = 1 << 14
"""Bytes of one read: what is behind a frame is copied once for each frame of a chunk."""


class Transcript(TrajectoryRecord, kw_only=True):
    """A trajectory as it was trained, or evaluated, or failed."""

    step: int
    uid: str
    """``index.sample``; the trainer's samples have their number besides."""
    sample: int = 0
    reward: float = 0.0
    advantage: float
    tokens: tuple[int, ...]
    """They are the prompt, then of each turn ``new_tokens`` of the environment and ``gen_tokens``; those of its samples
    follow one another.
    """
    error: str = ""
    """Why it failed."""

    def segments(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(who, token ids) in order: ``prompt``, ``policy``, and what a turn's ``new_tokens`` came from.

        The prompt of another sample is ``new sample``.
        """
        at = self.prompt_tokens
        if not self.tokens:
            return
        yield "prompt", self.tokens[:at]
        tool = ""
        for turn in self.turns:
            if turn.new_tokens:
                who = "new sample" if turn.new_sample else tool or "environment"
                yield who, self.tokens[at : at + turn.new_tokens]
                at += turn.new_tokens
            yield "policy", self.tokens[at : at + turn.gen_tokens]
            at += turn.gen_tokens
            tool = f"{turn.tool}, {turn.outcome or 'ok'}, {turn.tool_s:.1f} s" if turn.tool else ""


_decoder = msgspec.json.Decoder(Transcript)


def files(folder: Path) -> dict[tuple[int, str], Path]:
    """All transcripts by step and evaluation, in order; empty: of training."""
    named = ((_NAME.match(path.name), path) for path in folder.glob("step-*"))
    return dict(sorted(((int(match[1]), match[2] or ""), path) for match, path in named if match))


def steps(folder: Path, evaluation: str = "") -> dict[int, Path]:
    """Transcripts of training, or of an evaluation, by step, in order."""
    return {step: path for (step, name), path in files(folder).items() if name == evaluation}


def read(path: Path, torn: Callable[[str], None] = lambda why: None) -> Iterator[Transcript]:
    """The whole records of a file; where one was cut off or damaged, ``torn`` gets a sentence and nothing follows."""
    whole, decode = 0, _decoder.decode
    with path.open("rb") as handle:
        try:
            for frame in _frames(handle):
                yield decode(frame)
                whole += 1
        except (zstandard.ZstdError, msgspec.DecodeError) as error:
            torn(f"{path.name} is damaged behind {whole} whole trajectories ({error})")


def _frames(handle: BinaryIO) -> Iterator[bytes]:
    """The content of each frame; raises `ZstdError` for one that is damaged or not whole."""
    chunk = handle.read(CHUNK_BYTES)
    while chunk:
        frame, content = zstandard.ZstdDecompressor().decompressobj(), b""
        while chunk and not frame.eof:
            content += frame.decompress(chunk)
            chunk = frame.unused_data if frame.eof else handle.read(CHUNK_BYTES)
        if not frame.eof:
            raise zstandard.ZstdError("the last one was cut off")
        chunk = chunk or handle.read(CHUNK_BYTES)
        yield content


class TranscriptWriter:
    """Writes into ``folder``, at most ``budget`` bytes; the methods may take as long as the file system."""

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder, self._budget = folder, budget
        self._sizes = {key: path.stat().st_size for key, path in files(folder).items()}
        for unfinished in folder.glob(".step-*"):  # of a writer that was killed
            unfinished.unlink(missing_ok=True)

    def write(
        self, step: int, trajectories: Sequence[Trajectory], groups: Iterable[Group], evaluation: str = ""
    ) -> int:
        """Write the file of a step, or of its evaluation; returns how many older files were removed for it.

        Raises `OSError`.
        """
        compress = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress
        encode = msgspec.json.encode
        samples = [sample for group in groups for sample in group.samples]
        advantages = {sample.trajectory: sample.advantage for sample in samples}
        records = (
            Transcript(
                **t.numbers,
                step=step,
                uid=t.uid,
                advantage=advantages.get(t.uid, 0.0),
                tokens=tuple(array("i", t.tokens)),
                error=t.error,
            )
            for t in trajectories
        )
        data = b"".join(compress(encode(record) + b"\n") for record in records)
        self._folder.mkdir(exist_ok=True)
        removed, key = 0, (step, evaluation)
        self._sizes.pop(key, None)
        while self._sizes and sum(self._sizes.values()) + len(data) > self._budget:
            oldest = min(self._sizes)
            self._path(*oldest).unlink(missing_ok=True)
            del self._sizes[oldest]
            removed += 1
        write_atomic(self._path(*key), data)
        self._sizes[key] = len(data)
        return removed

    def _path(self, step: int, evaluation: str) -> Path:
        return self._folder / f"step-{step:06d}{'-' * bool(evaluation)}{evaluation}.jsonl.zst"
