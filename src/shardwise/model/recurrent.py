"""Builds the operators of state-space, linear-attention and convolution layers from their sizes.

They are those of the fused kernels that people train with: mamba_ssm's `mamba_split_conv1d_scan_combined`
(Mamba-2) and `mamba_inner_fn` (Mamba-1), flash-linear-attention's `chunk_gated_delta_rule` and `chunk_kda`,
and Lightning Attention 2. Work and traffic are counted from the kernels' products and from the tensors that
they read and write; no rate of them was measured.
"""

from __future__ import annotations

from shardwise.model.shape import RecurrentShape
from shardwise.operators import Extent, Matmul, Operator, Pointwise, Saved, Scan, Weight

BACKWARD_TRAFFIC = 3
"""Traffic of the backward pass relative to the forward pass: the kernels compute the states again, then read
each tensor and its gradient."""


def recurrent_operators(
    shape: RecurrentShape, hidden: int, input_saved: tuple[Saved, ...], at: str
) -> tuple[Operator, ...]:
    """The operators from the layer's input (saved as `input_saved`) to the output projection. Input and
    output have width `hidden`; names start with `at`."""
    return _Mixer(shape, hidden, at).operators(input_saved)


class _Mixer:
    """The parts of a mixer. Keys of a single head are computed by every tensor-parallel rank."""

    def __init__(self, shape: RecurrentShape, hidden: int, at: str) -> None:
        self.shape, self.at, self.hidden = shape, at, Extent(hidden)
        self.inner = Extent(shape.inner, "heads")
        self.heads = Extent(shape.heads, "heads")
        projected = 0 if shape.kind == "selective" else 2 * shape.keys
        self.keys = Extent(projected, "heads" if shape.key_heads > 1 else "whole")
        """Keys and queries: of Mamba-2, B and C. Those of a selective scan come from its values."""

    def operators(self, input_saved: tuple[Saved, ...]) -> tuple[Operator, ...]:
        first, *rest = self._projections()
        bias = self.shape.bias
        has_norm = self.shape.norm != "none"
        output = Saved(name=f"{self.at}.scan.output", width=self.inner)
        return (
            self._linear(*first, bias=bias, saved=input_saved),
            *(self._linear(*each, bias=bias) for each in rest),
            *self._convolution(),
            *self._selection(),
            *(() if self.shape.kind == "convolution" else (self._scan(),)),
            *((self._norm(output),) if has_norm else ()),
            self._out(Saved(name=f"{self.at}.output_norm.output", width=self.inner, dtype="operand"))
            if has_norm
            else self._out(output),
        )

    def _linear(
        self, name: str, k: Extent, n: Extent, *, bias: bool = False, saved: tuple[Saved, ...] = ()
    ) -> Matmul:
        matrix = Weight(name=f"{self.at}.{name}.weight", shape=(k, n))
        vector = Weight(name=f"{self.at}.{name}.bias", shape=(n,))
        weights = (matrix, vector) if bias else (matrix,)
        return Matmul(name=f"{self.at}.{name}", k=k, n=n, weights=weights, saved=saved)

    def _out(self, saved: Saved) -> Matmul:
        return self._linear("out", self.inner, self.hidden, bias=self.shape.bias, saved=(saved,))

    # Projections of the input
    def _projections(self) -> list[tuple[str, Extent, Extent]]:
        """Name, input and output of each projection of the layer's input. The first has the biases."""
        shape, hidden, inner = self.shape, self.hidden, self.inner.size
        of_heads = {
            "ssd": 2 * inner + shape.heads,  # values, their gate, the step size
            "selective": 2 * inner,
            "delta": 2 * inner + 2 * shape.heads,  # values, their gate, the rate and the decay
            "channel_delta": inner + shape.heads,  # values and the rate
            "lightning": 2 * inner,
            "convolution": 3 * inner,
        }[shape.kind]
        together = self.keys.role == "heads"
        n = Extent(of_heads + (self.keys.size if together else 0), "heads")
        found = [("in", hidden, n)]
        if self.keys.size and not together:
            found.append(("in_keys", hidden, self.keys))
        if shape.kind == "channel_delta":
            found += self._low_rank("decay", shape.head_dim, Extent(shape.keys, "heads"))
            found += self._low_rank("gate", shape.gate_rank, self.inner)
        return found

    def _low_rank(self, name: str, rank: int, n: Extent) -> list[tuple[str, Extent, Extent]]:
        if not rank:
            return [(name, self.hidden, n)]
        return [(f"{name}_down", self.hidden, Extent(rank)), (f"{name}_up", Extent(rank), n)]

    def _projected(self) -> tuple[Saved, ...]:
        """The outputs of the projections."""
        return tuple(Saved(name=f"{self.at}.{name}.output", width=n) for name, _, n in self._projections())

    # Convolution and scan
    def _convolved(self) -> tuple[Extent, ...]:
        """Elements of a token that the convolution mixes."""
        values_alone = self.shape.kind in ("selective", "convolution")
        return (self.inner,) if values_alone or not self.keys.size else (self.inner, self.keys)

    def _convolution(self) -> tuple[Operator, ...]:
        """The convolution over the last `kernel` tokens and the activation, in one kernel. A convolution
        alone has a gate before it and one after it."""
        shape = self.shape
        if not shape.kernel:
            return ()
        channels = self._convolved()
        names = ("conv", "conv_keys")
        gates = 2 if shape.kind == "convolution" else 0
        return (
            Pointwise(
                name=f"{self.at}.conv",
                forward=tuple(Extent((2 + gates) * one.size, one.role) for one in channels),
                backward=tuple(Extent((3 + 2 * gates) * one.size, one.role) for one in channels),
                weights=(
                    *(
                        Weight(name=f"{self.at}.{name}.weight", shape=(one, Extent(shape.kernel)))
                        for name, one in zip(names, channels, strict=False)
                    ),
                    *(
                        Weight(name=f"{self.at}.{name}.bias", shape=(one,))
                        for name, one in zip(names, channels, strict=False)
                        if shape.conv_bias
                    ),
                ),
                saved=(*self._projected(), *(self._between_gates() if gates else ())),
            ),
        )

    def _between_gates(self) -> tuple[Saved, ...]:
        """What a convolution alone saves: its input after the first gate, and its output."""
        return tuple(Saved(name=f"{self.at}.conv.{name}", width=self.inner) for name in ("input", "output"))

    def _selection(self) -> tuple[Operator, ...]:
        """Step size, B and C of a selective scan, projected from its values."""
        shape = self.shape
        if shape.kind != "selective":
            return ()
        rank, width = Extent(shape.dt_rank), Extent(shape.dt_rank + 2 * shape.key_dim)
        norms: tuple[Operator, ...] = ()
        if shape.has_inner_norms:
            sizes = {"dt": shape.dt_rank, "b": shape.key_dim, "c": shape.key_dim}
            norms = (
                Pointwise(
                    name=f"{self.at}.selection_norms",
                    forward=(Extent(2 * width.size),),
                    backward=(Extent(3 * width.size),),
                    weights=tuple(
                        Weight(name=f"{self.at}.{name}_norm.weight", shape=(Extent(size),))
                        for name, size in sizes.items()
                    ),
                ),
            )
        saved = (Saved(name=f"{self.at}.selection.output", width=width),)
        return (
            self._linear("selection", self.inner, width),
            *norms,
            self._linear("step", rank, self.inner, bias=True, saved=saved),
        )

    def _scan(self) -> Scan:
        shape = self.shape
        of_heads = forward_elements(shape)
        keys = Extent(2 * self.keys.size, self.keys.role)
        forward = (Extent(of_heads, "heads"), *((keys,) if shape.kind == "ssd" else ()))
        return Scan(
            name=f"{self.at}.scan",
            heads=self.inner if shape.kind == "selective" else self.heads,
            key_heads=Extent(shape.key_heads, self.keys.role),
            flop=scan_flop(shape),
            forward=forward,
            backward=tuple(Extent(BACKWARD_TRAFFIC * one.size, one.role) for one in forward),
            exchanged=(Extent(2 * self.inner.size, "heads"), *((self.keys,) if self.keys.size else ())),
            weights=self._scan_weights(),
            saved=self._scan_saved(),
        )

    def _scan_weights(self) -> tuple[Weight, ...]:
        """Decays and steps of heads, or of channels."""
        shape, heads, at = self.shape, self.heads, self.at
        sizes: dict[str, tuple[Extent, ...]]
        match shape.kind:
            case "ssd":
                sizes = {"dt_bias": (heads,), "A": (heads,), "D": (heads,)}
            case "selective":
                sizes = {"A": (self.inner, Extent(shape.key_dim)), "D": (self.inner,)}
            case "delta":
                sizes = {"dt_bias": (heads,), "A": (heads,)}
            case "channel_delta":
                sizes = {"dt_bias": (Extent(shape.keys, "heads"),), "A": (heads,)}
            case _:
                sizes = {}
        return tuple(Weight(name=f"{at}.{name}", shape=extents) for name, extents in sizes.items())

    def _scan_saved(self) -> tuple[Saved, ...]:
        """What a scan saves of its own. Those of Mamba compute the convolution again from its input."""
        shape, at = self.shape, self.at
        if shape.kind in ("ssd", "selective"):
            return ()
        if shape.kind == "lightning":
            return self._projected()
        inputs = Saved(name=f"{at}.conv.output", width=Extent(self.inner.size + self.keys.size, "heads"))
        # Keys and queries, normalised and repeated for all heads.
        keys = Saved(name=f"{at}.scan.keys", width=Extent(2 * shape.heads * shape.key_dim, "heads"))
        triangle = Saved(name=f"{at}.scan.triangle", width=Extent(shape.heads * shape.chunk, "heads"))
        decays = shape.keys if shape.kind == "channel_delta" else shape.heads
        width = Extent(decays + shape.heads, "heads")
        return (inputs, keys, triangle, Saved(name=f"{at}.scan.decays", width=width, dtype="fp32"))

    def _norm(self, output: Saved) -> Pointwise:
        """The norm of the output, times its gate."""
        size = Extent(self.shape.head_dim) if self.shape.norm == "head" else self.inner
        return Pointwise(
            name=f"{self.at}.output_norm",
            forward=(Extent(3 * self.inner.size, "heads"),),
            backward=(Extent(5 * self.inner.size, "heads"),),
            weights=(Weight(name=f"{self.at}.output_norm.weight", shape=(size,)),),
            saved=(output,),
        )


