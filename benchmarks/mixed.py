"""Planning on mixed clusters: uneven plans compared with uniform ones, with the fastest class alone and with
the proportional split; the proven gap, and CPU seconds."""

from __future__ import annotations

import math
import time
from pathlib import Path

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.search.hetero import proportional_split

EXAMPLES = Path(__file__).parents[1] / "examples"

MIXED: dict[str, tuple[str, str, int, int]] = {
    # model, cluster, tokens per sequence, sequences per step
    "opt350m_128": ("opt-350m", "8x4xA100-40G+24x4xV100-16G", 2048, 1024),
    "opt350m_320": ("opt-350m", "20x4xA100-40G+60x4xV100-16G", 2048, 1024),
    "opt350m_512": ("opt-350m", "32x4xA100-40G+96x4xV100-16G", 2048, 1024),
    "llama70b_64": ("llama-2-70b", "4x8xA100-80G+4x8xRTX4090", 4096, 256),
    "opt350m_three_classes_256": ("opt-350m", "22x4xA100-40G+21x4xV100-16G+21x4xT4", 2048, 1024),
    "gpt2xl_64": ("gpt2-xl", "4x8xA100-80G+4x8xV100-32G", 1024, 512),
    "two_classes": ("llama-2-13b", "two-classes", 4096, 256),
    "three_classes": ("llama-2-13b", "three-classes", 4096, 256),
    "two_sites_10g": ("llama-2-13b", "two-sites-10g", 4096, 256),
    "two_sites_1g": ("llama-2-13b", "two-sites-1g", 4096, 256),
    "two_sites_1g_llama70b": ("llama-2-70b", "two-sites-1g", 4096, 256),
    "fast_slow_racks": ("llama-2-70b", "fast-slow-racks", 4096, 1024),
    "spot_mix": ("llama-2-7b", "spot-mix", 2048, 256),
    "slow_node": ("llama-2-13b", "slow-node", 4096, 1024),
    "llama31_70b_32": (str(EXAMPLES / "llama-3.1-70b"), "2x8xA100-80G+2x8xV100-32G", 4096, 128),
}


def figures(name: str) -> dict[str, float]:
    """Figures of the best plan of one mixed cluster.

    Step times are those of the plan, of the best uniform strategy, of the fastest class alone and of the
    proportional split. Gains are speedups over the uniform strategy and over the split. CPU seconds are those
    of the answer without the split."""
    model_name, on, seq_len, batch = MIXED[name]
    model, cluster = load_model(model_name), load_cluster(on)
    job = search.default_job(model, cluster, seq_len=seq_len, global_batch_size=batch)
    started = time.process_time()
    answer = search.plan_mixed_cluster(search.Question(model=model, cluster=cluster, job=job))
    taken = time.process_time() - started
    split = proportional_split(search.UnevenSpace(model, cluster, job))
    compared = {
        "uniform_step_time_s": None if answer.mixed is None else answer.mixed.uniform_step_time_s,
        "fastest_class_step_time_s": None if answer.mixed is None else answer.mixed.fastest_class_step_time_s,
        "proportional_step_time_s": None if split is None else split.time_s,
    }
    best_s = answer.best.step_time_s
    return {
        "step_time_s": best_s,
        **{name: time_s for name, time_s in compared.items() if time_s is not None},
        # Where no reference fits, the gain is infinite.
        "gain_over_uniform": (compared["uniform_step_time_s"] or math.inf) / best_s,
        "gain_over_proportional": (compared["proportional_step_time_s"] or math.inf) / best_s,
        "gap": max(answer.certificate.gap, answer.mixed.uneven_gap if answer.mixed is not None else 0.0),
        "answer_cpu_s": taken,
    }
