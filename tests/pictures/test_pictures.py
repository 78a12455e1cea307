"""Pictures of runs and studies: whole SVG files whose texts are texts and do not overlap."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.pictures.report_charts import draw_run
from tests.browser import ensure_browser

from .eventful import make_eventful_run

OVERLAPS = """(() => {
  const texts = [...shown.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()])
  const whole = shown.querySelector('svg').getBoundingClientRect()
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom
  return texts.filter(([_, a], i) => a.left < whole.left || a.right > whole.right || a.bottom > whole.bottom
    || texts.some(([_, b], j) => i < j && meet(a, b))).map(([text, _]) => text)
})()"""


def texts_of(picture: Path) -> list[str]:
    return [found.text or "" for found in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_eventful_run(tmp_path)


def test_the_picture_of_a_run_has_reward_stages_and_nodes_over_one_time_axis(run: RunDir) -> None:
    draw_run(run, run.summary_picture)
    texts = texts_of(run.summary_picture)
    assert {run.name, "Reward over time", "Seconds per batch of each stage", "Nodes of each stage"} <= set(texts)
    assert texts.count("time with nodes") == texts.count("6:00") == 3
    assert texts.count("task mix drifts") == texts.count("engine or node lost") == texts.count("train") == 1


def test_a_picture_is_written_whole_or_not_at_all(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    for out, why in (("folder.svg", "Is a directory"), ("absent/picture.svg", "No such file or directory")):
        with pytest.raises(UserError, match=rf"{out} cannot be written \({why}\)\."):
            draw_run(run, tmp_path / out)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_no_text_covers_another(run: RunDir, tmp_path: Path) -> None:
    draw_run(run, run.summary_picture)
    assert ensure_browser().measure(run.summary_picture, OVERLAPS, tmp_path, [900]) == [[]]
