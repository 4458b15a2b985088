"""Samples by seed and step: the same in the same order, however the batch is divided."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.runtime.shuffle import FeistelPermutation
from shardwise.strategy import Job

ORDER_VERSION = 2
"""Version of the order in which windows are visited; the first one drew whole permutations."""

WORDS = 256
"""Tokens of a vocabulary that synthetic text has at most."""

_BLOCK_BYTES = 64 << 10
_BLOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DataIdentity:
    """What tells one source of samples from another, wherever it lies: size in bytes, a hash of parts of it,
    the windows that it is cut into and the version of their order."""

    nbytes: int
    hash: str
    windows: int
    order: int = ORDER_VERSION


class Samples(Protocol):
    """A source of batches."""

    def batch(self, step: int) -> Any:
        """What step `step` (from 0) trains on: token ids of shape (global_batch_size, seq_len + 1), or the
        inputs of a graph by name."""

    def content(self) -> DataIdentity | None:
        """What tells them from others; None where seed and step do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Text of a noisy chain: the next word is a fixed permutation of the last, or with probability `noise`
    any word. A model that has learned the permutation has a loss of about noise * ln(words) + 0.3 nats at
    noise 0.1.

    Words are all tokens where these are few, else `WORDS` of them, evenly spread over the vocabulary: of a
    large one a step meets most tokens never, and nothing could be learned of them in hundreds of steps.
    """

    vocab: int
    global_batch_size: int
    seq_len: int
    seed: int
    noise: float = 0.1

    def batch(self, step: int) -> Tensor:
        words = min(self.vocab, WORDS)
        successor = _generator(self.seed, 0, 0).permutation(words)
        generator = _generator(self.seed, 1, step)
        shape = (self.global_batch_size, self.seq_len + 1)
        random = generator.integers(words, size=shape)
        is_noise = generator.random(shape) < self.noise
        chain = random.copy()
        for place in range(1, shape[1]):
            chain[:, place] = np.where(is_noise[:, place], random[:, place], successor[chain[:, place - 1]])
        return torch.from_numpy(chain * self.vocab // words)

    def content(self) -> None:
        """Nothing but the seed."""


class TokenFile:
    """A file of token ids, little-endian, two bytes each (four where the vocabulary needs them), mapped into
    memory.

    It is cut into windows of `seq_len + 1` tokens that overlap by one. Each epoch visits all of them in an
    order of its own, of which each rank works out the places that it needs; sample i of step s is visit
    s * global_batch_size + i.
    """

    def __init__(self, path: str, *, vocab: int, global_batch_size: int, seq_len: int, seed: int) -> None:
        self._tokens = _memory_mapped(path, np.dtype("<u2" if vocab <= 1 << 16 else "<u4"))
        self._path = path
        self._vocab, self._batch, self._seq_len, self._seed = vocab, global_batch_size, seq_len, seed
        self.windows = (len(self._tokens) - 1) // seq_len
        if self.windows < 1:
            raise ConfigError(
                "is too short", file=path, found=f"{len(self._tokens)} tokens",
                allowed=f"at least {seq_len + 1}, one sequence and the token after it",
            )  # fmt: skip

    def batch(self, step: int) -> Tensor:
        windows = sample_indices(self.windows, self._batch, seed=self._seed, step=step)
        starts = (windows * self._seq_len).tolist()
        rows = np.stack([self._tokens[start : start + self._seq_len + 1] for start in starts])
        rows = rows.astype(np.int64)
        if rows.max() >= self._vocab:
            raise ConfigError(
                "has a token that the model does not know", file=self._path, found=str(rows.max()),
                allowed=f"0 to {self._vocab - 1}",
            )  # fmt: skip
        return torch.from_numpy(rows)

    def content(self) -> DataIdentity:
        """Of the file as it is: of a large one the hash reads 4 MiB, spread from the first byte to the
        last."""
        nbytes = self._tokens.nbytes
        return DataIdentity(nbytes=nbytes, hash=sampled_hash(self._path, nbytes), windows=self.windows)


def check_batch(batch: Tensor, job: Job) -> None:
    """Refuse what is not the batch of one step of `job`."""
    shape = (job.global_batch_size, job.seq_len + 1)
    if tuple(batch.shape) != shape:
        raise ConfigError(
            "is not of the plan's shape", key="batch", found=str(tuple(batch.shape)), allowed=str(shape)
        )


def _generator(seed: int, stream: int, step: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, stream, step))))


def sample_indices(count: int, batch: int, *, seed: int, step: int) -> NDArray[np.int64]:
    """Which of `count` windows, or samples, step `step` has, (batch): each epoch visits all of them in an
    order of its own, and sample i of step s is visit s * batch + i."""
    visits = np.arange(step * batch, (step + 1) * batch)
    epochs, places = np.divmod(visits, count)
    found = np.empty_like(places)
    for epoch in np.unique(epochs):
        order = FeistelPermutation(count, _generator(seed, 2, int(epoch)))
        found[epochs == epoch] = order.at(places[epochs == epoch])
    return found


def sampled_hash(path: str, nbytes: int) -> str:
    """Of a file of so many bytes, or of parts of a large one, spread from its first byte to its last."""
    last = max(0, nbytes - _BLOCK_BYTES)
    # Blocks of a file that is no larger than all of them overlap, and miss nothing.
    starts = sorted({last * block // (_BLOCKS - 1) for block in range(_BLOCKS)})
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for start in starts:
                file.seek(start)
                digest.update(file.read(_BLOCK_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot be read: {(error.strerror or str(error)).lower()}", file=path) from None
    return "sha256:" + digest.hexdigest()


def _memory_mapped(path: str, dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"cannot be read: {(error.strerror or str(error)).lower()}", file=path) from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError("cannot be read", file=path, found="not a regular file", allowed="a file of tokens")
    if status.st_size % dtype.itemsize or not status.st_size:
        raise ConfigError(
            "is no file of tokens", file=path, found=f"{status.st_size} bytes",
            allowed=f"a multiple of {dtype.itemsize} bytes, the size of a token",
        )  # fmt: skip
    try:
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise ConfigError(f"cannot be read: {(error.strerror or str(error)).lower()}", file=path) from None
