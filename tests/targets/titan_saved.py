"""A child process in which layers of TorchTitan compute: `python -m tests.targets.titan_saved`.

Each line of the standard input is a request, `{"files": {...}, "module": "...", "config": "..."}`. Each line
of the standard output is the number of bytes that the first layer saves for its backward pass, per token, in
bf16, as `torch.compile` divides the passes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from tests.targets.counting import SavedBytes
from tests.targets.titan_logits import _built

from shardwise.targets.torchtitan_reader import _folder_of, _import

LENGTH, ROWS = 256, 2


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _import()
    for line in sys.stdin:
        replies.write(json.dumps(_counted(json.loads(line))) + "\n")
        replies.flush()


def _counted(request: Mapping[str, Any]) -> float:
    import torch

    with _folder_of(request["files"], request["module"]):
        _, model = _built(request)
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    (layer,) = [*model.layers.values()][:1]
    width = layer.attention_norm.weight.numel()
    hidden = torch.randn(ROWS, LENGTH, width, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    masks = model.get_attention_masks(positions)
    _attend_without_flex(layer)
    compiled = torch._dynamo.optimize("aot_eager_decomp_partition")(layer)
    saved = SavedBytes(model)
    return saved.count(lambda: compiled(hidden, masks, positions)) / (ROWS * LENGTH)


def _attend_without_flex(layer: Any) -> None:
    """FlexAttention has no backward pass on a CPU; fused attention saves the same tensors."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    inner = ScaledDotProductAttention(ScaledDotProductAttention.Config())
    forward = inner.forward
    inner.forward = lambda *states, attention_masks, **kwargs: forward(*states, **kwargs)
    layer.attention.inner_attention = inner


if __name__ == "__main__":
    main()
