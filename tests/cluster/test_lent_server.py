"""A real vLLM server is lent to a run on real parts: the run trains what its guest says, and users notice nothing."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.facts.rundir import read_lines
from libra_hpc.protocol.joining import is_guest
from libra_hpc.protocol.trace import recorded
from tests.annexes.lend.served import Lent, wait

from .runs import ENGINE_MARKS, Case

pytestmark = [*ENGINE_MARKS, pytest.mark.chaos, pytest.mark.timeout(600)]
SERVED = (
    *("--served-model-name=m", "--dtype=float32", "--max-model-len=512", "--max-num-seqs=4", "--enforce-eager"),
    *("--kv-cache-memory-bytes=16777216", "--block-size=32", "--disable-uvicorn-access-log"),
)
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
PROMPT = {"model": "m", "prompt": list(range(3, 40)), "temperature": 0.0, "ignore_eos": True, "logprobs": 1}


class RealServer(Lent):
    def __init__(self, case: Case, model: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        # What `vllm serve` runs; its program asks for a version that the wheel for CPUs does not have.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", *SERVED]
        super().__init__(case, [*command, "--host=127.0.0.1", f"--port={self._port}"])

    def answer(self) -> dict[str, Any]:
        """Of a user, with the log-probability of each token."""
        (choice,) = json.loads(self.post(self._port, {**PROMPT, "max_tokens": 64}))["choices"]
        return {"text": choice["text"], "logprobs": choice["logprobs"]["token_logprobs"]}

    def is_up(self) -> bool:
        assert self.server.poll() is None, self.log.read_text()[-3000:]
        try:
            return bool(self.answer())
        except OSError:
            return False


@contextmanager
def lent_server(case: Case, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealServer]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    lent = RealServer(case, model)
    try:
        yield lent
        lent.server.terminate()
        lent.server.wait(60)
        wait(lambda: not list(lent.place.iterdir()), "the end of the lender, which removes its record")
    finally:
        lent.end()
        # A failed test leaves no run behind.
        case.cli("cancel", str(case.folder / "runs" / "t-001"), check=False)


def test_a_run_borrows_a_vllm_server_whose_users_get_the_same_answers(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, policy, "local", steps=2000, hybrid=0)
    case.run_file.write_text(case.run_file.read_text() + "[borrow]\nlenders = ['*']\n")
    (tmp_path / "runs").mkdir()
    with lent_server(case, policy, monkeypatch) as lent:
        # With eta = 0 every token is of the weights that it trains.
        run = case.submit("-o", "algorithm.eta=0", "-o", "planner.enabled=false", "-o", "rollout.max_inflight=4")
        wait(lent.is_up, "the server", 300.0)
        alone = lent.answer()
        case.wait(lambda: any(line["lent_tokens"] for line in read_lines(run.metrics)), "trained tokens of the guest")
        assert lent.wait("lends")["borrower"] == str(run.path)

        def has_paused() -> bool:
            assert lent.answer() == alone
            return any("served" in one["paused"] for one in run.read_json(run.status)["lenders"])

        case.wait(has_paused, "a pause of the guest while a user was served")
        case.cli("lend", "revoke", name := lent.wait("lends")["name"])
        assert lent.wait("paused")["revoked"] == 1
        served = len(case.events("guest_serves"))
        case.cli("lend", "revoke", name, "--return")
        case.wait(lambda: len(case.events("guest_serves")) > served, "the same guest, awake")
        assert len(case.events("guest_joined")) == 1
        before = len(case.steps())
        case.wait(lambda: len(case.steps()) > before + 2, "steps after it")
        case.cli("cancel", str(run.path))
        assert case.ended() == "cancelled"
        free = lent.wait("free")
        assert (free["borrower"], free["tokens"] > 0) == ("", True)
        assert lent.answer() == alone

    lines = list(read_lines(run.metrics))
    assert max(line["staleness_max"] for line in lines) == 0
    assert max(line["logprob_gap"] for line in lines if line["lent_tokens"]) < 1e-3
    said = [turn.engine for one in recorded(run.trajectories) for turn in one.turns]
    assert any(is_guest(int(engine[1:].partition(".")[0])) for engine in said)
    applied = [event["version"] for event in case.events("weights_applied") if event["guests"]]
    assert len(applied) > 1, "it took new weights while it served"
    assert applied == sorted(applied), "once more what it had when it fell asleep"
    assert not case.events("guest_lost")
