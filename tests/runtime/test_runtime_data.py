"""Samples depend on seed and step alone; files are visited whole; what cannot be used is refused."""

from __future__ import annotations

from math import log
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.runtime import Synthetic, TokenFile

pytestmark = pytest.mark.xdist_group("runtime")


def test_a_synthetic_batch_is_a_function_of_seed_and_step() -> None:
    source = Synthetic(vocab=50, global_batch_size=4, seq_len=16, seed=3)
    again = Synthetic(vocab=50, global_batch_size=4, seq_len=16, seed=3)
    assert source.batch(5).shape == (4, 17)
    assert torch.equal(source.batch(5), again.batch(5))
    assert not torch.equal(source.batch(5), source.batch(6))
    other = Synthetic(vocab=50, global_batch_size=4, seq_len=16, seed=4)
    assert not torch.equal(source.batch(5), other.batch(5))


def test_synthetic_text_can_be_learned() -> None:
    """The most common follower of each token predicts 9 in 10 of the next ones, and is the same in every
    step."""
    source = Synthetic(vocab=20, global_batch_size=64, seq_len=64, seed=0)
    counts = np.zeros((20, 20))
    for step in range(4):
        batch = source.batch(step).numpy()
        np.add.at(counts, (batch[:, :-1].ravel(), batch[:, 1:].ravel()), 1)
    best = counts.max(axis=1).sum() / counts.sum()
    assert best == pytest.approx(0.9 + 0.1 / 20, abs=0.02)
    # the loss of one who knows: -0.905 ln 0.905 - 0.095 ln(0.1 / 20) = 0.594, against ln 20 = 3.0
    rows = counts / counts.sum(axis=1, keepdims=True)
    entropy = -(counts * np.log(np.maximum(rows, 1e-12))).sum() / counts.sum()
    assert entropy < 0.62 < log(20)


def tokens_file(folder: Path, count: int) -> str:
    path = folder / "tokens.bin"
    np.arange(count, dtype="<u2").tofile(path)
    return str(path)


def test_an_epoch_visits_every_window_once(tmp_path: Path) -> None:
    # 8 windows of 4 tokens need 8 * 4 + 1 tokens; 4 steps of 2 samples are an epoch
    source = TokenFile(tokens_file(tmp_path, 33), vocab=40, global_batch_size=2, seq_len=4, seed=1)
    assert source.windows == 8
    first = torch.cat([source.batch(step) for step in range(4)])
    assert sorted(first[:, 0].tolist()) == [0, 4, 8, 12, 16, 20, 24, 28]
    assert torch.equal(first[:, 1:], first[:, :1] + torch.arange(1, 5))
    second = torch.cat([source.batch(step) for step in range(4, 8)])
    assert sorted(second[:, 0].tolist()) == sorted(first[:, 0].tolist())
    assert not torch.equal(first, second)


def test_a_batch_may_span_epochs(tmp_path: Path) -> None:
    source = TokenFile(tokens_file(tmp_path, 13), vocab=40, global_batch_size=5, seq_len=4, seed=1)
    starts = torch.cat([source.batch(step) for step in range(3)])[:, 0].tolist()
    assert sorted(starts[:3]) == sorted(starts[3:6]) == sorted(starts[12:15]) == [0, 4, 8]


def test_wide_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    path = tmp_path / "wide.bin"
    np.array([70_000, 1, 2, 3, 4], dtype="<u4").tofile(path)
    source = TokenFile(str(path), vocab=100_000, global_batch_size=1, seq_len=4, seed=0)
    assert source.batch(0).tolist() == [[70_000, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no file of tokens"),
        (b"\0" * 7, "is no file of tokens"),
        (b"\0" * 8, "is too short"),
        (b"\xff" * 20, "has a token that the model does not know"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        TokenFile(str(path), vocab=40, global_batch_size=2, seq_len=4, seed=1).batch(0)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            TokenFile(str(path), vocab=40, global_batch_size=2, seq_len=4, seed=1)
