"""Set before anything imports torch or the hub: tests use one thread a process and never the network."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton, which parts of torch import too
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("COLUMNS", "100")  # what rich prints must not depend on the terminal of the day

from hypothesis import settings

# A busy machine is no failure; a failing example is printed so that it can be replayed.
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")
