"""Software profiles: inheritance, the numbers that apply, and the record in a plan file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from tests.property.software import SOFTWARE

from shardwise.errors import ConfigError
from shardwise.inputs import Fields
from shardwise.numbers import Number, numbers_record
from shardwise.strategy import (
    MEGATRON_2024,
    PROFILES,
    Job,
    Profile,
    numbers_of_profile,
    profile_from_record,
    profile_numbers,
    profile_of,
)
from shardwise.strategy import profile as profile_module

EVERY = [
    Number(of=("*",), field=field, value=value, source="a test")
    for field, value in {
        "pointwise_passes": 1.0,
        "dispatch_s": 2e-5,
        "expert_dispatch_s": 3e-3,
        "host_action_s": 4e-5,
        "host_step_s": 5e-3,
    }.items()
]
"""The fewest numbers of a profile."""


def test_the_default_profile_is_megatron_2024() -> None:
    assert Job(seq_len=1, global_batch_size=1, dtype="bf16").profile is MEGATRON_2024
    assert MEGATRON_2024 == PROFILES["megatron-2024"] == profile_of("megatron-2024", profile_numbers())


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_plausible_and_knows_its_sources(name: str) -> None:
    profile = PROFILES[name]
    assert profile.name == name and len(profile.described) > 10
    shares = {
        field.name: getattr(profile, field.name) for field in fields(Profile) if "overlap" in field.name
    }
    assert len(shares) == 8 and all(0.0 <= share <= 1.0 for share in shares.values())
    assert shares["tensor_overlap"] + shares["tensor_backward_overlap"] <= 1.0
    assert set(profile.zero_stages) <= {0, 1, 2, 3} and set(profile.recomputes) <= {
        "none",
        "selective",
        "full",
    }
    assert {"pointwise_passes", "dispatch_s", "host_step_s"} <= set(profile.provenance)
    assert set(profile.provenance) <= {field.name for field in fields(Profile)}
    assert all(profile.provenance.values())
    assert sorted(number.field for number in numbers_of_profile(name, profile_numbers())) == sorted(
        profile.provenance
    )


SHAPES: dict[str, Any] = {
    "bands": {"warm": [0.9, 1], "cold": [0.5, 2.0]},
    "software": {
        "root": {
            "described": "the first", "attention": ["flash-2"], "overlaps": ["data", "context"],
            "reduce_in_fp32": True, "zero_stages": [0, 1], "recomputes": ["none"],
            "recompute_stops_early": False, "applies_dropout": True, "sequence_parallel": True,
            "buffers_all_microbatches": False, "keeps_gathered_inputs": False, "reduces_by_block": False,
        },
        "child": {
            "like": "root", "described": "the second", "attention": [], "overlaps": ["tensor_backward"],
        },
        "grandchild": {"like": "child", "described": "the third", "reduce_in_fp32": False},
    },
}  # fmt: skip
"""Software as in the data file: a chain of three."""


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "_data", lambda: SHAPES)


@pytest.mark.usefixtures("shapes")
def test_software_inherits_fields_and_numbers_of_its_base() -> None:
    numbers = [
        *EVERY,
        Number(of=("root",), field="dispatch_s", value=1.0, source="of root"),
        Number(of=("child", "else"), field="dispatch_s", value=2.0, source="of child"),
        Number(of=("grandchild",), field="host_step_s", value=3.0, source="of grandchild"),
        Number(of=("else",), field="host_action_s", value=4.0, source="of another"),
    ]
    found = profile_of("grandchild", numbers)
    assert (found.dispatch_s, found.host_step_s, found.host_action_s) == (2.0, 3.0, 4e-5)
    assert found.provenance == {
        "pointwise_passes": "a test",
        "dispatch_s": "of child",
        "expert_dispatch_s": "a test",
        "host_action_s": "a test",
        "host_step_s": "of grandchild",
    }
    assert (found.name, found.described) == ("grandchild", "the third")
    assert (found.attention, found.reduce_in_fp32) == ((), False)  # from child itself
    assert (found.zero_stages, found.recomputes) == ((0, 1), ("none",))  # from root
    assert (found.warm_band, found.cold_band) == ((0.9, 1.0), (0.5, 2.0))
    root = profile_of("root", numbers)
    assert (root.dispatch_s, root.host_step_s, root.attention) == (1.0, 5e-3, ("flash-2",))
    with_value = {number.field: number.value for number in numbers_of_profile("child", numbers)}
    assert with_value["dispatch_s"] == 2.0 and with_value["host_step_s"] == 5e-3


@pytest.mark.usefixtures("shapes")
def test_overlaps_are_full_or_none_unless_a_number_is_given() -> None:
    def shares(name: str, *numbers: Number) -> dict[str, float]:
        found = profile_of(name, [*EVERY, *numbers])
        return {f.name: getattr(found, f.name) for f in fields(Profile) if getattr(found, f.name) != 0.0
                and "overlap" in f.name}  # fmt: skip

    assert shares("root") == {"data_overlap": 1.0, "state_overlap": 1.0, "context_overlap": 1.0}
    # A list of overlaps replaces the inherited one.
    assert shares("child") == shares("grandchild") == {"tensor_backward_overlap": 1.0}
    half = Number(of=("root",), field="data_overlap", value=0.5, source="a test")
    # Sharded states overlap as data does, unless something else is given.
    halves = {"data_overlap": 0.5, "state_overlap": 0.5}
    assert shares("root", half) == {**halves, "context_overlap": 1.0}
    assert shares("child", half) == {**halves, "tensor_backward_overlap": 1.0}
    states = Number(of=("root",), field="state_overlap", value=0.25, source="a test")
    assert shares("root", states) == {"data_overlap": 1.0, "state_overlap": 0.25, "context_overlap": 1.0}


def test_whole_numbers_are_floats() -> None:
    # A plan that was read back is written with the same bytes.
    for profile in PROFILES.values():
        floats = [getattr(profile, field.name) for field in fields(Profile) if field.type == "float"]
        assert all(isinstance(value, float) for value in floats)
        assert all(isinstance(end, float) for end in (*profile.warm_band, *profile.cold_band))


def test_without_overlap_hides_nothing_and_keeps_all_else() -> None:
    profile = SOFTWARE["everything"]
    shown = profile.without_overlap()
    changed = {f.name for f in fields(Profile) if getattr(shown, f.name) != getattr(profile, f.name)}
    assert changed == {f.name for f in fields(Profile) if getattr(profile, f.name) and "overlap" in f.name}
    assert all(getattr(shown, f.name) == 0.0 for f in fields(Profile) if "overlap" in f.name)


def record(profile: Profile) -> Any:
    """The record in a file."""
    return json.loads(json.dumps(asdict(profile)))


@pytest.mark.parametrize("profile", [*PROFILES.values(), *SOFTWARE.values()], ids=lambda p: str(p.name))
def test_records_are_read_back(profile: Profile) -> None:
    found = profile_from_record(Fields(record(profile)))
    assert found == profile
    assert json.dumps(record(found)) == json.dumps(record(profile))


def _set(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.update({name: value})


OPTIONAL_FIELDS = (
    "peak_errors", "state_overlap", "applies_dropout", "loss", "keeps_low_precision_weights", "eager_modules",
    "shards_experts_by_instance", "whole_in_pipelines", "keeps_split_graphs",
    "needs_sequence_parallel", "linked_devices", "accumulates_in_fp32", "moment_bytes", "master_bytes",
    "accumulated_bytes", "fuses_accumulation", "expert_bias_forward_bytes", "expert_bias_backward_bytes",
    "offload_modules", "options", "has_wide_frozen_weights",
    "has_fp8_parameters", "bucket_elements", "gathered_elements", "update_elements", "keeps_narrow_gradients",
    "offloads_gradients", "host_weight_bytes", "host_process_bytes",
)  # fmt: skip
"""Fields that the first records did not have, and those of options that may be left out."""


def test_a_record_from_before_shared_states_had_a_share_of_their_own() -> None:
    changed = record(replace(MEGATRON_2024, data_overlap=0.75, state_overlap=0.25))
    del changed["state_overlap"]
    assert profile_from_record(Fields(changed)).state_overlap == 0.75


def test_all_software_of_a_record_from_before_applied_dropout() -> None:
    changed = record(replace(MEGATRON_2024, applies_dropout=False))
    assert not profile_from_record(Fields(changed)).applies_dropout
    del changed["applies_dropout"]
    assert profile_from_record(Fields(changed)).applies_dropout


def test_the_loss_of_a_record_from_before_it_had_one() -> None:
    for by_block, loss in ((False, "in_place"), (True, "megatron")):
        changed = record(replace(MEGATRON_2024, loss="eager", reduces_by_block=by_block))
        assert profile_from_record(Fields(changed)).loss == "eager"
        del changed["loss"]
        assert profile_from_record(Fields(changed)).loss == loss


FAULTS: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    *(
        (field.name, lambda record, name=field.name: record.pop(name))
        for field in fields(Profile)
        if field.name not in OPTIONAL_FIELDS
    ),
    ("surplus", _set("surplus", 1)),
    ("data_overlap", _set("data_overlap", 1.01)),  # more than the whole
    ("data_overlap", _set("data_overlap", -0.01)),
    ("data_overlap", _set("data_overlap", "all")),
    ("pipeline_overlap", _set("pipeline_overlap", None)),
    ("dispatch_s", _set("dispatch_s", -1e-6)),
    ("dispatch_s", _set("dispatch_s", float("nan"))),
    ("dispatch_s", _set("dispatch_s", float("inf"))),
    ("host_step_s", _set("host_step_s", 1e9)),
    ("reduce_in_fp32", _set("reduce_in_fp32", 1)),
    ("linked_devices", _set("linked_devices", -1)),
    ("linked_devices", _set("linked_devices", 0.5)),
    ("name", _set("name", 5)),
    ("described", _set("described", "x" * 1001)),
    ("loss", _set("loss", "quick")),
    ("attention", _set("attention", "flash-2")),
    ("attention[0]", _set("attention", [2])),
    ("zero_stages[0]", _set("zero_stages", [4])),
    ("zero_stages[1]", _set("zero_stages", [1, 1.5])),
    ("warm_band", _set("warm_band", [])),
    ("warm_band", _set("warm_band", [0.9])),
    ("cold_band", _set("cold_band", 1.2)),
    ("peak_errors", _set("peak_errors", [0.0, 0.1])),
    ("peak_errors.bias", _set("peak_errors", {"kind": "all"})),
    ("provenance", _set("provenance", ["fitted"])),
    ("provenance.dispatch_s", _set("provenance", {"dispatch_s": 1})),
]


@pytest.mark.parametrize(("key", "fault"), FAULTS)
def test_bad_records_are_refused_with_the_key(key: str, fault: Callable[[dict[str, Any]], None]) -> None:
    changed = record(MEGATRON_2024)
    fault(changed)
    with pytest.raises(ConfigError) as caught:
        profile_from_record(Fields(changed, key="job.profile"))
    assert str(caught.value.key).startswith("job.profile")
    assert key.split("[")[0] in str(caught.value.key) + str(caught.value.found)


def test_tensor_overlaps_hide_no_more_than_all_together() -> None:
    for forward, more, is_refused in ((0.4, 0.6, False), (0.4, 0.7, True), (1.0, 0.1, True)):
        changed = replace(MEGATRON_2024, tensor_overlap=forward, tensor_backward_overlap=more)
        if not is_refused:
            assert profile_from_record(Fields(record(changed))) == changed
            continue
        with pytest.raises(ConfigError, match="tensor_backward_overlap"):
            profile_from_record(Fields(record(changed)))


def test_the_list_of_numbers_is_its_own_record() -> None:
    assert [entry["field"] for entry in numbers_record(profile_numbers())] == [
        number.field for number in profile_numbers()
    ]
