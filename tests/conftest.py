"""Set before anything imports torch or the hub: tests use one thread a process, never the network, and find the same
surroundings on every machine."""

import os
import random
import secrets
import shutil
import sys

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton, which parts of torch import too
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines promise AMX and die in it (`ops/cpu.py`): tests must not depend on which one this is.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# What rich and typer print must not depend on the terminal of the day, nor on who runs the tests.
os.environ["COLUMNS"] = "100"
for name in "CLICOLOR CLICOLOR_FORCE FORCE_COLOR GITHUB_ACTIONS LINES NO_COLOR PY_COLORS TERMINAL_WIDTH".split():
    os.environ.pop(name, None)
# A machine may reach the world through a proxy; the servers of the tests are on this one.
for name in [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")]:
    del os.environ[name]

# A busy machine is no failure. Everybody gets the same examples, so that what is green here is green elsewhere; to look
# for new ones, run with --hypothesis-profile=explore. A failing example is printed so that it can be replayed.
patient = settings(deadline=None, print_blob=True, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("house", patient, derandomize=True)
settings.register_profile("explore", patient, derandomize=False)
settings.load_profile("house")
# Hypothesis also tries numbers that stand in this project's modules, in those that are loaded when a test begins: that
# depends on what ran before in the same process, and a constant anywhere would change the examples of every test.
providers._get_local_constants = providers.Constants


def pytest_runtest_setup() -> None:
    """Chance that a test does not seed itself must not depend on the day, nor on which tests ran before it."""
    random.seed(0)
    secrets.randbits = random.Random(0).getrandbits  # where the package takes a seed from, if it is given none
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