def scan_flop(shape: RecurrentShape) -> int:
    """Flop per token of the forward pass over all heads, with chunks of Q tokens, keys of N and values of P
    elements.

    State-space duality (Dao and Gu 2024, arXiv 2405.21060, section 6): 2 Q N for the scores of a group; for
    each head 2 Q P for the values of the chunk, and 4 N P for its state and what the state gives. Lightning
    (arXiv 2401.04658): the same with scores of each head. The delta rule (Yang et al. 2024, arXiv 2412.06464,
    section 3.3) has three products of keys, two of values and three of the state in a chunk. A selective scan
    has no products: its exponentials are not counted.
    """
    heads, keys, values, chunk = shape.heads, shape.key_dim, shape.head_dim, shape.chunk
    match shape.kind:
        case "ssd":
            return 2 * chunk * shape.keys + heads * (2 * chunk * values + 4 * keys * values)
        case "lightning":
            return heads * (2 * chunk * (keys + values) + 4 * keys * values)
        case "delta" | "channel_delta":
            return heads * (2 * chunk * (3 * keys + 2 * values) + 6 * keys * values)
    return 0


def forward_elements(shape: RecurrentShape) -> int:
    """Elements per token that the kernels of a forward pass read and write for all heads.

    Between kernels there are the states of chunks (in fp32 of Mamba-2: written, read and written by the pass
    over chunks, read), the values, and of the delta rule the triangles of chunks, its inverses and the
    corrected keys and values.
    """
    heads, keys, values, chunk = shape.heads, shape.key_dim, shape.head_dim, shape.chunk
    state = -(-keys * values // chunk)
    match shape.kind:
        case "ssd":
            return heads * (4 * values + 8 * state)
        case "selective":
            return 4 * shape.inner
        case "lightning":
            return heads * (2 * keys + 2 * values + 2 * state)
    decays = 6 * keys if shape.kind == "channel_delta" else 0
    return heads * (7 * keys + 6 * values + 6 * chunk + 2 * state + decays)
