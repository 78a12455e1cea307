"""Acceptance of drafts without a model (n-gram, suffix tree) on recorded token streams.

Input: a trace whose lines also have ``tokens``, all token ids of the trajectory. Every turn is replayed as a request:
its first token comes from prefill, and each further step verifies a draft of up to k tokens. A recorded token that
equals the draft is accepted. At the recorded temperature that is, in expectation, vLLM's acceptance of such drafts.

Drafts come from vLLM's own classes. The suffix tree needs the package ``arctic-inference``; without it those rows are
left out. *Siblings*: all other trajectories of the prompt are known, as for the last one of a group. vLLM's n-gram
drafts have no such source; here the siblings stand in front of the context.

    python -m bench.speculation --trace runs.jsonl [--k 2,4,8] [--longest] [--json out.json]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
import numpy as np

from bench.harness import options, progress, report
from libra_hpc.protocol.trace import TurnRecord

NGRAM = (2, 5)
"""Tokens of the shortest and longest match."""
TREE_DEPTH = 24
"""vLLM's default: tokens of a match and its continuation."""


class Stream(msgspec.Struct, frozen=True):
    """One trajectory with its tokens; other fields of the line are ignored."""

    prompt_id: str
    sample: int
    prompt_tokens: int
    turns: tuple[TurnRecord, ...]
    tokens: tuple[int, ...]

    def generated(self) -> Iterable[tuple[int, int]]:
        """(first, end) of each turn's generated tokens."""
        at = self.prompt_tokens
        for turn in self.turns:
            at += turn.new_tokens
            yield at, at + turn.gen_tokens
            at += turn.gen_tokens


class Drafter(Protocol):
    """A source of drafts for one request after another."""

    def begin(self, rid: str, prompt: np.ndarray) -> None:
        """A new request; the earlier one has ended."""

    def draft(self, rid: str, sampled: list[int], context: np.ndarray) -> list[int]:
        """Draft after ``sampled``, the newest tokens of ``context``."""


class NgramDrafts:
    """`NgramProposer` over the request's own context, optionally with siblings in front."""

    def __init__(self, k: int, longest: int, siblings: Sequence[Stream]) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        self._front = np.array([token for stream in siblings for token in stream.tokens], np.int32)
        self._row = np.zeros((1, len(self._front) + longest), np.int32)
        self._row[0, : len(self._front)] = self._front
        self._k = k
        self._proposer = NgramProposer(_settings(k, self._row.shape[1] + k))

    def begin(self, rid: str, prompt: np.ndarray) -> None:
        pass

    def draft(self, rid: str, sampled: list[int], context: np.ndarray) -> list[int]:
        length = len(self._front) + len(context)
        self._row[0, len(self._front) : length] = context
        return self._proposer.propose(self._k, [sampled], np.array([length], np.int32), self._row)[0]


class SuffixDrafts:
    """`SuffixDecodingProposer`; siblings are earlier requests of the same engine."""

    def __init__(self, k: int, longest: int, siblings: Sequence[Stream]) -> None:
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        self._k = k
        self._proposer = SuffixDecodingProposer(_settings(k, longest + k, cached=10_000 if siblings else 0))
        for stream in siblings:
            for number, (first, end) in enumerate(stream.generated()):
                self._proposer.suffix_cache.start_request(rid := f"{stream.sample}/{number}", [])
                self._proposer.suffix_cache.add_active_response(rid, list(stream.tokens[first:end]))
                self._proposer.suffix_cache.stop_request(rid)
        self._prompt = np.zeros(0, np.int32)

    def begin(self, rid: str, prompt: np.ndarray) -> None:
        self._prompt = prompt

    def draft(self, rid: str, sampled: list[int], context: np.ndarray) -> list[int]:
        batch = SimpleNamespace(
            req_ids=[rid],
            req_id_to_index={rid: 0},
            num_tokens_no_spec=[len(context)],
            num_prompt_tokens=[len(self._prompt)],
            token_ids_cpu=context[None, :],
        )
        return list(self._proposer.propose(self._k, batch, [sampled])[0])  # type: ignore[arg-type]


MakeDrafter = Callable[[int, int, Sequence[Stream]], Drafter]
"""From k, the tokens of the longest trajectory, and the siblings."""
DRAFTS: dict[str, MakeDrafter] = {"n-gram": NgramDrafts, "suffix": SuffixDrafts}


