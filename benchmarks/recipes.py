"""Published recipes against our predictions and plans: `python -m benchmarks.recipes`.

The recipes are those of megatron-bridge 0.6.2, whose facts are stored in `recipes_facts.json`. For each
recipe of pre-training whose model and devices we can express: is it legal, does it fit, how fast is it, and
which plan is ours for the same model, devices, batch and precision on Megatron-LM 0.19? Prints the tables
of docs/benchmarks-recipes.md.

    python -m benchmarks.recipes [--only TEXT] [--each] [--wheel PATH | --download]

`--only` keeps recipes whose name contains a text; `--each` prints a line for each recipe. `--wheel` reads
the recipes from a wheel instead, and `--download` fetches it with pip first; both store the facts.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.recipes_facts import Recipe, read_facts, read_wheel, write_facts
from benchmarks.recipes_judgement import LARGE_GAIN, Judgement, judged

from shardwise.strategy import Strategy

PACKAGE = "megatron-bridge==0.6.2"
KINDS = ("performance", "canonical")
GIB = 2.0**30


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--download", action="store_true")
    given = parser.parse_args(arguments)
    if given.download:
        with tempfile.TemporaryDirectory() as folder:
            write_facts(*read_wheel(_downloaded(Path(folder))))
    elif given.wheel is not None:
        write_facts(*read_wheel(given.wheel))
    recipes, unread = read_facts()
    training = [one for one in recipes if one.task == "pretrain" and given.only in one.name]
    judgements = [judged(one) for one in training]
    if given.each:
        print("\n".join(line_of(one) for one in judgements))
        return 0
    tasks = Counter(one.task for one in recipes)
    print(f"{len(recipes) + len(unread)} recipes: {', '.join(f'{n} {task}' for task, n in tasks.items())}; "
          f"{len(unread)} unread\n")  # fmt: skip
    print("\n\n".join(tables(judgements)))
    return 0


def _downloaded(folder: Path) -> Path:
    pip = (
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--ignore-requires-python",
        "--dest",
        str(folder),
    )
    subprocess.run((*pip, PACKAGE), check=True, stdout=sys.stderr)
    return next(folder.glob("*.whl"))


def tables(judgements: Sequence[Judgement]) -> Iterator[str]:
    """The tables of the page, as Markdown."""
    for kind in KINDS:
        yield family_table([one for one in judgements if one.recipe.kind == kind])
    yield counted("not judged", (one.skipped for one in judgements if one.skipped))
    yield counted("illegal", (one.illegal for one in judgements if one.illegal))
    yield counted("left out of the prediction", (name for one in judgements for name in one.unsaid))
    yield misfits(one for one in judgements if one.is_judged and not one.fits)
    yield gains(one for one in judgements if (one.gain or 0.0) > LARGE_GAIN)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def family_table(judgements: Sequence[Judgement]) -> str:
    """One row for each family with a judged recipe, and one for all."""
    families = sorted({one.recipe.family for one in judgements if not one.skipped})
    groups = [(name, [one for one in judgements if one.recipe.family == name]) for name in families]
    heads = ("family", "recipes", "judged", "legal", "fit", "with margin", "gain: median", "largest",
             "same tp", "same pp", "same ep", "predicted / published")  # fmt: skip
    return table(heads, [_family_row(name, group) for name, group in (*groups, ("all", judgements))])


def _family_row(name: str, group: Sequence[Judgement]) -> tuple[object, ...]:
    judged_ones = [one for one in group if not one.skipped]
    compared = [one for one in group if one.gain is not None]
    shares = [one.gain or 0.0 for one in compared]
    ratios = [one.step_s / one.published_s for one in group if one.published_s]
    return (
        name,
        len(group),
        len(judged_ones),
        sum(one.is_judged for one in group),
        sum(one.fits for one in group),
        sum(one.fits_with_margin for one in group),
        f"{statistics.median(shares):.1%}" if shares else "",
        f"{max(shares):.1%}" if shares else "",
        *(_share(compared, lambda one, axis=axis: one.agrees(axis)) for axis in ("tp", "pp")),  # type: ignore[misc]
        _share([one for one in compared if one.recipe.ep > 1], lambda one: one.agrees("ep")),
        f"{statistics.median(ratios):.2f} ({len(ratios)})" if ratios else "",
    )


def _share(group: Sequence[Judgement], holds: Callable[[Judgement], bool]) -> str:
    return f"{sum(map(holds, group))} of {len(group)}" if group else ""


def counted(head: str, reasons: Iterable[str]) -> str:
    return table((head, "recipes"), Counter(reasons).most_common())


def misfits(judgements: Iterable[Judgement]) -> str:
    """Recipes that do not fit: needed and present GiB, those of the states alone, and where they fit."""
    heads = ("does not fit", "needs GiB", "has GiB", "states alone", "activations", "fits on devices")
    return table(heads, [
        (one.recipe.name, *(f"{count / GIB:.0f}" for count in (
            one.needed_bytes, one.device_bytes, one.states_bytes, one.memory.get("activations", 0.0)
        )), one.fits_on or "none")
        for one in judgements
    ])  # fmt: skip


def gains(judgements: Iterable[Judgement]) -> str:
    """Large gains by the part of the step that shrinks most."""
    groups: dict[tuple[str, str], list[Judgement]] = {}
    for one in judgements:
        part = max(one.saved, key=lambda name: one.saved[name])
        groups.setdefault((one.recipe.kind, part), []).append(one)
    heads = ("recipes", "number", "part that shrinks most", "it saves (median)", "our plan saves (median)")
    return table(heads, [
        (kind, len(group), part.replace("_", " "),
         f"{statistics.median(one.saved[part] / one.step_s for one in group):.0%}",
         f"{statistics.median(one.gain or 0.0 for one in group):.0%}")
        for (kind, part), group in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1])))
    ])  # fmt: skip


def _degrees(of: Recipe | Strategy) -> str:
    return f"tp {of.tp} pp {of.pp} vpp {of.vpp} cp {of.cp} ep {of.ep} mbs {of.micro_batch_size}"


def line_of(judgement: Judgement) -> str:
    """One line with everything about a recipe."""
    recipe, ours = judgement.recipe, judgement.ours
    theirs = _degrees(recipe)
    if not judgement.is_judged:
        return f"{recipe.name}: {judgement.skipped or judgement.illegal} ({theirs})"
    parts = [
        f"{recipe.name}: {theirs}",
        f"{judgement.needed_bytes / GIB:.0f} of {judgement.device_bytes / GIB:.0f} GiB",
        f"{judgement.step_s:.2f} s",
    ]
    if judgement.published_s:
        parts.append(f"published {judgement.published_s:.2f} s")
    if ours is not None:
        parts.append(f"ours {judgement.ours_s:.2f} s: {_degrees(ours)} {ours.recompute} {ours.offload}")
    if judgement.unsaid:
        parts.append(f"without {', '.join(judgement.unsaid)}")
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
