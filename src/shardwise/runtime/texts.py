"""What ranks tell each other, as text: nothing that is received is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


def all_gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """What each rank of a process group (None: of the default one) has to say, by rank; `value` is what JSON
    holds (tuples become lists). Every rank of it calls this."""
    payload = _encoded(json.dumps(value))
    ranks = distributed.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(ranks)]
    distributed.all_gather(sizes, torch.tensor([payload.numel()]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: payload.numel()] = payload
    every = [torch.empty_like(padded) for _ in range(ranks)]
    distributed.all_gather(every, padded, group=group)
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(every, sizes, strict=True)]


def _encoded(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
