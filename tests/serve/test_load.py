"""A few seconds of what scripts/load_test.py does for five minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from serve.live import random_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "load_test.py"


@pytest.mark.slow
def test_many_clients_get_their_own_texts() -> None:
    options = ["--seconds", "6", "--clients", "20", "--compare", "16", "--cases", "8", "--queue", "8"]
    command = [sys.executable, str(SCRIPT), "--model", random_model(), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["faults"] == found["lost"] == 0
    assert found["throughput_ratio"] > 0
    outcomes = found["outcomes"]
    for name in ("right, plain", "right, drafts", "vanished", "refused"):
        assert outcomes[name] > 0, outcomes
