"""What `runtime/private.py` assumes of PyTorch's private parts: an upgrade that changes it fails here."""

from __future__ import annotations

import inspect
import time

import pytest
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.runtime.private import profiled_events
from shardwise.schedule import NAMES, generate, lower, to_text

pytestmark = pytest.mark.xdist_group("runtime")


@pytest.mark.parametrize("name", NAMES)
def test_actions_as_text_are_pytorchs(name: str) -> None:
    vpp = 2 if name in ("interleaved_1f1b", "zb_v", "dualpipe_v") else 1
    schedule = generate(name, pp=2, microbatches=4, vpp=vpp)
    for row in lower(schedule).ranks:
        assert [str(_Action.from_str(str(step))) for step in row] == [str(step) for step in row]
    assert to_text(schedule)


def test_the_runtime_takes_actions_with_communication() -> None:
    parameters = inspect.signature(_PipelineScheduleRuntime._prepare_schedule_with_comms).parameters
    assert list(parameters) == ["self", "actions", "format"]
    assert "compute_comms" in str(parameters["format"].annotation)
    source = inspect.getsource(_PipelineScheduleRuntime.__init__)
    assert "self.unsharded_stages = set()" in source


def test_a_profile_tells_when_it_started() -> None:
    """Events are told in microseconds since a start that is on the machine's clock in nanoseconds."""
    before = time.time()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("something"):
        pass
    (found,) = (event for event in profiled_events(profiler) if event[0] == "something")
    assert before - 1 <= found[1] <= found[2] <= time.time() + 1


def test_the_stage_asks_before_each_backward() -> None:
    parameters = inspect.signature(PipelineStage.backward_maybe_with_nosync).parameters
    assert list(parameters) == ["self", "backward_type", "bwd_kwargs", "last_backward"]
    source = inspect.getsource(PipelineStage.backward_maybe_with_nosync)
    for key in ("stage_output", "output_grads", "input_values"):
        assert f'bwd_kwargs["{key}"]' in source
    assert list(inspect.signature(stage_backward).parameters)[:3] == [
        "stage_output",
        "output_grads",
        "input_values",
    ]
