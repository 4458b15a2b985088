"""Training data: batches determined by seed and step, independent of how the batch is sharded.

`Synthetic` and `TokenFile` give token ids; `RandomInputs` and `ArrayFolder` give the inputs of an operator
graph. Files are memory-mapped and visited in a random order per epoch. `FeistelPermutation` computes entries
of that order on demand, so that no rank stores it. `DataIdentity` lets a resumed run check that the data is
the same.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, OpNode, samples_dim
from shardwise.runtime.initialization import generator_of
from shardwise.strategy import Job

SYNTHETIC = "synthetic"
"""Name of synthetic data, in place of a path."""

# Random permutations

ROUNDS = 8
"""Rounds of the Feistel network. Four give a pseudorandom permutation if the rounds are ideal (Luby and
Rackoff 1988); eight leave a margin for simple ones."""

_Words = NDArray[np.uint64]


class FeistelPermutation:
    """A random permutation of the numbers below `count`, computed entry by entry.

    A Feistel network permutes the numbers of an even number of bits, less than 4 * count of them. A result
    that is not below `count` is permuted again until it is (cycle walking), which ends because a permutation
    consists of cycles.
    """

    def __init__(self, count: int, generator: np.random.Generator) -> None:
        half = max(1, -(-(count - 1).bit_length() // 2))
        self.count = count
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        self._keys = generator.integers(1 << 64, size=ROUNDS, dtype=np.uint64)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Entries of the permutation at `places`, each from 0 to `count` - 1."""
        found = self._permuted(places.astype(np.uint64))
        while (beyond := found >= self.count).any():
            found[beyond] = self._permuted(found[beyond])
        return found.astype(np.int64)

    def _permuted(self, numbers: _Words) -> _Words:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix_bits(right + key) & self._mask)
        return (left << self._half) | right


def _mix_bits(words: _Words) -> _Words:
    """Mix each word so that every bit of the result depends on every bit of it (finaliser of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


# Tokens

ORDER_VERSION = 2
"""Version of the order of windows. Version 1 drew whole permutations."""

WORDS = 256
"""Most tokens of the vocabulary that synthetic text uses."""

_BLOCK_BYTES = 64 << 10
_BLOCKS = 64
"""Blocks of `_BLOCK_BYTES` bytes (64 KiB) that the hash of a large file covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataIdentity:
    """Identity of a data source, independent of its path: size in bytes, hash of sampled blocks, number of
    windows and version of their order."""

    nbytes: int
    hash: str
    windows: int
    order: int = ORDER_VERSION


