"""A child process in which software of a target reads exported files.

The child keeps imports, output and failures of that software away from the planner. It is started as
`python -m MODULE`. Each line of its input is a request as JSON, each line of its output an answer
(`child_loop`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError, InternalError

FIRST_REPLY_S, EACH_REPLY_S = 600, 30
"""Timeout of the child process, seconds: for its imports, and per request. The values are generous,
because imports take half a minute on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The child process of one software: its module, the name of the software in errors, and how to install
    it."""

    module: str
    software: str
    install: str

    def answers(
        self, requests: Sequence[Mapping[str, Any]], *, environment: Mapping[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """The answer to each request, from one child process with this `environment` (None: that of this
        process).

        Raises ConfigError where the software cannot be imported or exceeds the timeout, InternalError where
        answers are missing.
        """
        if not requests:
            return []
        lines = [json.dumps(request) for request in requests]
        done = self._run("\n".join(lines) + "\n", environment, FIRST_REPLY_S + EACH_REPLY_S * len(lines))
        replies: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
        missing = next((reply["error"] for reply in replies if reply.get("is_missing")), None)
        if missing is not None:
            raise ConfigError(
                f"{self.software} cannot be imported ({missing})", key="--validate", allowed=self.install
            )
        if done.returncode or len(replies) != len(lines):
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise InternalError(
                f"the reader of {self.software} answered {len(replies)} of {len(lines)} requests: {last}"
            )
        return replies

    def _run(
        self, text: str, environment: Mapping[str, str] | None, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        own = dict(os.environ if environment is None else environment)
        try:
            return subprocess.run(
                [sys.executable, "-m", self.module], input=text, capture_output=True, encoding="utf-8",
                errors="replace", timeout=timeout_s, env=own,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{self.software} did not read the files within {timeout_s:g} s", key="--validate"
            ) from None
