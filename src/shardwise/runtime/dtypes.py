"""In what jobs compute: parameters are fp32 whatever it is."""

from __future__ import annotations

import torch

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the dtype of a job."""
