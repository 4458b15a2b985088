"""The independent checker: counts and judges by code of its own, from records alone."""

from shardwise.check.count import SpaceCount, count_space
from shardwise.check.finding import Check
from shardwise.check.verdict import Verdict, check_file

__all__ = ["Check", "SpaceCount", "Verdict", "check_file", "count_space"]