class Samples(Protocol):
    """A source of batches."""

    def batch(self, step: int) -> Any:
        """Data of step `step` (from 0): token ids of shape (global_batch_size, seq_len + 1), or a graph's
        inputs by name."""

    def content(self) -> DataIdentity | None:
        """Identity of the data; None if seed and step determine it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Random text of a Markov chain: the next word is a fixed permutation of the last one, or with
    probability `noise` any word.

    A model that has learned the permutation has a loss of about noise * ln(words) + 0.3 nats at noise 0.1. At
    most `WORDS` tokens are used, spread evenly over the vocabulary. With more, a step would contain few of
    them, and hundreds of steps would not learn them.
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
        """None: the seed determines the data."""


class TokenFile:
    """A memory-mapped file of token ids: little-endian, two bytes each (four if the vocabulary exceeds
    65,536).

    The file is divided into windows of `seq_len + 1` tokens that overlap by one. Each epoch visits all
    windows in its own order: sample i of step s is visit s * global_batch_size + i. ConfigError if the file
    cannot be read or is too short.
    """

    def __init__(self, path: str, *, vocab: int, global_batch_size: int, seq_len: int, seed: int) -> None:
        self._tokens = _memory_mapped(path, np.dtype("<u2" if vocab <= 1 << 16 else "<u4"))
        self._path = path
        self._vocab, self._batch, self._seq_len, self._seed = vocab, global_batch_size, seq_len, seed
        self.windows = (len(self._tokens) - 1) // seq_len
        if self.windows < 1:
            raise ConfigError(
                "is too short", file=path, found=f"{len(self._tokens)} tokens",
                allowed=f"at least {seq_len + 1} tokens: one sequence and the next token",
            )  # fmt: skip

    def batch(self, step: int) -> Tensor:
        windows = sample_indices(self.windows, self._batch, seed=self._seed, step=step)
        starts = (windows * self._seq_len).tolist()
        rows = np.stack([self._tokens[start : start + self._seq_len + 1] for start in starts])
        rows = rows.astype(np.int64)
        if rows.max() >= self._vocab:
            raise ConfigError(
                "has a token that is not in the model's vocabulary", file=self._path, found=str(rows.max()),
                allowed=f"0 to {self._vocab - 1}",
            )  # fmt: skip
        return torch.from_numpy(rows)

    def content(self) -> DataIdentity:
        """Identity of the file. The hash covers up to 4 MiB, in blocks spread over the whole file."""
        nbytes = self._tokens.nbytes
        return DataIdentity(nbytes=nbytes, hash=sampled_hash(self._path, nbytes), windows=self.windows)


def check_batch(batch: Tensor, job: Job) -> None:
    """ConfigError if `batch` does not have the shape of a batch of `job`."""
    shape = (job.global_batch_size, job.seq_len + 1)
    if tuple(batch.shape) != shape:
        raise ConfigError(
            "does not have the plan's shape", key="batch", found=str(tuple(batch.shape)), allowed=str(shape)
        )


def _generator(seed: int, stream: int, step: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, stream, step))))


def sample_indices(count: int, batch: int, *, seed: int, step: int) -> NDArray[np.int64]:
    """Indices (batch,) of the samples, of `count`, in step `step`: each epoch visits all of them in its own
    order, and sample i of step s is visit s * batch + i."""
    visits = np.arange(step * batch, (step + 1) * batch)
    epochs, places = np.divmod(visits, count)
    found = np.empty_like(places)
    for epoch in np.unique(epochs):
        order = FeistelPermutation(count, _generator(seed, 2, int(epoch)))
        found[epochs == epoch] = order.at(places[epochs == epoch])
    return found


def sampled_hash(path: str, nbytes: int) -> str:
    """Hash of a file of `nbytes` bytes; of a large one, of blocks spread from its first byte to its last."""
    last = max(0, nbytes - _BLOCK_BYTES)
    # Blocks overlap if the file is smaller than all of them together; then the hash covers every byte.
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
            "is not a file of tokens", file=path, found=f"{status.st_size} bytes",
            allowed=f"a multiple of {dtype.itemsize} bytes, the size of a token",
        )  # fmt: skip
    try:
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise ConfigError(f"cannot be read: {(error.strerror or str(error)).lower()}", file=path) from None


# Inputs of operator graphs

RANDOM_BATCHES = 4
"""Number of different random batches, which repeat. Few, so that a model can memorise their targets."""

SUFFIX = ".npy"


@dataclass(frozen=True, slots=True)
class RandomInputs:
    """Random inputs of a graph: class indices where an operator reads an input as such, else normal
    numbers."""

    graph: OpGraph
    seed: int

    def batch(self, step: int) -> dict[str, Tensor]:
        classes = classes_of(self.graph)
        found: dict[str, Tensor] = {}
        for name, shape in self.graph.inputs.items():
            random = generator_of(f"{name} {step % RANDOM_BATCHES}", self.seed)
            if name in classes:
                found[name] = torch.randint(classes[name], shape, generator=random)
            else:
                found[name] = torch.randn(shape, generator=random)
        return found

    def content(self) -> None:
        """None: the seed determines the data."""


class ArrayFolder:
    """A folder with a memory-mapped array `NAME.npy` for every input of a graph.

    The batch dim of an array has all samples, in the same order as the other arrays. Inputs without a batch
    dim are read as they are. Each epoch visits the samples in its own order: sample i of step s is visit s *
    batch + i. Class indices are integers; all other numbers are read as fp32. ConfigError if an array does
    not fit the graph.
    """

    def __init__(self, folder: str, graph: OpGraph, *, seed: int) -> None:
        self._folder, self._graph, self._seed = folder, graph, seed
        self._dims = {name: samples_dim(graph, name) for name in graph.inputs}
        self._classes = classes_of(graph)
        self._arrays = {name: self._memory_mapped(name) for name in graph.inputs}
        self.samples = self._sample_count()

    def batch(self, step: int) -> dict[str, Tensor]:
        rows = sample_indices(self.samples, self._graph.batch, seed=self._seed, step=step)
        return {name: self._read(name, rows) for name in self._arrays}

    def content(self) -> DataIdentity:
        """Identity of all files. The hash of a large file covers blocks spread over the whole file."""
        digest = hashlib.sha256()
        nbytes = 0
        for name in sorted(self._arrays):
            size = os.path.getsize(self._path(name))
            digest.update(f"{name} {size} {sampled_hash(self._path(name), size)}\n".encode())
            nbytes += size
        return DataIdentity(nbytes=nbytes, hash="sha256:" + digest.hexdigest(), windows=self.samples)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name + SUFFIX)

    def _memory_mapped(self, name: str) -> NDArray[np.generic]:
        """Map the array of an input and check that its shape and dtype fit the graph."""
        if os.path.basename(name) != name:
            raise ConfigError(
                "is not a file name", key="graph.inputs", found=name, allowed="train without --data"
            )
        path, shape, along = self._path(name), self._graph.inputs[name], self._dims[name]
        if along is not None and shape[along] != self._graph.batch:
            raise ConfigError(
                "has several elements per sample along the batch dim, which arrays cannot have", file=path,
                key=f"graph.inputs.{name}", found=f"{shape[along]} for {self._graph.batch} samples",
                allowed="shardwise.parallelize in your own program, which supplies the batches",
            )  # fmt: skip
        array = _loaded(path)
        expected = [None if place == along else size for place, size in enumerate(shape)]
        found = [None if place == along else size for place, size in enumerate(array.shape)]
        if found != expected:
            raise ConfigError(
                "does not have the graph's shape", file=path, key="--data", found=_shape_text(array.shape),
                allowed=_shape_text(expected) + (" for N samples" if along is not None else ""),
            )  # fmt: skip
        is_class = name in self._classes
        if array.dtype.kind not in ("iu" if is_class else "iuf"):
            raise ConfigError(
                "does not have a dtype that the graph reads", file=path, key="--data", found=str(array.dtype),
                allowed="integers" if is_class else "integers or floating-point numbers",
            )  # fmt: skip
        return array

    def _sample_count(self) -> int:
        """Number of samples, which must be equal in all arrays."""
        dims = {name: along for name, along in self._dims.items() if along is not None}
        if not dims:
            raise ConfigError(
                "have no batch dim, so --data has no samples", key="graph.inputs",
                found=", ".join(self._dims) or "none", allowed="train without --data",
            )  # fmt: skip
        counts = {name: self._arrays[name].shape[along] for name, along in dims.items()}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            raise ConfigError(
                "has different numbers of samples for the inputs", file=self._folder, key="--data",
                found=", ".join(f"{name} {count:,}" for name, count in counts.items()),
                allowed="the same number of samples for each input, at least 1",
            )  # fmt: skip
        return next(iter(counts.values()))

    def _read(self, name: str, rows: NDArray[np.int64]) -> Tensor:
        array, along, classes = self._arrays[name], self._dims[name], self._classes.get(name)
        found = np.asarray(array) if along is None else np.take(array, rows, axis=along)
        if classes is None:
            return torch.from_numpy(np.array(found, dtype=np.float32))
        least, most = int(found.min()), int(found.max())
        if least < 0 or most >= classes:
            raise ConfigError(
                "has a class index that the graph does not have", file=self._path(name), key="--data",
                found=str(least if least < 0 else most), allowed=f"0 to {classes - 1}",
            )  # fmt: skip
        return torch.from_numpy(np.array(found, dtype=np.int64))


def _loaded(path: str) -> NDArray[np.generic]:
    try:
        array: NDArray[np.generic] = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be read: {why}", file=path, key="--data") from None
    except (ValueError, EOFError):
        raise ConfigError(
            "is not an array", file=path, key="--data", allowed="an array of numbers, written by numpy.save"
        ) from None
    return array


def _shape_text(shape: Sequence[int | None]) -> str:
    return f"({', '.join('N' if size is None else str(size) for size in shape)})"


def classes_of(graph: OpGraph) -> Mapping[str, int]:
    """Number of classes of each input that is read as indices."""
    found: dict[str, int] = {}
    for block in graph.blocks:
        for op in block.operators:
            for source, count in _indices(op):
                if source in graph.inputs:
                    found[source] = min(count, found.get(source, count))
    return found


def _indices(op: OpNode) -> list[tuple[str, int]]:
    if op.kind == "embedding":
        indices, table = op.inputs[0], op.parameters[0].dims
        (rows,) = (dim for dim in table if dim not in indices.dims and dim not in op.output)
        return [(indices.source, op.dims[rows])]
    if op.kind == "cross_entropy":
        logits, targets = op.inputs
        (classes,) = (dim for dim in logits.dims if dim not in targets.dims)
        return [(targets.source, op.dims[classes])]
    return []
