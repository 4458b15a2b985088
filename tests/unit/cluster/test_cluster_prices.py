"""Prices: the snapshot of list prices, a price of one's own, and the lines that say where it is from."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

import shardwise as sw
from shardwise.cluster import at_price, devices, load_cluster, price_lines
from shardwise.cluster.prices import price_offers
from shardwise.errors import ConfigError

QUESTION = {
    "cluster": "1x8xA100-80G", "seq_len": 1024, "global_batch_size": 8,
    "strategy": "zero_stage=1,micro_batch_size=1",
}  # fmt: skip


def test_every_offer_has_its_date_and_place() -> None:
    for offer in price_offers():
        assert offer.device in devices()
        assert re.fullmatch(r"20\d\d-\d\d", offer.date) and offer.url.startswith("https://")
        assert offer.commitment in ("on-demand", "1-year", "3-years")
    keys = [(offer.provider, offer.commitment, offer.device) for offer in price_offers()]
    assert len(set(keys)) == len(keys)


def test_default_prices_are_the_offers_on_demand_and_longer_commitments_cost_less() -> None:
    on_demand = {
        offer.device: offer.usd_per_hour for offer in price_offers() if offer.commitment == "on-demand"
    }
    for name, price in on_demand.items():
        assert devices()[name].price_usd_per_hour == price
    for name in ("V100-16G", "V100-32G", "A100-40G", "A100-80G"):
        falling = [offer.usd_per_hour for offer in price_offers() if offer.device == name]
        assert len(falling) == 3 and all(more > less for more, less in pairwise(falling))


def test_a_cluster_at_a_price_of_its_own() -> None:
    cluster = at_price(load_cluster("2x8xH100-SXM"), 2.9)
    assert cluster.price_usd_per_hour == pytest.approx(16 * 2.9)
    assert price_lines(cluster) == ["price of H100-SXM: $2.9 an hour (given)"]
    mixed = at_price(load_cluster("1x8xH100-SXM+1x4xA30"), 2.0)
    assert mixed.price_usd_per_hour == pytest.approx(24.0)


def test_an_offer_by_provider_and_commitment() -> None:
    """A p4d.24xlarge, with eight devices, is 11.57 dollars an hour for three years."""
    cluster = at_price(load_cluster("1x8xA100-40G"), "aws:3-years")
    assert cluster.price_usd_per_hour == pytest.approx(11.57, rel=1e-4)
    assert price_lines(cluster)[0].startswith(
        "price of A100-40G: $1.45 an hour (list price, 3-years, aws, 2025-01, https://aws.amazon.com/"
    )
    with pytest.raises(ConfigError, match=r"no offer of H100-SXM; found 'aws:3-years'.*2.9, aws:on-demand"):
        at_price(load_cluster("1x8xH100-SXM"), "aws:3-years")
    with pytest.raises(ConfigError, match="is not a price"):
        at_price(load_cluster("1x8xH100-SXM"), -1.0)


def test_lines_say_what_a_price_is_of() -> None:
    (line,) = price_lines(load_cluster("1x8xH100-SXM"))
    assert line.startswith("price of H100-SXM: $12.3 an hour (list price, on demand, AWS EC2")
    assert price_lines(load_cluster("1x8xA800-80G")) == []


def test_cost_follows_the_price_and_the_plan_keeps_its_source() -> None:
    """The list price of 5.12 dollars, and 2.56: half the cost of a step."""
    whole, half = (sw.evaluate("gpt2-xl", **QUESTION, price=price) for price in (None, 2.56))  # type: ignore[arg-type]
    assert whole.best.step_time_s == half.best.step_time_s
    assert half.cluster.price_usd_per_hour == pytest.approx(0.5 * (whole.cluster.price_usd_per_hour or 0.0))
    assert half.cluster.classes["A100-80G"].sources["price_usd_per_hour"] == "given"
    for wrong in (-1, True, [2.9]):
        with pytest.raises(ConfigError, match="price"):
            sw.evaluate("gpt2-xl", **QUESTION, price=wrong)  # type: ignore[arg-type]
