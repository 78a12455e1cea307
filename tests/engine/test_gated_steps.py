"""A real engine beside a server: no step begins while users are served, and none has more tokens than allowed.

It keeps KV over updates, so that what this means is tested with the same engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from libra_hpc.engine.steplog import read_steps
from libra_hpc.engine.warm_up import PROMPT
from libra_hpc.gate.gated_steps import GateConfig
from libra_hpc.gate.page import Page
from libra_hpc.policies.serving.pauses import STAND_S
from libra_hpc.policies.serving.serving_view import ServingView
from libra_hpc.policies.serving.step_cost import GROWTH
from libra_hpc.policies.serving.step_gate import SILENT_S
from libra_hpc.protocol.engine import Abort, Generate, Generated, WeightsApplied
from libra_hpc.protocol.engine_state import PAUSED, EngineReady, EngineStats
from tests.gate.page_writer import PageWriter

from .engine_harness import EngineUnderTest, Model, bring, engine_config, logprobs_of, tokens_of, turn, versions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


class Server:
    """Writes the page as a server does that serves ``served`` users."""

    def __init__(self, path: Path) -> None:
        self.path, self.page, self._writer = path, Page.create(path), PageWriter(path)
        self.served, self.silent, self._ended = 0, False, threading.Event()
        self._lock = threading.Lock()
        self._write()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def serve(self, users: int) -> None:
        self.served = users
        self._write()

    def fall_silent(self, silent: bool) -> None:
        self.silent = silent
        self._write()

    def _write(self) -> None:
        with self._lock:
            now = time.monotonic()
            if not self.silent:
                view = ServingView(written=now, served=self.served)
                self._writer.write(view)

    def _run(self) -> None:
        while not self._ended.wait(0.05):
            self._write()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("p") / "page")
    yield one
    one.close()


@pytest.fixture(scope="module")
def gated(old: Model, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """One that starts while a user is served."""
    folder = tmp_path_factory.mktemp("g")
    limits = {"ttft_s": 0.5, "longest_s": STAND_S}
    gate = GateConfig(page=str(server.path), **limits)
    server.serve(1)
    log = str(folder / "steps.jsonl")
    config = engine_config(old, version=1, step_log=log, gate=gate, kv_after_update="keep")
    one = EngineUnderTest(folder, config)
    try:
        one.wait_phase(PAUSED)
        assert one.stats == [], "nothing is loaded"
        server.serve(0)
        one.expect(EngineReady)
        yield one
    finally:
        one.close()


@pytest.fixture(autouse=True)
def _nobody_is_served(server: Server) -> Iterator[None]:
    yield
    server.silent = False
    server.serve(0)


def open_and_idle(engine: EngineUnderTest) -> EngineStats:
    engine.idle()
    return engine.wait_stats(engine.reported, lambda one: one.running == one.waiting == 0 and not one.stands_still)


def stand_still(engine: EngineUnderTest, server: Server, *requests: Generate) -> EngineStats:
    """The report of an engine that was idle, got requests while a user is served, and now stands still."""
    before, since = open_and_idle(engine), len(engine.stats)
    server.serve(1)
    engine.send(*requests)
    report = engine.wait_stats(since, lambda report: report.stands_still)
    assert report.steps == before.steps
    assert report.paused_s - before.paused_s >= STAND_S
    assert report.busy_s == before.busy_s
    return report


def test_no_step_begins_while_a_user_is_served(gated: EngineUnderTest, server: Server, old: Model) -> None:
    prompt = list(range(3, 40))
    stand_still(gated, server, turn("served", prompt, 24, temperature=0.0))
    since = len(gated.stats)
    server.serve(0)
    assert tokens_of(gated.expect(Generated)) == old.greedy(prompt, 24)
    gated.wait_stats(since, lambda report: not report.stands_still)


def test_a_user_stops_a_turn_between_two_tokens(gated: EngineUnderTest, server: Server, old: Model) -> None:
    prompt = [7, 8, 9]
    open_and_idle(gated)
    gated.start(turn("stopped", prompt, 900, temperature=0.0))
    server.serve(1)
    since = len(gated.stats)
    first = gated.wait_stats(since, lambda report: report.stands_still)
    assert gated.wait_stats(len(gated.stats), lambda report: report.stands_still).steps == first.steps
    gated.send(Abort("stopped"))
    done = gated.expect(Generated)
    tokens = tokens_of(done)
    assert done.finish == "abort"
    assert tokens
    assert tokens == old.greedy(prompt, len(tokens))


def test_a_paused_engine_answers_aborts_and_takes_weights(gated: EngineUnderTest, server: Server, new: Model) -> None:
    stand_still(gated, server, turn("back", [5, 6], 8), turn("stays", [9, 4], 8, temperature=0.0))
    gated.send(Abort("back"))
    done = gated.expect(Generated)
    assert (done.rid, done.finish, done.tokens) == ("back", "abort", b"")
    gated.apply(new.update(version := next(versions)))
    server.serve(0)
    done = gated.expect(Generated)
    assert (tokens_of(done), done.versions) == (new.greedy([9, 4], 8), ((version, 8),))


def test_an_engine_without_turns_says_when_it_stands_still_no_more(gated: EngineUnderTest, server: Server) -> None:
    stand_still(gated, server, turn("gone", [5, 6], 8))
    gated.send(Abort("gone"))
    gated.expect(Generated)
    # It has nothing to do, and still takes no turns.
    assert gated.wait_stats(gated.reported, lambda report: report.waiting == 0).stands_still
    since = len(gated.stats)
    server.serve(0)
    gated.wait_stats(since, lambda report: not report.stands_still)


def test_a_silent_server_closes_the_gate(gated: EngineUnderTest, server: Server) -> None:
    before, since = open_and_idle(gated), len(gated.stats)
    server.fall_silent(True)
    time.sleep(SILENT_S)
    gated.send(turn("silent", [5, 6], 8))
    assert gated.wait_stats(since, lambda report: report.stands_still).steps == before.steps
    server.fall_silent(False)
    assert gated.expect(Generated).finish == "length"


def test_no_step_has_more_tokens_than_the_gate_allows(gated: EngineUnderTest) -> None:
    long = list(range(3, 103)) * 8
    gated.generate(*(turn(f"long{i}", [i, *long], 20) for i in range(8)))
    gated.idle()
    _, steps = read_steps(gated.config_path.with_name("steps.jsonl"))
    sizes = [step.decodes + step.prefill for step in steps]
    assert max(sizes) > PROMPT
    # Steps grow from the prompt of the warm-up profile, which the log has not.
    for number, size in enumerate(sizes):
        assert size <= GROWTH * max([PROMPT, *sizes[:number]])


def test_kept_kv_serves_the_groups_of_its_weights_and_no_later_one(
    gated: EngineUnderTest, old: Model, new: Model, tmp_path: Path
) -> None:
    image = old.image(tmp_path)
    first, second, third = next(versions), next(versions), next(versions)
    context = [11 + i % 90 for i in range(100)]

    def cached(rid: str, admitted: int) -> Generated:
        (done,) = gated.generate(turn(rid, context, 8, admitted=admitted))
        return done

    open_and_idle(gated)
    gated.apply(bring(image, first, load_file(old.weights)))
    assert [cached(f"a{i}", first).cached_tokens for i in range(2)] == [0, 96]
    running = turn("long", context[:40], 700, admitted=first)
    gated.start(running)
    gated.send(bring(image, second, load_file(new.weights)))
    messages = [gated.receive() for _ in range(2)]
    (applied,) = [message for message in messages if isinstance(message, WeightsApplied)]
    (done,) = [message for message in messages if isinstance(message, Generated)]
    assert applied.recomputed == 0
    assert [version for version, _ in done.versions] == [first, second]
    assert done.kv_version == -1, "its first span has that version"
    # A group goes on with what it has; a later one begins anew, and then has the new weights alone.
    old_kv = cached("b", first)
    assert (old_kv.cached_tokens, old_kv.versions, old_kv.kv_version) == (96, ((second, 8),), first)
    for rid, found in (("c", 0), ("d", 96)):
        later = cached(rid, second)
        assert (later.cached_tokens, later.kv_version) == (found, -1)
        assert logprobs_of(later) == pytest.approx(new.logprobs(context + tokens_of(later), 100), abs=1e-3)
    # An engine that lacks the version of the group does not pass its KV for one of that version.
    assert cached("early", third).cached_tokens == 96
    gated.apply(bring(image, third, load_file(old.weights), base=second))
    assert cached("late", third).cached_tokens == 0
    # Evaluations and warm-ups belong to no group.
    assert [cached(f"e{i}", -1).cached_tokens for i in range(2)] == [96, 96]
