"""The records of an imported configuration, `ImportedRun` and `ReviewFinding`, and typed access to values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.inputs import misspelt, short_repr
from shardwise.model import Model
from shardwise.strategy import even_ends, largest_stage, layer_counts

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewFinding:
    """What is wrong or risky in a configuration: `field` is the flag or key of the user's file."""

    code: str
    severity: Severity
    field: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Supplied:
    """What the user gives in addition to the file: a model, tokens per sequence, sequences per step, and
    fields of the strategy that the file lacks. `micro_batches` of a step, None: not given. `folder`: where
    other files that the file names are looked for first."""

    model: Model | None = None
    seq_len: int | None = None
    global_batch_size: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int | None = None
    folder: str = ""

    def batch(self, dp: int) -> int:
        """Sequences of a step on `dp` replicas, where the file has no batch. ConfigError where it is neither
        given nor follows."""
        micro = self.fields.get("micro_batch_size")
        whole = None if self.micro_batches is None or micro is None else self.micro_batches * int(micro) * dp
        return chosen("global_batch_size", whole, self.global_batch_size, "--global-batch-size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """What a configuration file says, in the terms of a plan.

    `fields` are those of a strategy as `complete` takes them. `profile` has the fields of the software
    profile that the file changes, `options` the options of the software with their values. `names` has the
    flag or key of the file for fields of the strategy and the job, `renamed` the word of the file for a flag
    or key of the target.
    """

    target: str
    model: Model
    fields: Mapping[str, Any]
    seq_len: int
    global_batch_size: int
    dtype: str | None
    optimizer: str
    profile: Mapping[str, Any]
    names: Mapping[str, str]
    findings: tuple[ReviewFinding, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    renamed: Callable[[str], str] = str


def required(key: str, value: int | None, option: str) -> int:
    """`value`, or a ConfigError that names the option which supplies it."""
    if value is None:
        raise ConfigError("is missing in the file", key=key, allowed=option)
    return value


def chosen(key: str, of_file: int | None, supplied: int | None, option: str) -> int:
    """The value of the file, else the supplied one. ConfigError where both differ, or none is given."""
    if of_file is not None and supplied is not None and of_file != supplied:
        raise ConfigError(
            f"is {of_file} in the file", key=option, found=str(supplied), allowed=f"{of_file}, or no {option}"
        )
    return required(key, supplied if of_file is None else of_file, f"{option} N")


def require_devices(key: str, found: int | None, devices: int) -> None:
    """ConfigError where the file is for another number of devices than the cluster has."""
    if found is not None and found != devices:
        raise ConfigError(
            f"is another number of devices than the cluster's {devices}", key=key, found=str(found),
            allowed=f"--cluster with {found} devices",
        )  # fmt: skip


def model_of_file(model: Model | None, what: str) -> Model:
    """The supplied model. ConfigError where there is none."""
    if model is None:
        raise ConfigError(f"{what} has no model", key="--model", allowed="--model M")
    return model


class _RequestedKeys(dict[str, Any]):
    """A mapping that notes in `requested` which keys are looked up."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.requested: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.requested.add(key)
        return super().get(key, default)


class FileSection:
    """The values of a mapping in the file, with their full keys in errors. `name` is its own key."""

    def __init__(
        self, values: object, name: str = "", sections: dict[str, _RequestedKeys] | None = None
    ) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError("is no mapping", key=name, found=short_repr(values), allowed="a mapping")
        self._sections: dict[str, _RequestedKeys] = {} if sections is None else sections
        self.values: Mapping[str, Any] = self._sections.setdefault(name, _RequestedKeys(values))
        self.name = name

    def key(self, name: str) -> str:
        """The full key of a value."""
        return f"{self.name}.{name}" if self.name else name

    def section(self, name: str) -> FileSection:
        """The mapping under this name; an empty one where it is missing or null."""
        found = self.values.get(name)
        return FileSection({} if found is None else found, self.key(name), self._sections)

    def misspelt(self) -> Iterator[ReviewFinding]:
        """Findings for keys of this mapping and of those below it that differ by one letter from a key that
        was looked up, which the file does not have."""
        for section, values in self._sections.items():
            for name in values:
                meant = None if name in values.requested else misspelt(name, values.requested - {*values})
                if meant is not None:
                    key = f"{section}.{name}" if section else name
                    yield ignored(key, f"is not a known key (did you mean {meant}?)")

    def integer(self, name: str, default: int | None = None, *, low: int = 1) -> int | None:
        """The whole number under this name, at least `low`; `default` where it is missing, null or
        `auto`."""
        found = self.values.get(name)
        if found is None or found == "auto":
            return default
        if isinstance(found, str) and found.lstrip("-").isdigit():
            found = int(found)
        if isinstance(found, str) and "$" in found:
            raise ConfigError(
                "is a variable that the file does not set", key=self.key(name), found=short_repr(found),
                allowed="its value",
            )  # fmt: skip
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= 10_000_000:
            raise ConfigError(
                "is not a whole number in range",
                key=self.key(name), found=short_repr(found), allowed=f"{low} to 10000000",
            )  # fmt: skip
        return found

    def count(self, name: str, default: int = 1, *, low: int = 1) -> int:
        """The same with a default."""
        found = self.integer(name, default, low=low)
        return default if found is None else found

    def is_on(self, name: str, default: bool = False) -> bool:
        """The true or false value under this name; texts such as `true` too."""
        found = self.values.get(name)
        if found is None or found == "auto":
            return default
        if isinstance(found, str) and found.lower() in ("true", "false"):
            return found.lower() == "true"
        if not isinstance(found, bool):
            raise ConfigError("is not true or false", key=self.key(name), found=short_repr(found))
        return found

    def text(self, name: str, default: str = "") -> str:
        """The text under this name; `default` where it is missing or null."""
        found = self.values.get(name)
        return default if found is None else str(found)


def ends_of(counts: tuple[int, ...], layers: int, field: str) -> tuple[dict[str, int], list[ReviewFinding]]:
    """The fields of a split of the layers over stages, and what is wrong with it: layers that are lost, or
    stages that a strategy cannot say, whose prediction is an approximation."""
    if sum(counts) != layers:
        lost = layers - sum(counts)
        what = f"lack {lost} of the {layers} layers" if lost > 0 else f"have {-lost} layers too many"
        return {}, [
            ReviewFinding(
                code="layers_lost", severity="error", field=field,
                text=f"the stages {what}; the prediction is of an even split",
            )
        ]  # fmt: skip
    ends = {"first_stage_layers": counts[0], "last_stage_layers": counts[-1]}
    if layer_counts(layers, len(counts), counts[0], counts[-1]) == counts:
        return ends, []
    return ends, [
        ReviewFinding(
            code="approximated", severity="info", field=field,
            text="the prediction has these first and last stages, and splits the other layers evenly",
        )
    ]  # fmt: skip


def largest_of(layers: int, stages: int, fields: Mapping[str, Any]) -> int:
    """Layers of the largest stage."""
    first, last = even_ends(layers, stages)
    ends = fields.get("first_stage_layers", int(first)), fields.get("last_stage_layers", int(last))
    return int(largest_stage(layers, stages, *ends))


def assumed(field: str, text: str) -> ReviewFinding:
    """A value that the file does not have."""
    return ReviewFinding(code="assumed", severity="info", field=field, text=text)


def ignored(field: str, text: str) -> ReviewFinding:
    """A value that the software ignores."""
    return ReviewFinding(code="ignored_key", severity="warning", field=field, text=text)
