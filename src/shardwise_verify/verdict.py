"""The verdict on a plan file: one check for each statement that must hold (`check_document`, `Verdict`), and
the keys of the file that no check covers, with the reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise_verify.arithmetic import count_checks, unlike_checks
from shardwise_verify.checks import Check, UncheckedKey, open_if_approximated, unchecked, value_check
from shardwise_verify.peak_errors import band_checks
from shardwise_verify.problem import figures_of
from shardwise_verify.proof import PROOF_BUDGET_S, Progress, nothing_faster_check, optimal_check
from shardwise_verify.reading import InputError, keys_left, read_document, record, short
from shardwise_verify.records import PlanRecord
from shardwise_verify.rules import HOST_MEMORY, MEMORY
from shardwise_verify.targets import ANY, is_known, options_checks
from shardwise_verify.uniform import uniform_checks

SCHEMA = "shardwise.plan"
VERSION = 2
SCHEMAS_OF_VERSION_1 = (SCHEMA, "shardwise.uneven-plan", "shardwise.graph-plan")

UNHASHED = ("rejected", "cut_by_bound", "simulated", "search_s", "search_cpu_s")
PROVENANCE = ("assumptions", "provenance", "sources")
"""Keys that the hash omits: in the certificate, and anywhere in the cluster and the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All checks, in order; the plan holds where none fails. `plan_hash` is the one stated in the file.

    `not_judged` are keys about which there is nothing to judge: the question, and the effort of the search.
    `not_re_derived` are claims that no check covers. Keys of items of a list have no index.
    """

    plan_hash: str
    checks: tuple[Check, ...]
    not_judged: tuple[UncheckedKey, ...]
    not_re_derived: tuple[UncheckedKey, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok or check.is_open for check in self.checks)


def check_file(path: str, *, proof_budget_s: float = PROOF_BUDGET_S) -> Verdict:
    """The verdict on the plan file at `path`, as `check_document`."""
    return check_document(read_document(path), proof_budget_s=proof_budget_s)


def check_document(
    document: Mapping[str, Any],
    *,
    proof_budget_s: float = PROOF_BUDGET_S,
    progress: Progress | None = None,
) -> Verdict:
    """The verdict on the document of a plan file of version 2. Where all other checks hold, the last check is
    the proof of optimality; it is left open if it takes longer than `proof_budget_s` seconds. `progress` is
    called with a line of text about how far the proof is.

    Raises InputError where nothing can be checked: it is no plan, is of another version, was altered, or
    names a dtype that the cluster lacks.
    """
    stated, version = checked_hash(document)
    if version < VERSION:
        raise InputError(
            "is a plan file of version 1, which must be converted first", key="version", found=str(version),
            allowed=f"{VERSION}; `shardwise check PLAN` converts and checks it",
        )  # fmt: skip
    plan = record(PlanRecord, document)
    checks = [value_check("hash", stated, hash_of(document))]
    if plan.model is not None:
        checks += count_checks(plan.model)
    checks += options_checks(plan)
    checks += band_checks(plan)
    with np.errstate(all="ignore"):  # figures without measure become infinite, which agrees with nothing
        budget_s = proof_budget_s if all(check.ok for check in checks) else None
        checks += _checks_of_kind(plan, budget_s, progress)
    return Verdict(
        plan_hash=stated,
        checks=tuple(checks),
        not_judged=tuple(_not_judged(plan)),
        not_re_derived=tuple(_not_re_derived(plan, document)),
    )


def _checks_of_kind(
    plan: PlanRecord, proof_budget_s: float | None, progress: Progress | None
) -> Iterator[Check]:
    """The checks for the kind of plan; no proof without a budget."""
    is_approximated = plan.cluster.is_approximated
    if plan.certificate is not None:
        is_approximated |= bool(plan.certificate.priced_as)
    if plan.kind == "uniform" and plan.model is not None:
        figures = figures_of(plan.model.layers, plan.cluster, plan.job)
        checks = list(uniform_checks(plan, figures))
        yield from checks
        if plan.certificate is not None:
            if proof_budget_s is None or not all(check.ok for check in checks):
                return
            if not is_known(plan.target):
                yield _open("a plan for the target", "a proof; the limits of the target are not here")
                return
            proof = optimal_check(plan, figures, proof_budget_s, progress)
            yield open_if_approximated(proof, is_approximated=is_approximated)
            for other in plan.certificate.other_options:
                proof = nothing_faster_check(plan, other, proof_budget_s, progress)
                yield open_if_approximated(proof, is_approximated=is_approximated)
            return
    else:
        yield from unlike_checks(plan)
    if plan.certificate is None:
        yield Check(name="optimality", ok=True, found="not claimed", expected="no claim without certificate")
    else:
        found = f"no plan takes less than {plan.certificate.lower_bound_s!r} s"
        if plan.for_trace is not None:
            found = "chosen for a trace; no claim about the plan alone"
        yield _open(found, "a proof; none exists for uneven plans")


def _open(found: str, expected: str) -> Check:
    return Check(name="optimal", ok=False, is_open=True, found=found, expected=expected)


# Keys that no check covers


def _not_judged(plan: PlanRecord) -> Iterator[UncheckedKey]:
    network = ("graph",) if plan.model is None else (
        "model.name", "model.family", "model.config", "model.layers",
    )  # fmt: skip
    target = ("target",) if plan.target == ANY else ()
    yield from unchecked("the question itself", *target, "question", *network, "job", "cluster")
    yield from unchecked("the file may have only the devices that are used", "idle")
    if plan.certificate is not None:
        counts = [f"certificate.rejected.{code}" for code in (MEMORY, HOST_MEMORY)]
        sums = ("certificate.enumerated", "certificate.unexplored") if plan.kind != "uniform" else ()
        counts += ["certificate.cut_by_bound", "certificate.simulated", *sums]
        yield from unchecked("only the sum of these counts is checked", *counts)
        effort = ("certificate.search_s", "certificate.search_cpu_s")
        if plan.certificate.other_options:
            more = tuple(
                key.replace("certificate", "certificate.other_options") for key in (*counts, *effort)
            )
            yield from unchecked("as those of the certificate itself", *more)
        yield from unchecked("search effort", *effort)


REASON_COSTS = "times and bytes of unlike stages: only their sums are checked"
REASON_OPERATORS = "the sharding rules of operators are not applied"
REASON_UNKNOWN = "this checker does not know the key"

COSTS_OF_STAGES = (
    "best.layout.schedule", "best.layout.pipelines.makespan_s", "best.layout.pipelines.stages.recompute",
    "best.breakdown", "best.band_s", "best.mfu", "best.mfu_full_attention", "best.memory",
    "best.peak_memory_bytes", "best.evaluator",
)  # fmt: skip
"""Claims about uneven plans and operator graphs, of which only the sums are checked."""


def _not_re_derived(plan: PlanRecord, document: Mapping[str, Any]) -> Iterator[UncheckedKey]:
    if plan.kind != "uniform":
        yield from unchecked(REASON_COSTS, *COSTS_OF_STAGES)
    pools = {"best.pools": plan.best.pools, "best.is_alike": plan.best.is_alike}
    formed = (key for key, value in pools.items() if value is not None)
    yield from unchecked("device pools are not formed", *formed)
    if plan.kind == "graph":
        yield from unchecked(REASON_OPERATORS, "best.layout.pipelines.stages.operators")
        if plan.epsilon is not None:
            yield from unchecked("no other search bounds graph layouts", "epsilon")
    if plan.kind == "uneven" and plan.certificate is not None:
        yield from unchecked("no other search bounds uneven plans", "certificate.lower_bound_s")
    if plan.mixed is not None:
        yield from unchecked("plans on other pools are not searched again", "mixed")
    if plan.targets is not None:
        yield from unchecked("plans for other targets are not searched again", "targets")
    if plan.question.objective in ("devices", "cost"):
        yield from unchecked("other parts of the cluster are not searched", "question.objective")
    if plan.target != ANY and not (plan.kind == "uniform" and is_known(plan.target)):
        rejected = () if plan.certificate is None or is_known(plan.target) else ("certificate.rejected",)
        yield from unchecked("no limits of this target are checked", "target", *rejected)
    if plan.certificate is not None and plan.certificate.priced_as:
        yield from unchecked("text about links and events", "certificate.priced_as")
    if plan.for_trace is not None:
        yield from unchecked("the trace of events is not replayed", "for_trace")
    above = (*(f"{one.key}." for one in _not_judged(plan)), "mixed.")
    unknown = [key for key in keys_left(PlanRecord, document) if not f"{key}.".startswith(above)]
    yield from unchecked(REASON_UNKNOWN, *dict.fromkeys(unknown))


# The hash


def checked_hash(document: Mapping[str, Any]) -> tuple[str, int]:
    """The hash that a plan file of any version states, and its version. Raises InputError where it is no plan
    file, is newer than this checker, or was changed since it was written."""
    schema, version = document.get("schema"), document.get("version")
    if schema not in SCHEMAS_OF_VERSION_1:
        raise InputError("is not a plan file", key="schema", found=short(schema), allowed=SCHEMA)
    newest = VERSION if schema == SCHEMA else 1
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= newest:
        raise InputError(
            "is not a known version", key="version", found=short(version), allowed=f"1 to {newest}"
        )
    stated = document.get("hash")
    try:
        actual = hash_of(document)
    except ValueError as error:
        raise InputError("cannot be computed", key="hash", found=str(error)) from None
    if stated != actual:
        raise InputError("does not match the content: the file was changed", key="hash", found=short(stated))
    return actual, version


def hash_of(document: Mapping[str, Any]) -> str:
    """The hash of the content: JSON with sorted keys, without search effort and provenance
    (docs/reference/formats.md)."""
    body = {key: value for key, value in document.items() if key != "hash"}
    certificate = body.get("certificate")
    if isinstance(certificate, Mapping):
        body["certificate"] = _without(certificate, UNHASHED)
    for key in ("cluster", "job"):
        body[key] = _without(body.get(key), PROVENANCE)
    if "question" in body:
        body["question"] = _without(body["question"], PROVENANCE)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def _without(value: object, keys: tuple[str, ...]) -> object:
    if isinstance(value, Mapping):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    return [_without(item, keys) for item in value] if isinstance(value, list) else value
