"""What to write in place of PyTorch's operators that graphs do not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_FAMILIES: Sequence[tuple[tuple[str, ...], str]] = (
    (
        ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "msort", "multinomial", "bernoulli"),
        "weights that all take part with, such as a softmax: graphs choose nothing by value",
    ),
    (
        (
            "gather", "index", "index_select", "take", "take_along_dim", "masked_select", "nonzero",
            "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "embedding_bag",
        ),
        "a lookup in a table of parameters (nn.Embedding), F.cross_entropy for likelihoods of classes, or an "
        "einsum with weights of 0 and 1 that are an input",
    ),
    (
        ("copy", "fill", "zero", "index_put", "slice_scatter", "select_scatter", "masked_scatter"),
        "new tensors, torch.cat of their parts, in place of assignments to a part",
    ),
    (
        ("roll", "flip", "rot90"),
        "torch.cat of its parts in the other order",
    ),
    (("pad", "constant_pad_nd"), "torch.cat with zeros, or padding= of the convolution or pooling"),
    (
        ("repeat", "tile", "repeat_interleave"),
        "unsqueeze and expand, then reshape",
    ),
    (
        ("gt", "lt", "ge", "le", "eq", "ne", "isnan", "isinf", "logical_and", "logical_or", "logical_not"),
        "relu, clamp, maximum or minimum, or a mask that is made of inputs alone: graphs compare nothing "
        "that depends on a parameter",
    ),
    (
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        "nn.Linear to the pixels of a window and a reshape, where the stride is the kernel",
    ),
    (
        (
            "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
            "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d", "grid_sampler",
        ),
        "expand and reshape for the nearest pixel, else an einsum with a matrix of weights that is an input",
    ),
    (("cumsum", "cumprod", "logcumsumexp"), "a product with a triangular matrix of ones that is an input"),
    (
        (
            "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like",
            "randn_like",
        ),
        "torch.zeros and the like of a shape: x.shape of an input",
    ),
    (("_weight_norm", "_weight_norm_interface"), "a weight that is a parameter, without weight_norm"),
)  # fmt: skip

ADVICE: Mapping[str, str] = {name: advice for names, advice in _FAMILIES for name in names}
"""By the name of the operator without `aten.` and its overload."""

OTHERWISE = "it written with operators that graphs have, such as einsum (docs/reference/operators.md)"
