"""`check`, and the independent checker alone, check every key of a plan file or name it, and no value makes
them fail with an error.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.property.plan_kinds import ADDED, KINDS, Place, document_of, other, places, verdict_of, with_change
from tests.property.plan_mutants import with_hash

from shardwise import search
from shardwise.cluster import cluster_from_record
from shardwise.errors import ConfigError
from shardwise.inputs import Fields
from shardwise.model import model_from_config
from shardwise.questions import checked_plan, checking
from shardwise.strategy import Job, Strategy, profile_from_record
from shardwise_verify import InputError, check_document, check_file
from shardwise_verify.verdict import REASON_COSTS, REASON_OPERATORS, REASON_UNKNOWN

pytestmark = pytest.mark.xdist_group("plans of every kind")  # by one worker, which plans once

REMOVED = object()

BAD: tuple[Any, ...] = (
    0, -1, 10**18, 1e300, 1e-300, 0.5, 1_000_001, "9999999", "0-9999999", 1e9, "x", "", [], {}, None, True,
    [0], float("nan"), float("inf"), REMOVED,
)  # fmt: skip
"""Values that some key does not allow: of another size, sign or type, or none at all."""

ONE_IN = 180
"""One in this many changes with bad values is tried without `--full`."""

SPEED: Place = ("cluster", "classes", "A100-40G", "memory_bytes_per_s")

MATTERS: dict[str, tuple[Place, ...]] = {
    "uniform": (("job", "seq_len"), ("model", "config", "ffn"), SPEED),
    "uneven": (("job", "seq_len"), ("cluster", "tiers", 1, "bytes_per_s"), ("model", "config", "ffn_dim")),
    "graph": (("job", "dtype"), ("cluster", "tiers", 0, "bytes_per_s")),
}  # fmt: skip
"""Some keys of the question that change the answer."""


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A plan of every kind, by name."""
    return {name: document_of(name, tmp_path_factory.mktemp("plan")) for name in KINDS}


Found = tuple[bool, list[str]]
"""Whether no check fails, and the keys that are named as not judged or not re-derived."""


def alone(document: dict[str, Any], folder: Path) -> Found | None:
    """What the independent checker alone says; None where it refuses the document."""
    try:
        verdict = check_document(document)
    except InputError:
        return None
    return verdict.ok, [one.key for one in (*verdict.not_judged, *verdict.not_re_derived)]


def command(document: dict[str, Any], folder: Path) -> Found | None:
    """What `check` says; claims that the planner computes again do not count as named."""
    found = verdict_of(document, folder)
    if found is None:
        return None
    named = [*found.verdict.not_judged, *found.verdict.not_re_derived]
    return not found.failed, [one.key for one in named if one.why not in (REASON_COSTS, REASON_OPERATORS)]


CHECKERS = {"alone": alone, "command": command}

EVERY = {"alone": 1, "command": 3}
"""One in this many keys is changed without `--full`: `check` runs the independent checker too."""


def is_below(place: Place, keys: list[str]) -> bool:
    """Whether the place is one of these keys or below one; keys have no index."""
    names = ".".join(step for step in place if isinstance(step, str))
    return any(names == key or names.startswith(f"{key}.") for key in keys)


def value_at(document: dict[str, Any], place: Place) -> Any:
    value: Any = document
    for step in place:
        value = value[step]
    return value


def unnoticed(
    document: dict[str, Any],
    folder: Path,
    check: Callable[[dict[str, Any], Path], Found | None],
    every: int = 1,
) -> Iterator[Place]:
    """Keys that can change without a failed check, and that the answer does not name."""
    whole = check(document, folder)
    assert whole is not None and whole[0]
    for place in list(places(document))[::every]:
        if place == ("hash",) or is_below(place, whole[1]):
            continue
        changed = with_change(document, place, other(place))
        found = check(changed, folder)
        added = (*place, ADDED) if isinstance(value_at(document, place), dict) else place
        if found is None or not found[0] or is_below(added, found[1]):
            continue
        if "strategy" not in place or not is_as_true(changed, place[: place.index("strategy")]):
            yield place


def is_as_true(document: dict[str, Any], at: Place) -> bool:
    """Whether the planner's estimate of the result's strategy is that of the file: another strategy may take
    equally long and as many bytes.
    """
    result = value_at(document, at)
    model = model_from_config(document["model"]["config"], name="model")
    profile = profile_from_record(Fields(document["job"]["profile"]))
    job, cluster = Job(**{**document["job"], "profile": profile}), cluster_from_record(document["cluster"])
    estimate = search.evaluate(model, cluster, job, Strategy(**result["strategy"]))
    nbytes = result.get("device_bytes") or result["peak_memory_bytes"]["device"]
    found = estimate.step_time_s, estimate.peak_memory.device
    return found == pytest.approx((result["step_time_s"], nbytes), rel=1e-9)


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("name", KINDS)
def test_every_key_is_checked_or_named(
    name: str, checker: str, documents: dict[str, dict[str, Any]], tmp_path: Path, full: bool
) -> None:
    every = 1 if full else EVERY[checker]
    assert list(unnoticed(documents[name], tmp_path, CHECKERS[checker], every)) == []


