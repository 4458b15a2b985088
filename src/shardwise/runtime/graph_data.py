"""Batches of what a graph reads, by seed and step: drawn, or samples of a folder of arrays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, OpNode, samples_dim
from shardwise.runtime.data import DataIdentity, sample_indices, sampled_hash
from shardwise.runtime.initial import generator_of

RANDOM_BATCHES = 4
"""So many batches are drawn, and met again and again: their targets can only be remembered."""

SUFFIX = ".npy"


@dataclass(frozen=True, slots=True)
class RandomInputs:
    """Classes where an operator reads an input as such, else normal numbers."""

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
        """Nothing but the seed."""


class ArrayFolder:
    """A folder with an array `NAME.npy` for every input of a graph, mapped into memory.

    Along the dim of an input that grows with the batch its array has all samples, in the same order as the
    other arrays; inputs without such a dim are read as they are. Each epoch visits the samples in an order of
    its own: sample i of step s is visit s * batch + i. Classes are whole numbers, all else is read as fp32.
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
        """Of the files as they are; of large ones the hash reads parts, spread from the first byte to the
        last."""
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
        """The array of an input, of which all dims but that of samples are the graph's."""
        if os.path.basename(name) != name:
            raise ConfigError(
                "is no name of a file", key="graph.inputs", found=name, allowed="train without --data"
            )
        path, shape, along = self._path(name), self._graph.inputs[name], self._dims[name]
        if along is not None and shape[along] != self._graph.batch:
            raise ConfigError(
                "has several elements of each sample along one dim, which arrays do not", file=path,
                key=f"graph.inputs.{name}", found=f"{shape[along]} for {self._graph.batch} samples",
                allowed="shardwise.parallelize in a program, with batches of its own",
            )  # fmt: skip
        array = _loaded(path)
        expected = [None if place == along else size for place, size in enumerate(shape)]
        found = [None if place == along else size for place, size in enumerate(array.shape)]
        if found != expected:
            raise ConfigError(
                "is not of the graph's shape", file=path, key="--data", found=_shape_text(array.shape),
                allowed=_shape_text(expected) + (" for N samples" if along is not None else ""),
            )  # fmt: skip
        is_class = name in self._classes
        if array.dtype.kind not in ("iu" if is_class else "iuf"):
            raise ConfigError(
                "is not of the numbers that the graph reads", file=path, key="--data", found=str(array.dtype),
                allowed="whole numbers" if is_class else "whole numbers or such with fractions",
            )  # fmt: skip
        return array

    def _sample_count(self) -> int:
        """How many samples all arrays have."""
        dims = {name: along for name, along in self._dims.items() if along is not None}
        if not dims:
            raise ConfigError(
                "have no dim that grows with the batch, so no samples", key="graph.inputs",
                found=", ".join(self._dims) or "none", allowed="train without --data",
            )  # fmt: skip
        counts = {name: self._arrays[name].shape[along] for name, along in dims.items()}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            raise ConfigError(
                "does not have as many samples of each input", file=self._folder, key="--data",
                found=", ".join(f"{name} {count:,}" for name, count in counts.items()),
                allowed="one number of samples, at least 1",
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
                "has a class that the graph does not know", file=self._path(name), key="--data",
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
            "is no array", file=path, key="--data", allowed="numbers as numpy.save writes them"
        ) from None
    return array


def _shape_text(shape: Sequence[int | None]) -> str:
    return f"({', '.join('N' if size is None else str(size) for size in shape)})"


def classes_of(graph: OpGraph) -> Mapping[str, int]:
    """The inputs that are indices, and below which number."""
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