class Counts(msgspec.Struct):
    """Sums over decode steps, which do not include prefills."""

    steps: int = 0
    drafts: int = 0
    """Steps with a draft."""
    drafted: int = 0
    accepted: int = 0

    def row(self) -> dict[str, float]:
        return {
            "steps": self.steps,
            "with_draft": self.drafts / max(1, self.steps),
            "drafted": self.drafted / max(1, self.steps),
            "accepted": self.accepted / max(1, self.steps),
            "acceptance": self.accepted / max(1, self.drafted),
        }


def replay(stream: Stream, drafter: Drafter, counts: Counts) -> None:
    """Count the steps that speculation needs for one trajectory."""
    tokens = np.array(stream.tokens, np.int32)
    for number, (first, end) in enumerate(stream.generated()):
        rid = f"own/{stream.sample}/{number}"
        drafter.begin(rid, tokens[:first])
        at, sampled = first + 1, [stream.tokens[first]] if end > first else []
        while at < end:
            draft = drafter.draft(rid, sampled, tokens[:at])
            hits = 0
            # vLLM drops what follows the last token of a turn.
            while hits < len(draft) and at + hits < end and draft[hits] == stream.tokens[at + hits]:
                hits += 1
            after = min(end, at + hits + 1)
            counts.steps += 1
            counts.drafts += bool(draft)
            counts.drafted += len(draft)
            counts.accepted += after - at - 1
            sampled, at = list(stream.tokens[at:after]), after


def measure(streams: Sequence[Stream], k: int, make: MakeDrafter, *, siblings: bool, longest: bool) -> Counts:
    """Replay every trajectory, or only the longest of each group."""
    groups: dict[str, list[Stream]] = defaultdict(list)
    for stream in streams:
        groups[stream.prompt_id].append(stream)
    counts = Counts()
    for group in groups.values():
        room = max(len(stream.tokens) for stream in group)
        last = max(group, key=lambda stream: sum(turn.gen_tokens for turn in stream.turns))
        for stream in [last] if longest else group:
            others = [other for other in group if siblings and other is not stream]
            replay(stream, make(k, room, others), counts)
    return counts


def read(path: Path) -> list[Stream]:
    decoder = msgspec.json.Decoder(Stream)
    return [decoder.decode(line) for line in path.read_bytes().splitlines() if line.strip()]


def _settings(k: int, room: int, cached: int = 0) -> Any:
    """The part of a `VllmConfig` that the proposers read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=NGRAM[0],
            prompt_lookup_max=NGRAM[1],
            num_speculative_tokens=k,
            suffix_decoding_max_tree_depth=TREE_DEPTH,
            suffix_decoding_max_spec_factor=1.0,
            suffix_decoding_min_token_prob=0.1,
            suffix_decoding_max_cached_requests=cached,
        ),
        model_config=SimpleNamespace(max_model_len=room),
        scheduler_config=SimpleNamespace(max_num_seqs=1024),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def rows(
    streams: Sequence[Stream], ks: Sequence[int], longest: bool, drafts: Mapping[str, MakeDrafter]
) -> list[dict[str, Any]]:
    """One row for each kind of draft; those with siblings only if a prompt has several trajectories."""
    grouped = len({stream.prompt_id for stream in streams}) < len(streams)
    found = []
    for method, make in drafts.items():
        for siblings in (False, True) if grouped else (False,):
            for k in ks:
                progress(f"{method}, siblings: {siblings}, k = {k} ...")
                counts = measure(streams, k, make, siblings=siblings, longest=longest)
                found.append({"draft": method, "siblings": siblings, "k": k, **counts.row()})
    return found


COLUMNS = ("draft", "siblings", "k", "steps", "with draft", "drafted", "accepted", "of drafted")
LINE = "{steps:,} {with_draft:.0%} {drafted:.2f} {accepted:.2f} {acceptance:.0%}"


def main() -> None:
    """Command line."""
    given = options("speculation", __doc__, trace=True, k=[2, 4, 8], longest=False)
    if not given.trace:
        given.error("--trace FILE is needed: JSON lines of a trace, each with its tokens")
    drafts = dict(DRAFTS)
    if not find_spec("arctic_inference"):
        del drafts["suffix"]
        progress("arctic-inference is not installed: no rows for the suffix tree")
    streams = [stream for path in given.trace for stream in read(Path(path))]
    found = rows(streams, given.k, given.longest, drafts)
    lines = [[row["draft"], "yes" if row["siblings"] else "no", row["k"], *LINE.format(**row).split()] for row in found]
    notes = ["drafted, accepted: tokens per decode step"]
    report(given, "Accepted drafts", columns=COLUMNS, rows=lines, notes=notes, raw=found)


if __name__ == "__main__":
    main()
