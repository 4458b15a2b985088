"""Step times in logs of training software, each with the lines that the software writes."""

from __future__ import annotations

import pytest

from shardwise.targets import has_steps, logged_step_s

JOB = {"devices": 8, "seq_len": 4096, "global_batch_size": 64}


@pytest.mark.parametrize(
    ("line", "values", "seconds"),
    [
        # Megatron-LM 0.19, training/training.py.
        (" iteration  7/ 100 | elapsed time per iteration (ms): {} | loss", ("9000.0", "1500.5"), 1.5005),
        # DeepSpeed 0.19, runtime/pipe/engine.py.
        ("steps: 1 loss: 10.1 iter time (s): {} samples/sec: 21.333", ("9.0", "3.000"), 3.0),
        # DeepSpeed 0.19, utils/timer.py: 64 sequences at 32 a second.
        ("epoch=0/micro_step=4/global_step=1, RunningAvgSamplesPerSec=9.9, CurrSamplesPerSec={}, "
         "MemAllocated=1GB", ("5.0", "32.0"), 2.0),
        # TorchTitan 0.3, components/metrics.py: 64 x 4,096 tokens on 8 devices at 16,384 a second each.
        ("step:  1  loss:  7.0  \x1b[34mtps: {}  \x1b[36mtflops: 300.00  mfu: 30%", ("500", "16,384"), 2.0),
    ],
)  # fmt: skip
def test_steps_after_warm_up(line: str, values: tuple[str, str], seconds: float) -> None:
    """Of eight steps the first two are warm-up, as slow as they may be."""
    slow, usual = (line.format(value) for value in values)
    text = "\n".join([slow, slow, *[usual] * 6])
    assert has_steps(text)
    assert logged_step_s(text, **JOB) == pytest.approx(seconds)


def test_a_text_without_steps() -> None:
    text = "--num-layers 24\n iteration 3 | lm loss: 4.5\n"
    assert not has_steps(text) and logged_step_s(text, **JOB) is None
