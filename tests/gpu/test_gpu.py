"""Promise: what holds on the CPU holds on GPUs over NCCL. It needs a GPU and less than eight minutes.

Run it alone: `python -m pytest tests/gpu`. One GPU is enough, because ranks can share it. What is measured
and what it has to show is in parts.py; `python tests/gpu/report.py --out benchmarks/results` writes it down.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import report
from parts import PARTS

from zerolab.launcher.gpus import visible_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not visible_gpus(), reason="needs a CUDA device and NCCL")]
TARGETS = {"host", "kernels", "speed"}
"""Parts that measure how far the engine is from a target, which depends on the machine."""


@pytest.fixture(scope="module")
def measured() -> dict[str, dict]:
    return dict(report.run_all(list(PARTS)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PARTS)
def test_a_part(name: str, measured: dict[str, dict]):
    found = measured[name]
    assert "error" not in found, found["error"]
    if name not in TARGETS:
        assert not found["missed"]
