"""What keeps the start short: nothing heavy is imported or built before the server is ready."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest

from diffusiongemma.serve import startup
from diffusiongemma.serve.server import Server, bind
from diffusiongemma.serve.settings import Settings
from serve.live import EMBEDDED, HANGS, random_model, wait_until

# Each takes from a tenth of a second to seconds; torch itself imports none of them.
SLOW = ("torch._dynamo", "torch._inductor", "triton", "sympy", "transformers", "huggingface_hub", "datasets",
        "scipy", "pandas", "matplotlib", "PIL", "httpx", "openai", "hypothesis", "schemathesis")  # fmt: skip

PROGRAM = """
import sys
from diffusiongemma.cli import serve  # the command's own module, as the command line loads it
from diffusiongemma.serve import startup
assert "torch" not in sys.modules and "fastapi" not in sys.modules
startup.quick().__enter__()
import fastapi.openapi.utils as utils
built = []
utils.get_openapi = lambda **given: built.append(given)
import torch
before = set(sys.modules)
from diffusiongemma.serve.server import Server
from diffusiongemma.serve.settings import Settings
server = Server(Settings(model=sys.argv[1]))
server.state.serve(server.state.load())
assert server.state.status == "ok" and not built, "the OpenAPI document is made when it is asked for"
print(*(name for name in sys.argv[2:] if name in sys.modules and name not in before))
server.state.close()
"""


def test_nothing_slow_is_imported_before_the_server_is_ready() -> None:
    command = [sys.executable, "-c", PROGRAM, EMBEDDED or random_model(), *SLOW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_threads_sleep_and_the_collector_rests_until_the_model_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(startup.WAIT_POLICY, "")  # so that it is put back in the end
    monkeypatch.delenv(startup.WAIT_POLICY)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # it cannot be undone here
    with startup.quick():
        assert os.environ[startup.WAIT_POLICY] == "passive"
        assert not gc.isenabled()
        startup.done()
        assert gc.isenabled()
    monkeypatch.setenv(startup.WAIT_POLICY, "active")  # what the user said
    with startup.quick():
        startup.done()
    assert os.environ[startup.WAIT_POLICY] == "active"


def test_a_start_that_fails_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(ValueError, match="taken"), startup.quick():
        raise ValueError("the port is taken")
    assert gc.isenabled()


STAND_IN = """
import gc, os, sys, types
from diffusiongemma.cli import app
server = sys.modules["diffusiongemma.serve.server"] = types.ModuleType("server")
server.run = lambda settings: print(gc.isenabled(), os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
app(["serve"])
"""


def test_the_command_begins_so_before_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(startup.WAIT_POLICY, raising=False)
    done = subprocess.run([sys.executable, "-c", STAND_IN], capture_output=True, text=True, timeout=HANGS)
    assert done.stdout.split() == ["False", "passive", "False"], done.stderr


@pytest.mark.parametrize("model", ["random:tiny", "no-such-model"])
def test_the_server_tells_once_that_loading_is_over(model: str) -> None:
    """… also when it failed: this is where the collector begins to work again."""
    told = []
    settings = Settings(model=model, port=0)
    server, listener = Server(settings, lambda: told.append(server.state.status)), bind(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: bool(told))
    server.stop()
    thread.join(HANGS)
    assert told == (["loading"] if server.state.load_error else ["ok"])
    assert (server.state.load_error is None) == (model != "no-such-model")
