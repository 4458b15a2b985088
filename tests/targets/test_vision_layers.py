"""Vision towers of Transformers: bytes that their layers save per patch, and the classes of the layers.

The towers are small and on the CPU, with images of 8 x 8 patches; all layers attend to the whole image."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.targets.counting import SavedBytes, count_calls
from tests.unit.model.vision_configs import as_mapping, small_config

from shardwise.cluster import load_cluster
from shardwise.cost import bind
from shardwise.cost.layers import _work_of
from shardwise.model import Model, model_from_config, vision_classes
from shardwise.model.vision import vision_types
from shardwise.strategy import PROFILES, Job, StrategyTable, complete
from shardwise.targets.hugging_face import layer_classes

WITHIN = 0.01
IMAGES = {"count": 1, "height": 112, "width": 112}


def model_of(config: Any) -> Model:
    return model_from_config({**as_mapping(config), "images": IMAGES})


def predicted(model: Model, profile: str = "fsdp2-eager") -> float:
    """Bytes that a layer of the tower saves."""
    job = Job(seq_len=64, global_batch_size=1, dtype="bf16", profile=PROFILES[profile])
    problem = bind(model, load_cluster("1xH100-SXM"), job)
    experts = None if model.experts is None else model.experts.experts
    row = complete(
        {"micro_batch_size": 1}, devices=1, layers=model.layers, global_batch_size=1, experts=experts
    )
    layers = [one for one in model.embedding if one.name.startswith("vision.layers.")]
    return float(_work_of(problem, StrategyTable.of([row]), layers, None).saved_bytes[0]) / 4


def built(config: Any) -> tuple[Any, Any, Any]:
    """The model, its tower, and the four layers of it."""
    import torch
    import transformers as package

    transformers: Any = package
    model = transformers.AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).train()
    inner = getattr(model, "model", model)
    tower = next(
        getattr(inner, name) for name in ("visual", "vision_tower", "vision_model") if hasattr(inner, name)
    )
    lists = (each for each in tower.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == 4)
    return model, tower, next(lists)


def counted(config: Any) -> float:
    """Bytes that the last layer saves: the first has what all share, such as tables of angles."""
    import torch

    model, tower, layers = built(config)
    saved, totals = SavedBytes(model), list[int]()
    for layer in layers:
        count_calls(layer, saved, totals)
    if type(tower).__name__.startswith(("Qwen", "Glm")):
        vision = config.vision_config
        elements = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(64, elements, dtype=torch.bfloat16)
        tower(pixels, grid_thw=torch.tensor([[1, 8, 8]]))
    else:
        sizes = {"image_sizes": torch.tensor([[112, 112]])} if "Pixtral" in type(tower).__name__ else {}
        tower(torch.randn(1, 3, 112, 112, dtype=torch.bfloat16), **sizes)
    return float([after - before for before, after in pairwise(totals)][-1])


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("model_type", vision_types())
def test_layers_save_what_is_predicted(model_type: str) -> None:
    config = small_config(model_type)
    ours, theirs = predicted(model_of(config)), counted(config)
    assert abs(ours / theirs - 1.0) < WITHIN, f"counted {theirs:.0f} bytes, ours {ours:.0f}"


def test_fused_modules_save_less() -> None:
    """The counterpart: a profile without eager modules predicts less than was counted."""
    config = small_config("mistral3")
    assert predicted(model_of(config), "fsdp") < (1.0 - 10 * WITHIN) * counted(config)


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("model_type", vision_types())
def test_classes_of_layers_and_names_of_modules(model_type: str) -> None:
    config = small_config(model_type)
    model, _, layers = built(config)
    ours = model_of(config)
    *decoder, tower = layer_classes(ours)
    assert {type(layer).__name__ for layer in layers} == {tower}
    found = {type(module).__name__ for module in model.modules()}
    assert {*decoder} <= found
    names = {name for name, _ in model.named_modules()}
    for of_part in vision_classes(ours.config).modules.values():
        assert {*of_part} <= names
