"""Offloaded tensors go to the host, come back unchanged, and take no more memory than necessary."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from tests.runtime.equality import whole_module
from tests.runtime.plans import tiny
from torch import Tensor

from shardwise.runtime import offload
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.offload import ActivationOffload, OptimizerOffload
from shardwise.runtime.optimizer import optimizer_of

TOKENS = torch.arange(2 * 16).reshape(2, 16)


def stage_of(kind: str = "none") -> ModelStage:
    stage = whole_module(tiny("llama"), 0)
    for layer in stage.layers.values():
        layer.recompute = kind
    return stage


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("elements", [1, 2000, 1 << 30])
def test_a_step_on_the_host_is_the_device_s_bit_by_bit(optimizer: str, elements: int) -> None:
    """With one parameter per chunk, some, or all."""
    plain = stage_of()
    away = copy.deepcopy(plain)
    states = OptimizerOffload(
        [away], device_type="cpu", dtype=torch.float32, keeps_shards=False, chunk_elements=elements
    )
    one = optimizer_of(optimizer, plain.parameters(), lr=0.1)
    other = optimizer_of(optimizer, [states.parameters[p] for p in away.parameters()], lr=0.1)
    for _ in range(3):
        for module in (plain, away):
            module(TOKENS).square().mean().backward()
        one.step()
        one.zero_grad()
        states.step(other)
        assert all(p.grad is None for p in away.parameters())
        for mine, its in zip(plain.parameters(), away.parameters(), strict=True):
            assert torch.equal(mine, its)
            assert torch.equal(its, states.parameters[its])
            assert its.data_ptr() != states.parameters[its].data_ptr()


def test_weights_updated_on_the_host_are_copied_to_the_device() -> None:
    stage = stage_of()
    states = OptimizerOffload([stage], device_type="cpu", dtype=torch.float32, keeps_shards=False)
    with torch.no_grad():
        for own in states.parameters.values():
            own.fill_(2.0)
    states.sync_weights()
    assert all(bool((p == 2.0).all()) for p in stage.parameters())


def gradients(stage: ModelStage) -> list[Tensor]:
    stage(TOKENS).square().mean().backward()
    found = [p.grad for p in stage.parameters()]
    stage.zero_grad()
    return [each for each in found if each is not None]


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_offloading_keeps_gradients_and_moves_each_storage_once(kind: str) -> None:
    """Elements of a token, by hand, with 4 heads of 8 (2 key-value heads) and an MLP width of 48. A layer
    saves its input, the normed input (once for q, k and v), q, k and v as attention reads them, the attention
    output (once for attention and for the projection after it), both tensors of the second norm, gate, up,
    and their product."""
    stage = stage_of(kind)
    right = gradients(stage)
    buffers: list[int] = []
    allocate = offload.host_buffer_like

    def host_buffer_like(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        buffers.append(torch.Size(shape).numel())
        return allocate(tensor, shape, dtype)

    stage.host = ActivationOffload("cpu")
    for layer in stage.layers.values():
        layer.store = stage.host
    with patch.object(offload, "host_buffer_like", host_buffer_like):
        found = gradients(stage)
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    saved = {
        "none": [32, 32, 32, 16, 16, 32, 32, 32, 48, 48, 48],
        "selective": [32, 32, 16, 16, 32, 48, 48, 32],  # input, q, k, v, out, gate, up, down
        "full": [32],
    }
    tokens, layers = TOKENS.numel(), len(stage.layers)
    assert sorted(buffers) == sorted(tokens * each for each in saved[kind] * layers)


def test_two_layers_are_on_the_device_at_a_time() -> None:
    """Inputs of layers, which `full` recomputation saves, by when they are freed: that of the first layer
    when the second is done; none is left after the backward pass."""
    stage = stage_of("full")
    stage.host = ActivationOffload("cpu")
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[list[int]] = []

    def seen(_: object, given: tuple[Tensor, object]) -> None:
        inputs.append(weakref.ref(given[0].untyped_storage()))
        gc.collect()
        alive.append([number for number, each in enumerate(inputs) if each() is not None])

    for layer in stage.layers.values():
        layer.register_forward_pre_hook(seen)
    stage(TOKENS).sum().backward()
    assert alive[:4] == [[0], [0, 1], [1, 2], [2, 3]]


def test_indices_parameters_and_small_tensors_stay() -> None:
    activations = ActivationOffload("cpu")
    weight = torch.nn.Linear(64, 64)
    shared = torch.ones(64, 64)
    with activations.layer(weight, [shared]):
        resident = [weight.weight, weight.weight.t(), shared[1:], torch.arange(4096), torch.ones(8)]
        saved = [activations.pack(each) for each in resident]
        assert all(isinstance(each, Tensor) for each in saved)
        first, part = torch.ones(64, 64), torch.ones(64, 128)
        pair = activations.pack(first), activations.pack(first.view(-1))
        gaps = activations.pack(part[:, :64])
    assert pair[0].buffer is pair[1].buffer
    assert gaps.buffer.on_host.numel() == 64 * 64  # without the gaps
    for one, right in zip((*pair, gaps), (first, first.view(-1), part[:, :64]), strict=True):
        assert torch.equal(activations.unpack(one), right)
