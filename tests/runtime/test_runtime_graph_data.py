"""Samples from a folder of arrays: each sample once an epoch, with its own target; unusable arrays are
refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.property.layout_instances import mlp
from tests.runtime.graph_plans import by_rules, plan_with

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.graph import SizeGrowth, scaled
from shardwise.plans import write_plan
from shardwise.runtime import data
from shardwise.runtime import data as graph_data
from shardwise.runtime.data import ArrayFolder

GRAPH = replace(mlp(4, 6, 12, 5), growth={"b": SizeGrowth(batch=1)})
SAMPLES = 10


def folder_of(path: Path, *, samples: int = SAMPLES) -> str:
    """Sample i has the value i everywhere, and class i % 5."""
    numbers = np.arange(samples)
    np.save(path / "x.npy", np.repeat(numbers[:, None], 6, axis=1).astype(np.float32))
    np.save(path / "target.npy", (numbers % 5).astype(np.uint8))
    return str(path)


def is_together(samples: ArrayFolder) -> bool:
    """Whether every input of a batch has the same samples."""
    batches = [samples.batch(step) for step in range(6)]
    return all(torch.equal(batch["target"], batch["x"][:, 0].long() % 5) for batch in batches)


def has_each_once(samples: ArrayFolder) -> bool:
    """Whether 20 steps of four are eight epochs of ten samples, most of them in different orders."""
    visited = torch.cat([samples.batch(step)["x"][:, 0] for step in range(20)]).long().tolist()
    epochs = [visited[start : start + SAMPLES] for start in range(0, 80, SAMPLES)]
    return (
        all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
        and len({tuple(epoch) for epoch in epochs}) > 6
    )


def test_an_epoch_has_every_sample_once_with_its_target(tmp_path: Path) -> None:
    """The order depends on seed and step, and differs between seeds."""
    samples = ArrayFolder(folder_of(tmp_path), GRAPH, seed=1)
    assert is_together(samples) and has_each_once(samples)
    batch = samples.batch(0)
    assert batch["x"].shape == (4, 6) and batch["x"].dtype == torch.float32
    assert batch["target"].shape == (4,) and batch["target"].dtype == torch.int64
    again = ArrayFolder(str(tmp_path), GRAPH, seed=1)
    assert torch.equal(again.batch(7)["x"], samples.batch(7)["x"])
    other = ArrayFolder(str(tmp_path), GRAPH, seed=2)
    assert any(not torch.equal(other.batch(step)["x"], samples.batch(step)["x"]) for step in range(3))


READ, VISITED = ArrayFolder._read, data.sample_indices


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (ArrayFolder, "_read", lambda own, name, rows: READ(own, name, rows if name == "x" else rows[::-1])),
        (
            graph_data,
            "sample_indices",
            lambda count, batch, *, seed, step: VISITED(count, batch, seed=step, step=0),
        ),
        (
            graph_data,
            "sample_indices",
            lambda count, batch, *, seed, step: (step * batch + np.arange(batch)) % count,
        ),
    ],
    ids=["each input in an order of its own", "drawn anew at every step", "the order of the files"],
)
def test_a_broken_mutant_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Any
) -> None:
    monkeypatch.setattr(owner, name, broken)
    samples = ArrayFolder(folder_of(tmp_path), GRAPH, seed=1)
    assert not (is_together(samples) and has_each_once(samples))


def test_samples_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    """Two steps of four samples equal one of eight."""
    four = ArrayFolder(folder_of(tmp_path), GRAPH, seed=1)
    eight = ArrayFolder(str(tmp_path), scaled(GRAPH, 8), seed=1)
    assert torch.equal(torch.cat([four.batch(2)["x"], four.batch(3)["x"]]), eight.batch(1)["x"])


def test_samples_have_the_content_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (ArrayFolder(folder_of(tmp_path / name), GRAPH, seed=1).content() for name in "ab")
    assert first == second and first.windows == SAMPLES
    array = np.load(tmp_path / "b" / "target.npy")
    array[3] = 4 - array[3]
    np.save(tmp_path / "b" / "target.npy", array)
    assert ArrayFolder(str(tmp_path / "b"), GRAPH, seed=1).content() != first


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("x", None, "cannot be read: no such file"),
        ("x", np.zeros((10, 7), np.float32), r"does not have the graph's shape.*\(10, 7\).*\(N, 6\)"),
        ("x", np.zeros(10, np.float32), r"does not have the graph's shape.*\(10\).*\(N, 6\)"),
        ("x", np.zeros((9, 6), np.float32), "different numbers of samples.*x 9, target 10"),
        ("x", np.zeros((10, 6), np.complex64), "does not have a dtype.*complex64"),
        ("target", np.zeros(10, np.float32), "does not have a dtype.*float32.*integers"),
    ],
)
def test_arrays_that_are_not_the_graphs_are_refused(
    tmp_path: Path, name: str, array: NDArray[np.generic] | None, message: str
) -> None:
    folder = folder_of(tmp_path)
    (tmp_path / f"{name}.npy").unlink()
    if array is not None:
        np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(ConfigError, match=message):
        ArrayFolder(folder, GRAPH, seed=1)


def test_a_file_without_an_array_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for content in (b"", b"no array", (tmp_path / "x.npy").read_bytes()[:100]):
        (tmp_path / "x.npy").write_bytes(content)
        with pytest.raises(ConfigError, match="is not an array"):
            ArrayFolder(folder, GRAPH, seed=1)
    np.save(tmp_path / "x.npy", np.array([object()] * 10), allow_pickle=True)
    with pytest.raises(ConfigError, match="is not an array"):
        ArrayFolder(folder, GRAPH, seed=1)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_classes_that_the_graph_does_not_have_are_refused(tmp_path: Path, wrong: int) -> None:
    folder = folder_of(tmp_path)
    np.save(tmp_path / "target.npy", np.full(10, wrong))
    with pytest.raises(ConfigError, match=f"has a class.*{wrong}.*0 to 4"):
        ArrayFolder(folder, GRAPH, seed=1).batch(0)


def test_arrays_without_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x 0, target 0.*at least 1"):
        ArrayFolder(folder_of(tmp_path, samples=0), GRAPH, seed=1)


def test_training_on_arrays_resumes_with_the_same_arrays_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls, as each sample has its class. After a checkpoint the files must have the same content,
    wherever they are."""
    plan, log, runs = str(tmp_path / "p.yaml"), tmp_path / "steps.jsonl", str(tmp_path / "runs")
    write_plan(plan, plan_with(GRAPH, (2,), by_rules(GRAPH, (2,), lambda op: ("split b",))))
    for name in ("here", "there", "others"):
        (tmp_path / name).mkdir()
    classes = np.random.default_rng(0).integers(5, size=40)
    for name in ("here", "there"):
        np.save(tmp_path / name / "x.npy", np.eye(6)[classes])
        np.save(tmp_path / name / "target.npy", classes)
    folder_of(tmp_path / "others")
    words = ["train", plan, "--lr", "0.05", "--checkpoint", runs, "--log", str(log), "--data"]
    assert main([*words, str(tmp_path / "here"), "--steps", "30"]) == 0
    assert main([*words, str(tmp_path / "there"), "--steps", "40", "--resume"]) == 0
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert len(losses) == 40 and sum(losses[-4:]) < sum(losses[:4]) / 2
    capsys.readouterr()
    assert main([*words, str(tmp_path / "others"), "--steps", "50", "--resume"]) == 2
    assert "differs from the checkpoint's data" in capsys.readouterr().err
    assert main([*words[:-1], "--steps", "50", "--resume"]) == 2
    assert "--data: differs from the checkpoint; found synthetic" in capsys.readouterr().err
