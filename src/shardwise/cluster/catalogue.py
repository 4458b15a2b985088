"""The catalogue of known devices; every figure has its source."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.cluster.device import NATIVE, Backend, Device, efficiency_from_numbers
from shardwise.cluster.device_file import device_of
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, nearest, short_repr, unknown
from shardwise.numbers import Number, most_specific, numbers_of


@cache
def _data(name: str) -> dict[str, Any]:
    """A data file of the package, read without the checks that users' files need."""
    text = Path(__file__).with_name("data").joinpath(name).read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


@cache
def _device(name: str) -> Device:
    """The device `name` of the catalogue, with the efficiency of its architecture and its sources."""
    data = _data("devices.json")
    record = dict(data["devices"][name])
    documents: Mapping[str, str] = data["documents"]
    named = {figure: documents.get(source, source) for figure, source in record.pop("sources").items()}
    units, of_units = record.pop("units"), named.pop("units")
    backend = record.pop("backend", NATIVE.name)
    efficiency = efficiency_from_numbers(
        (record["architecture"], name), efficiency_numbers(), units=units, units_source=of_units
    )
    device = device_of(Fields({**record, "sources": named}, key=name), name=name, efficiency=efficiency)
    instead = _data("backends.json")[backend]["instead"]
    return replace(device, backend=Backend(name=backend, instead=instead))


@cache
def efficiency_numbers() -> tuple[Number, ...]:
    """All numbers that the efficiencies of the devices are made of."""
    return numbers_of(_data("efficiency.json")["numbers"])


def with_efficiency(device: Device, numbers: Iterable[Number]) -> Device:
    """A device of the catalogue with the efficiency from `numbers` instead of its own."""
    curve, provenance = device.efficiency.matmul, device.efficiency.provenance
    efficiency = efficiency_from_numbers(
        _names(device), numbers, units=curve.units, units_source=provenance["matmul.units"]
    )
    return replace(device, efficiency=efficiency)


def numbers_of_device(device: Device, numbers: Iterable[Number]) -> tuple[Number, ...]:
    """The numbers that apply to a device of the catalogue: the most specific one of each field."""
    return tuple(most_specific(numbers, _names(device)).values())


def _names(device: Device) -> tuple[str, str]:
    """Names by which numbers refer to a device: its architecture, then its own name."""
    return _data("devices.json")["devices"][device.name]["architecture"], device.name


def architecture_of(device: Device) -> str | None:
    """The architecture of a device, such as `hopper`; None of a device that is not in the catalogue."""
    record = _data("devices.json")["devices"].get(device.name)
    return None if record is None else record["architecture"]


def device_names() -> tuple[str, ...]:
    """Names of all known devices, in the order of the catalogue."""
    return tuple(_data("devices.json")["devices"])


class _Catalogue(Mapping[str, Device]):
    """All known devices by name; each is built at its first use."""

    def __getitem__(self, name: str) -> Device:
        if name not in _data("devices.json")["devices"]:
            raise KeyError(name)
        return _device(name)

    def __iter__(self) -> Iterator[str]:
        return iter(device_names())

    def __len__(self) -> int:
        return len(device_names())


def devices() -> Mapping[str, Device]:
    """All known devices by name; each is built at its first use."""
    return _Catalogue()


def find_device(text: str, measured: Mapping[str, Device] | None = None) -> Device:
    """The device that `text` names, by its name or an alias; case does not matter.

    A device of `measured` (by name) replaces the device of the catalogue. Raises ConfigError for an unknown
    name, with the nearest known one, and for a text that fits several devices (`A100`), with the candidates.
    """
    folded = _folded(text)
    known_name = _spellings().get(folded)
    if known_name is not None:
        return (measured or {}).get(known_name) or _device(known_name)
    names = device_names()
    candidates = [name for name in names if len(folded) >= 2 and _folded(name).startswith(folded)]
    if len(candidates) > 1:
        raise ConfigError("is ambiguous", found=short_repr(text), allowed=" or ".join(candidates))
    guess = candidates[0] if candidates else _device_like(text)
    raise unknown("is not a known device", text, names, guess=guess)


def devices_like(text: str) -> tuple[str, ...]:
    """Names of the known devices with a name or alias that begins with `text`: `h100` fits several."""
    folded = _folded(text)
    found = (name for spelling, name in _spellings().items() if folded and spelling.startswith(folded))
    return tuple(dict.fromkeys(found))


def _device_like(text: str) -> str | None:
    """The known device whose name or alias is nearest to `text`."""
    names = {
        spelling: name
        for name, record in _data("devices.json")["devices"].items()
        for spelling in (*record.get("aliases", ()), name)
    }
    found = nearest(text, names)
    return names[found] if found else None


@cache
def _spellings() -> Mapping[str, str]:
    """The name of the known device for every folded name and alias."""
    spellings: dict[str, str] = {}
    for name, record in _data("devices.json")["devices"].items():
        for spelling in (name, *record.get("aliases", ())):
            spellings.setdefault(_folded(spelling), name)
    return spellings


_VENDORS = re.compile(r"^(?:nvidia|amd|intel|instinct|tesla|geforce|quadro)+(?=.)")


def _folded(text: str) -> str:
    """`text` in lower case without spaces, dashes, underscores and the vendor before the name."""
    return _VENDORS.sub("", re.sub(r"[\s_-]+", "", text).casefold(), count=1)
