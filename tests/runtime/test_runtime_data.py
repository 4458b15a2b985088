"""Samples depend on seed and step only; an epoch has every window of a file once; unusable files are
refused."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from math import log
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.runtime.data import DataIdentity, FeistelPermutation, Synthetic, TokenFile


def test_a_synthetic_batch_is_a_function_of_seed_and_step() -> None:
    source = Synthetic(vocab=50, global_batch_size=4, seq_len=16, seed=3)
    again = Synthetic(vocab=50, global_batch_size=4, seq_len=16, seed=3)
    assert source.batch(5).shape == (4, 17)
    assert torch.equal(source.batch(5), again.batch(5))
    assert not torch.equal(source.batch(5), source.batch(6))
    other = Synthetic(vocab=50, global_batch_size=4, seq_len=16, seed=4)
    assert not torch.equal(source.batch(5), other.batch(5))


def test_synthetic_text_can_be_learned() -> None:
    """The most common successor of each token is right for 9 in 10 of the next tokens, and is the same in
    every step."""
    source = Synthetic(vocab=20, global_batch_size=64, seq_len=64, seed=0)
    counts = np.zeros((20, 20))
    for step in range(4):
        batch = source.batch(step).numpy()
        np.add.at(counts, (batch[:, :-1].ravel(), batch[:, 1:].ravel()), 1)
    best = counts.max(axis=1).sum() / counts.sum()
    assert best == pytest.approx(0.9 + 0.1 / 20, abs=0.02)
    # the loss of a perfect model: -0.905 ln 0.905 - 0.095 ln(0.1 / 20) = 0.594, against ln 20 = 3.0
    rows = counts / counts.sum(axis=1, keepdims=True)
    entropy = -(counts * np.log(np.maximum(rows, 1e-12))).sum() / counts.sum()
    assert entropy < 0.62 < log(20)


def test_few_tokens_of_a_large_vocabulary_are_words() -> None:
    """256 of 50,257 tokens, spread over the vocabulary, each with a successor of its own."""
    source = Synthetic(vocab=50_257, global_batch_size=8, seq_len=512, seed=0)
    batch = torch.cat([source.batch(step) for step in range(8)]).numpy()
    words = np.unique(batch)
    assert len(words) == 256
    # token 0 is the smallest, 255 * 50,257 // 256 the largest; they are 196.3 apart
    assert (words[0], words[-1]) == (0, 50_060)
    assert set(np.diff(words)) == {196, 197}
    # about 128 times 9 in 10; never fewer than 7 in 10 (seven standard deviations)
    followers = [most_common(batch[:, 1:][batch[:, :-1] == word]) for word in words]
    assert min(share for _, share in followers) > 0.7
    assert len({token for token, _ in followers}) == 256


def test_of_few_tokens_all_are_words() -> None:
    batch = Synthetic(vocab=200, global_batch_size=256, seq_len=64, seed=0).batch(0)
    assert set(batch.unique().tolist()) == set(range(200))


def most_common(tokens: npt.NDArray[np.int64]) -> tuple[int, float]:
    """The most common token, and its share of all."""
    found, counts = np.unique(tokens, return_counts=True)
    best = counts.argmax()
    return int(found[best]), float(counts[best] / counts.sum())


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


def shuffle(count: int, seed: int) -> FeistelPermutation:
    return FeistelPermutation(count, np.random.default_rng(seed))


COUNTS = [*range(1, 40), 255, 256, 257, 1000, 4096, 4097, 70_000]


@pytest.mark.parametrize("seed", range(3))
def test_a_shuffle_has_every_number_at_one_place(seed: int) -> None:
    for count in COUNTS:
        order = shuffle(count, seed).at(np.arange(count))
        assert np.array_equal(np.sort(order), np.arange(count))
        # one by one as all at once
        some = np.arange(0, count, 7)
        assert np.array_equal(shuffle(count, seed).at(some), order[some])


def test_a_shuffle_that_does_not_advance_is_caught() -> None:
    """The mutant folds numbers beyond the last back with a modulo."""

    def folded(self: FeistelPermutation, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return (self._permuted(places.astype(np.uint64)) % self.count).astype(np.int64)

    with patch.object(FeistelPermutation, "at", folded):
        assert any(len(set(shuffle(count, 0).at(np.arange(count)).tolist())) < count for count in COUNTS)


def test_a_shuffle_is_another_one_under_another_seed_and_mixes() -> None:
    orders = [shuffle(10_000, seed).at(np.arange(10_000)) for seed in range(4)]
    for one, other in pairwise(orders):
        assert (one == other).sum() < 10  # on average one place is the same
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
        steps = np.diff(order)
        assert len(set(steps.tolist())) > 5000  # no stride


def test_a_batch_does_not_draw_the_order_of_all_windows(tmp_path: Path) -> None:
    """A batch of a file of 1 GiB (sparse) takes no more memory than one of a small file. A permutation of its
    134 million windows would take another GiB."""
    path = tmp_path / "large.bin"
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    source = TokenFile(str(path), vocab=40, global_batch_size=8, seq_len=4, seed=1)
    assert source.windows == ((1 << 29) - 1) // 4
    tracemalloc.start()
    try:
        assert source.batch(12_345).shape == (8, 5)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_content_is_that_of_the_file_at_any_path(tmp_path: Path) -> None:
    def content(path: Path) -> DataIdentity:
        return TokenFile(str(path), vocab=40, global_batch_size=2, seq_len=4, seed=1).content()

    first = Path(tokens_file(tmp_path, 33))
    copy = tmp_path / "copy.bin"
    copy.write_bytes(first.read_bytes())
    assert content(copy) == content(first) and content(first).windows == 8
    copy.write_bytes(first.read_bytes()[:-2])
    assert content(copy) != content(first)
    copy.write_bytes(first.read_bytes()[:-2] + b"\x01\x00")
    assert content(copy) != content(first)


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
        (b"", "is not a file of tokens"),
        (b"\0" * 7, "is not a file of tokens"),
        (b"\0" * 8, "is too short"),
        (b"\xff" * 20, "has a token that is not in the model's vocabulary"),
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
