"""Metrics for an MLflow server, by its REST interface: the library wants other packages than the engines do.

The run there is found by a tag, so that every attempt goes on with it. What the server has already is not sent again,
and what was sent stays: as for W&B, steps only grow.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from libra_hpc.config.job import MlflowSection
from libra_hpc.facts.rundir import RunDir

ANSWER_S = 10.0
"""Limit of one request; double: a server that is gone holds up the other trackers for as long."""
MOST_METRICS = 1000
"""Most metrics of one request: the server's limit."""
TAG = "libra_hpc.run"
STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class Mlflow:
    """Asks the server with the first step; what it refuses or does not answer raises `OSError`."""

    name, lasting = "mlflow", True

    def __init__(self, run: RunDir, settings: MlflowSection) -> None:
        self._run, self._settings = run, settings
        self._id, self._have = "", 0
        """The run there, and the last step that it has."""

    def send(self, step: int, values: Mapping[str, float]) -> None:
        if not self._id:
            self._id, self._have = self._find()
        if step <= self._have:
            return
        at = int(1000 * values.get("t", time.time()))
        metrics = [
            {"key": key, "value": value, "timestamp": at, "step": step}
            for key, value in values.items()
            if key not in ("step", "t") and math.isfinite(value)
        ]
        for low in range(0, len(metrics), MOST_METRICS):
            self._post("runs/log-batch", run_id=self._id, metrics=metrics[low : low + MOST_METRICS])

    def _find(self) -> tuple[str, int]:
        experiment = self._experiment()
        mark = hashlib.sha256(str(self._run.path).encode()).hexdigest()[:32]
        wanted = f"tags.`{TAG}` = '{mark}'"
        found = self._post("runs/search", experiment_ids=[experiment], filter=wanted, max_results=1).get("runs")
        if not found:
            tags = [{"key": TAG, "value": mark}, {"key": "path", "value": str(self._run.path)}]
            now, name = int(1000 * time.time()), self._run.name
            made = self._post("runs/create", experiment_id=experiment, run_name=name, start_time=now, tags=tags)
            return str(made["run"]["info"]["run_id"]), 0
        steps = [int(metric.get("step", 0)) for metric in found[0]["data"].get("metrics", ())]
        return str(found[0]["info"]["run_id"]), max(steps, default=0)

    def _experiment(self) -> str:
        name = self._settings.experiment
        try:
            found = self._ask(f"experiments/get-by-name?experiment_name={urllib.parse.quote(name)}")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return str(self._post("experiments/create", name=name)["experiment_id"])
        return str(found["experiment"]["experiment_id"])

    def _post(self, what: str, **fields: Any) -> dict[str, Any]:
        return self._ask(what, json.dumps(fields).encode())

    def _ask(self, what: str, body: bytes | None = None) -> dict[str, Any]:
        address = f"{self._settings.uri.rstrip('/')}/api/2.0/mlflow/{what}"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json", **_credentials()})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            found: dict[str, Any] = json.loads(answer.read() or b"{}")
        return found

    def again(self, step: int) -> bool:
        return False

    def flush(self) -> None:
        """A request that was answered is kept."""

    def close(self) -> None:
        status = STATUS.get(str(self._run.read_json(self._run.result).get("state")))
        if self._id and status:
            self._post("runs/update", run_id=self._id, status=status, end_time=int(1000 * time.time()))


def _credentials() -> dict[str, str]:
    """Return the credentials in the variables that MLflow's own library reads."""
    token, user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("TOKEN", "USERNAME", "PASSWORD"))
    if token:
        return {"Authorization": f"Bearer {token}"}
    if user and password:
        return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
    return {}