@pytest.mark.parametrize("name", KINDS)
def test_every_named_key_is_in_the_file(name: str, documents: dict[str, dict[str, Any]]) -> None:
    """Or may be in it: of the reasons to reject, those are there that some candidate met. None is named only
    because the checker does not know it: a new key must be checked, or be named with a reason of its own.
    """
    verdict = check_document(documents[name], proof_budget_s=0.0)
    for one in (*verdict.not_judged, *verdict.not_re_derived):
        assert one.why != REASON_UNKNOWN, one
        found: Any = documents[name]
        for step in one.key.split("."):
            found = found[0] if isinstance(found, list) else found
            assert step in found or "rejected" in one.key, one
            found = found.get(step)


def test_a_key_of_a_later_planner_is_named(documents: dict[str, dict[str, Any]]) -> None:
    document = copy.deepcopy(documents["uniform"])
    document["best"]["strategy"]["colour"] = 1
    document["best"]["layout"]["pipelines"][0]["colour"] = 1
    verdict = check_document(with_hash(document), proof_budget_s=0.0)
    named = [one.key for one in verdict.not_re_derived if one.why == REASON_UNKNOWN]
    assert named == ["best.strategy.colour", "best.layout.pipelines.colour"]


@pytest.mark.parametrize("name", MATTERS)
def test_a_plan_is_refused_for_another_question(
    name: str, documents: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for place in MATTERS[name]:
        verdict = verdict_of(with_change(documents[name], place, twice), tmp_path)
        assert verdict is None or verdict.failed, place


def twice(value: Any) -> Any:
    """Twice a number, or another dtype."""
    return "fp32" if isinstance(value, str) else 2 * value


def test_a_checker_that_skips_figures_is_noticed(
    documents: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_result_checks", lambda found, predicted: ())
    found = set(unnoticed(documents["uneven"], tmp_path, command))
    assert {("best", "band_s", 0), ("best", "memory", "tightest_rank"), ("best", "mfu")} <= found


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({("certificate", "unexplored"): 5, ("certificate", "gap"): 0.0}, "candidates"),
        ({("mixed", "uniform_step_time_s"): 1e-3}, "compared"),
        ({("mixed", "fastest_class_step_time_s"): 0.5}, "compared"),
        ({("mixed", "fastest_class"): "T4"}, "compared"),
        ({("certificate", "lower_bound_s"): 1.8, ("certificate", "gap"): -0.49}, "lower bound"),
    ],
)  # fmt: skip
def test_claims_of_an_uneven_plan_that_fit_together_are_found_out(
    changes: dict[Place, Any], wrong: str, documents: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    document = documents["uneven"]
    for place, value in changes.items():
        document = json.loads(with_value(document, place, value))
    verdict = check_document(document)
    assert wrong in [check.name for check in verdict.checks if not check.ok and not check.is_open]


def outcomes(text: str, folder: Path) -> Iterator[object]:
    """The outcomes of the checker and of `check` on a file: any other exception is an error of theirs."""
    path = folder / "bad.json"
    path.write_text(text)
    try:
        yield check_file(str(path), proof_budget_s=0.0)
    except InputError as error:
        yield error
    try:
        yield checked_plan(str(path), 0.0)
    except ConfigError as error:
        yield error


@pytest.mark.parametrize("name", KINDS)
def test_no_value_makes_the_checker_fail(
    name: str, documents: dict[str, dict[str, Any]], tmp_path: Path, full: bool
) -> None:
    rng = random.Random(7)
    for place in places(documents[name]):
        for bad in BAD:
            if full or rng.randrange(ONE_IN) == 0:
                assert all(map(str, outcomes(with_value(documents[name], place, bad), tmp_path))), (
                    place,
                    bad,
                )


def with_value(document: dict[str, Any], place: Place, value: Any) -> str:
    """The text of the document with a value at this place or without one; with its hash where it has one."""
    changed = copy.deepcopy(document)
    parent: Any = changed
    for step in place[:-1]:
        parent = parent[step]
    if value is REMOVED:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    with suppress(ValueError):  # values that are not finite have no hash
        with_hash(changed)
    return json.dumps(changed)
