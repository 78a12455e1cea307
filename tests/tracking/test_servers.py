"""MLflow and Prometheus: what is asked of a server, and what one serves."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.tracking import sidecar
from libra_hpc.tracking.prometheus import Prometheus, exposition

from .test_sidecar import line


class MlflowServer(BaseHTTPRequestHandler):
    """The part of an MLflow server that is asked for; ``log`` has (step, key, value) in order."""

    experiments: dict[str, str] = {}
    runs: list[dict[str, Any]] = []
    log: list[tuple[int, str, float]] = []
    refuses: set[int] = set()
    """Steps that are refused once, behind their first metric."""
    asked_with: set[str | None] = set()

    def do_GET(self) -> None:
        name = self.path.partition("experiment_name=")[2]
        found = self.experiments.get(name)
        self.answer({"experiment": {"experiment_id": found}} if found else {}, 200 if found else 404)

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked_with.add(self.headers["Authorization"])
        match self.path.removeprefix("/base/api/2.0/mlflow/"):
            case "experiments/create":
                self.experiments[fields["name"]] = "7"
                self.answer({"experiment_id": "7"})
            case "runs/search":
                mark = fields["filter"].split("'")[1]
                own = [run for run in self.runs if run["tags"][0]["value"] == mark]
                steps = [{"step": step} for step, *_ in self.log]
                self.answer({"runs": [{"info": run["info"], "data": {"metrics": steps}} for run in own]})
            case "runs/create":
                self.runs.append({"info": {"run_id": "r1", "run_name": fields["run_name"]}, "tags": fields["tags"]})
                self.answer({"run": {"info": {"run_id": "r1"}}})
            case "runs/log-batch":
                step = fields["metrics"][0]["step"]
                refused = step in self.refuses
                self.refuses.discard(step)
                if not refused:
                    self.log += [(one["step"], one["key"], one["value"]) for one in fields["metrics"]]
                self.answer({}, 503 if refused else 200)
            case "runs/update":
                self.runs[0]["status"] = fields["status"]
                self.answer({})

    def answer(self, fields: dict[str, Any], code: int = 200) -> None:
        text = json.dumps(fields).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def mlflow() -> Iterator[tuple[str, type[MlflowServer]]]:
    fresh: dict[str, Any] = {"experiments": {}, "runs": [], "log": [], "refuses": set(), "asked_with": set()}
    handler = type("Fresh", (MlflowServer,), fresh)
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/base/", handler
    server.shutdown()
    server.server_close()


def tracked(folder: Path, steps: Sequence[int], **track: Any) -> RunDir:
    run = RunDir.create(folder, "t")
    run.write_json(run.config, validate({"track": track}).model_dump())
    run.metrics.write_text("".join(line(step, step / 2) for step in steps))
    return run


def test_mlflow_has_each_step_once_whatever_ends_the_sidecar(
    tmp_path: Path, mlflow: tuple[str, type[MlflowServer]], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    uri, server = mlflow
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    run = tracked(tmp_path, range(1, 6), mlflow={"uri": uri, "experiment": "mine"})
    server.refuses.add(4)
    sidecar.follow(run, lambda: True)
    assert "mlflow: HTTPError: HTTP Error 503" in capsys.readouterr().err
    assert sidecar.Sent(run).last("mlflow")[0] == 3
    # Killed between sending and recording it.
    sidecar.Sent(run).record("mlflow", 1, 0)
    run.write_json(run.result, {"state": "completed"})
    sidecar.follow(run, lambda: True)
    assert server.log == [(step, "reward", step / 2) for step in range(1, 6)]
    assert [one["info"]["run_name"] for one in server.runs] == [run.name]
    assert server.runs[0]["status"] == "FINISHED"
    assert server.asked_with == {"Bearer secret"}


def test_a_server_that_is_gone_costs_no_other_tracker(tmp_path: Path, capsys: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        run = tracked(tmp_path, (1,), mlflow={"uri": f"http://127.0.0.1:{port}"}, prometheus_port=port)
        assert sidecar.follow(run, lambda: True) == ["mlflow", "prometheus"]
    told = capsys.readouterr().err
    assert "mlflow: URLError" in told
    assert "prometheus: OSError" in told


def test_the_newest_step_is_served_also_by_a_sidecar_that_came_back(tmp_path: Path) -> None:
    for steps in ((1, 2), (1, 2, 3)):
        tracker = Prometheus("my run", "127.0.0.1", 0)
        feed = sidecar.Feed(tracker, tracked(tmp_path / str(len(steps)), steps), sidecar.Sent(RunDir(tmp_path)))
        feed.pass_on()
        assert tracker._server is not None
        address = f"http://127.0.0.1:{tracker._server.server_port}"
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert f'libra_hpc_step{{run="my run"}} {steps[-1]:.1f}\n' in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(address)
        tracker.close()


def test_lines_of_a_metric_stand_together_and_names_are_those_of_prometheus() -> None:
    values = {"reward": 0.5, "dapo/reward": 0.25, "a/kl": float("nan"), "a/kl-2": float("inf"), "a/kl-3": -1.0}
    assert exposition("x", values).decode() == (
        "# TYPE libra_hpc_reward gauge\n"
        'libra_hpc_reward{run="x"} 0.5\n'
        'libra_hpc_reward{run="x",task="dapo"} 0.25\n'
        "# TYPE libra_hpc_kl_3 gauge\n"
        'libra_hpc_kl_3{run="x",task="a"} -1.0\n'
    )
    assert exposition('a"b\\c', {"kl": 1.0}).decode().endswith('{run="a\\"b\\\\c"} 1.0\n')
