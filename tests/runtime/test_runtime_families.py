"""Numerics of model families: a model without one of its mechanisms is detected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.runtime.equality import load_weights
from tests.runtime.plans import SLOPED_ONCE, tiny
from torch import Tensor

from shardwise.runtime import reference_module
from shardwise.runtime.attention import Scores, alibi_slopes, scored_attention
from shardwise.runtime.layers import gated, softcapped
from shardwise.runtime.numerics import Gate, Numerics, Routing, numerics_of
from shardwise.runtime.rope import Rope, YarnScaling, rotation_of

TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor, Tensor]]:
    """For a tiny model: weights that Transformers wrote, tokens, and the logits that Transformers
    computes."""

    @cache
    def of(name: str) -> tuple[Path, Tensor, Tensor]:
        import transformers  # here, because it takes seconds

        config = dict(tiny(name).config)
        built = transformers.AutoConfig.for_model(str(config.pop("model_type")), **config)
        make: Any = transformers.AutoModelForCausalLM.from_config
        other = make(built, attn_implementation=SLOPED_ONCE if name == "falcon-rw" else "eager").eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for key, tensor in other.state_dict().items():
                corrects = "correction" in key
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.5 if corrects else 0.2)
            tokens = torch.randint(3, 96, (2, 20), generator=generator)
            logits = other(tokens).logits
        folder = tmp_path_factory.mktemp(name)
        other.save_pretrained(folder)
        return folder, tokens, logits

    return of


def error(written: tuple[Path, Tensor, Tensor], name: str) -> float:
    """The largest difference between our logits and theirs."""
    folder, tokens, logits = written
    module = reference_module(tiny(name))
    load_weights(module, tiny(name), str(folder))
    with torch.no_grad():
        return float((module(tokens) - logits).abs().max())


OSS = Gate(activation="silu", gain=1.702, shift=1.0, limit=1.0)
V3 = Routing(score="sigmoid", renormalised=True, scale=2.0, best_of_group=2, correction=True)

CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "scores without a cap": ("gemma2", {"score_cap": None}),
    "logits without a cap": ("gemma2", {"logit_cap": None}),
    "scores with the default divisor": ("gemma2", {"score_divisor": None}),
    "embeddings without scaling": ("gemma2", {"are_scaled": False}),
    "one rotary base for all layers": ("gemma3", {"window_theta": None}),
    "no rotary scaling": ("gemma3", {"scaling": None}),
    "positions from the first row on": ("opt", {"first_position": 0}),
    "no slopes": ("bloom", {"alibi": None}),
    "slopes added to divided scores": ("falcon-rw", {"alibi": 1.0}),
    "gates without a limit": ("gpt_oss", {"expert_gate": replace(OSS, limit=None)}),
    "SiLU gates": ("gpt_oss", {"expert_gate": replace(OSS, gain=1.0)}),
    "ups without a shift": ("gpt_oss", {"expert_gate": replace(OSS, shift=0.0)}),
    "probabilities without normalisation": ("gpt_oss", {"routing": Routing()}),
    "no rope attention factor": ("gpt_oss", {"rope_attention_factor": 1.0}),
    "no YaRN": ("gpt_oss", {"scaling": None}),
    "halves rotated instead of neighbours": ("deepseek_v2", {"interleaved": False}),
    "no score factor": ("deepseek_v2", {"score_factor": 1.0}),
    "probabilities among all experts": ("deepseek_v3", {"routing": replace(V3, score="softmax")}),
    "weights that are not scaled": ("deepseek_v3", {"routing": replace(V3, scale=1.0)}),
    "scores that are not corrected": ("deepseek_v3", {"routing": replace(V3, correction=False)}),
    "groups that count as their best": ("deepseek_v3", {"routing": replace(V3, best_of_group=1)}),
}
"""A model, and the numerics of it that are removed or changed."""


def without_window(**kinds: Any) -> Scores:
    return Scores(**{**kinds, "window": None})


def without_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scores: Scores) -> Tensor:
    return scored_attention(q, k, v, None, scores)


def all_groups(self: Any, scores: Tensor) -> Tensor:
    return scores


def past(norm: Any, x: Tensor) -> Tensor:
    return x


def not_shifted(self: Any, inner: str, tensor: Tensor, sign: int) -> Tensor:
    return tensor


REPLACED: dict[str, tuple[str, str, Any]] = {
    "no window": ("gpt_oss", "shardwise.runtime.attention.Scores", without_window),
    "no window on fused kernels": ("phi3", "shardwise.runtime.attention.Scores", without_window),
    "no sinks": ("gpt_oss", "shardwise.runtime.attention.scored_attention", without_sinks),
    "experts of all groups": ("deepseek_v2", "shardwise.runtime.moe.Router._eligible", all_groups),
    "no norms after blocks": ("gemma2", "shardwise.runtime.modules._apply_norm", past),
    "no norm after the embedding": ("bloom", "shardwise.runtime.modules._apply_norm", past),
    "norm weights without an offset": (
        "gemma3",
        "shardwise.runtime.weights._Named.with_norm_offset",
        not_shifted,
    ),
}
"""A model, the dotted name that is patched, and its replacement."""


@pytest.mark.parametrize("mutant", CHANGED)
def test_a_model_without_one_of_its_numerics_is_detected(written: Any, mutant: str) -> None:
    name, changes = CHANGED[mutant]
    assert error(written(name), name) < TOLERANCE

    def changed(model: Any) -> Numerics:
        return replace(numerics_of(model), **changes)

    with patch("shardwise.runtime.modules.numerics_of", changed):
        assert error(written(name), name) > 20 * TOLERANCE


@pytest.mark.parametrize("mutant", REPLACED)
def test_a_model_without_one_of_its_parts_is_detected(written: Any, mutant: str) -> None:
    name, place, instead = REPLACED[mutant]
    assert error(written(name), name) < TOLERANCE
    with patch(place, instead):
        assert error(written(name), name) > 20 * TOLERANCE


def test_slopes_are_those_of_the_paper() -> None:
    """8 heads: 1/2, 1/4 ... 1/256. 6 heads: those of 4 heads, 2^-2 to 2^-8, and the first and third of 8."""
    assert alibi_slopes(8) == tuple(2.0**-number for number in range(1, 9))
    assert alibi_slopes(6) == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3)


def test_yarn_slows_the_pairs_of_low_frequency() -> None:
    """8 pairs with theta 16 have frequencies 2^(-i/2). Over the original length of 64 pi, pair 0 makes 32
    rotations and pair 10 would make one. So pair i moves i/10 of the way to a quarter of its frequency."""
    yarn = YarnScaling(factor=4.0, fast=32.0, slow=1.0, length=64 * torch.pi, truncates=False)
    rotation = rotation_of(Rope(dims=16, theta=16.0, scaling=yarn), torch.tensor([1]))
    angles = torch.atan2(rotation.sin, rotation.cos).flatten()
    expected = [2 ** (-i / 2) * (1 - 0.75 * i / 10) for i in range(8)]
    assert angles.tolist() == pytest.approx(expected, rel=1e-5)


def test_capped_logits_have_the_gradient_of_their_formula() -> None:
    logits, weights = torch.randn(2, 2, 3, 5, dtype=torch.float64)
    logits.requires_grad_()
    found, expected = softcapped(logits * 1, 1.5), 1.5 * torch.tanh(logits / 1.5)
    torch.testing.assert_close(found, expected)
    ours, right = (torch.autograd.grad((each * weights).sum(), logits)[0] for each in (found, expected))
    torch.testing.assert_close(ours, right)


def test_a_clamped_gate_has_the_gradient_of_its_formula() -> None:
    gate, up = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for how in (OSS, Gate(activation="silu"), Gate(activation="gelu_tanh")):
        assert torch.autograd.gradcheck(lambda gate, up, how=how: gated(gate, up, how), (gate, up))


SCORES = [
    Scores(scale=0.3),
    Scores(scale=0.3, cap=1.0),
    Scores(scale=0.3, window=150),
    Scores(scale=0.3, cap=2.0, window=3),
]
TOKENS = 300
"""More than one block of scores has, and no multiple of it."""


def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scores: Scores) -> Tensor:
    """The same attention with the full matrix of scores."""
    k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
    found = q @ k.transpose(2, 3) * scores.scale
    if scores.cap is not None:
        found = torch.tanh(found / scores.cap) * scores.cap
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    found = found.masked_fill((distance < 0) | (distance >= (scores.window or TOKENS)), -torch.inf)
    of_sink = sinks[None, :, None, None].expand(2, 4, TOKENS, 1)
    return torch.cat((found, of_sink), dim=-1).softmax(-1)[..., :-1] @ v


def error_of_scores(scores: Scores) -> float:
    """The largest difference of outputs and gradients from `dense`, relative to the largest of each."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, TOKENS, 8), (2, 2, TOKENS, 8), (2, 2, TOKENS, 6), (4,))
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    weights = torch.randn(2, 4, TOKENS, 6, generator=generator)
    both = []
    q, k, v, sinks = inputs
    for function in (scored_attention, dense):
        out = function(q, k, v, sinks, scores)
        both.append([out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)])
    return max(
        float((ours - right).abs().max() / right.abs().max()) for ours, right in zip(*both, strict=True)
    )


@pytest.mark.parametrize("scores", SCORES)
def test_attention_with_special_scores_equals_the_full_score_matrix(scores: Scores) -> None:
    assert error_of_scores(scores) < 1e-5


def test_a_mutant_that_forgets_earlier_keys_is_detected() -> None:
    def own_alone(tokens: int, window: int | None) -> list[tuple[slice, slice]]:
        places = [slice(start, min(start + 128, tokens)) for start in range(0, tokens, 128)]
        return [(place, place) for place in places]

    with patch("shardwise.runtime.attention._blocks", own_alone):
        assert error_of_scores(SCORES[1]) > 1e-2
