"""The goals of `make accuracy`: figures by hand, what misses them, plans that are legal on their clusters."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.emulated import BATCH, GOALS, MODEL, SETTINGS, accuracy_of, judged, missed

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.model import model_from_config
from shardwise.strategy import Job, complete, parse_fields


def rows(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"predicted_s": predicted, "measured_s": measured} for predicted, measured in pairs]


def test_figures_by_hand() -> None:
    # Accuracies 0.9, 1 and 0.75; the first is predicted best, measured 2.0 of a best of 1.9: 0.1 / 1.9.
    # Pairs: (1, 2) predicted up, measured down; (1, 3) both up; (2, 3) both up: tau (2 - 1) / 3.
    found = judged(rows((1.8, 2.0), (1.9, 1.9), (3.0, 4.0)))
    assert found["mean_accuracy"] == pytest.approx((0.9 + 1.0 + 0.75) / 3)
    assert found["worst_accuracy"] == pytest.approx(0.75)
    assert found["regret"] == pytest.approx(2.0 / 1.9 - 1)
    assert found["kendall_tau"] == pytest.approx(1 / 3)
    assert accuracy_of(3.0, 2.0) == pytest.approx(0.5)


def test_every_goal_can_be_missed() -> None:
    met = dict(GOALS)
    assert list(missed(met)) == []
    for name, goal in GOALS.items():
        worse = goal + 0.001 if name == "regret" else goal - 0.001
        (line,) = missed(met | {name: worse})
        assert line.startswith(name)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_plans_of_a_setting_are_legal_on_its_cluster(name: str, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    (tmp_path / "c.yaml").write_text(f"name: {name}\nnodes:\n{setting.nodes}")
    cluster = load_cluster(str(tmp_path / "c.yaml"))
    model = model_from_config(MODEL, name="accuracy")
    job = Job(seq_len=MODEL["seq_len"], global_batch_size=BATCH, dtype="fp32")
    assert len(setting.plans) == len(set(setting.plans)) >= 6
    for text in setting.plans:
        strategy = complete(
            parse_fields(text), devices=cluster.devices, layers=model.layers, experts=None,
            global_batch_size=BATCH,
        )  # fmt: skip
        assert search.evaluate(model, cluster, job, strategy).step_time_s > 0.0, text
