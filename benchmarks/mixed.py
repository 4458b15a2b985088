"""Planning on mixed clusters: uneven plans against uniform ones, the proven gap, and CPU seconds."""

from __future__ import annotations

import time
from pathlib import Path

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.model import load_model

EXAMPLES = Path(__file__).parents[1] / "examples"

MIXED: dict[str, tuple[str, str, int, int]] = {
    # model, cluster, tokens per sequence, sequences per step
    "opt350m_128": ("opt-350m", "8x4xA100-40G+24x4xV100-16G", 2048, 1024),
    "opt350m_320": ("opt-350m", "20x4xA100-40G+60x4xV100-16G", 2048, 1024),
    "opt350m_512": ("opt-350m", "32x4xA100-40G+96x4xV100-16G", 2048, 1024),
    "llama70b_64": ("llama-2-70b", "4x8xA100-80G+4x8xRTX4090", 4096, 256),
    "llama31_70b_32": (str(EXAMPLES / "llama-3.1-70b"), "2x8xA100-80G+2x8xV100-32G", 4096, 128),
}


def figures(name: str) -> dict[str, float]:
    """The best plan of one mixed cluster: its step time, the best uniform one's, the gap, and CPU seconds of
    the whole answer."""
    model_name, on, seq_len, batch = MIXED[name]
    model, cluster = load_model(model_name), load_cluster(on)
    job = search.default_job(model, cluster, seq_len=seq_len, global_batch_size=batch)
    started = time.process_time()
    answer = search.plan_pools(search.Question(model=model, cluster=cluster, job=job))
    taken = time.process_time() - started
    uniform_s = answer.mixed.uniform_step_time_s if answer.mixed is not None else None
    return {
        "step_time_s": answer.best.step_time_s,
        **({} if uniform_s is None else {"uniform_step_time_s": uniform_s}),
        "gap": answer.certificate.gap,
        "answer_cpu_s": taken,
    }
