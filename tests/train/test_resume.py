"""A run that is killed in the middle and resumed is, to the last bit, the run that was not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from diffusiongemma.config import ModelConfig
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.train import checkpoint
from diffusiongemma.train.export import load_raw, save_raw

ROOT = Path(__file__).parents[2]
STEPS = 12
KILLED = 7  # a checkpoint lies at 5, the next at 10
CLOCK = {"seconds", "tokens_per_second", "mfu"}


# The run kills itself: from outside, a run of a fraction of a second is easily killed too late.
SUICIDE = f"""
import os, signal
from diffusiongemma.train import __main__, report
whole = report.Report.record
def record(self, record):
    whole(self, record)
    if record["step"] == {KILLED}:
        os.kill(os.getpid(), signal.SIGKILL)
report.Report.record = record
__main__.main()
"""


def start(out: Path, *program: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, *(program or ("-m", "diffusiongemma.train")), "recipes/tiny-cpu.toml"]
    command += ["--out", str(out), "--device", "cpu", "--total-steps", str(STEPS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def curve(out: Path) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]


def test_killed_and_resumed_is_the_same_run(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    straight, first = start(whole), start(broken, "-c", SUICIDE)
    assert first.wait(timeout=600) == -signal.SIGKILL
    assert len(curve(broken)) == KILLED
    assert not (broken / "model").exists()
    assert start(broken).wait(timeout=600) == 0
    assert straight.wait(timeout=600) == 0

    assert [record["step"] for record in curve(broken)] == list(range(1, STEPS + 1))
    assert curve(broken) == curve(whole)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (broken, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_is_whole_or_absent(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, {"a": torch.ones(2)}, {"note": "x"})
    part = tmp_path / ".writing-00000004"  # what a kill in the middle of writing leaves
    part.mkdir()
    (part / "tensors.safetensors").write_bytes(b"half")
    saved = checkpoint.load_latest(tmp_path)
    assert saved is not None
    assert saved.step == 3
    assert saved.state["note"] == "x"
    for step in (4, 5, 6):
        checkpoint.save(tmp_path, step, {"a": torch.full((2,), float(step))}, {}, keep=2)
    assert sorted(checkpoint.complete(tmp_path)) == [5, 6]
    assert not part.exists()


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path / "nothing") is None


def test_raw_shards_come_back(tmp_path: Path) -> None:
    model = DiffusionGemma(ModelConfig.preset("tiny")).init_weights(3)
    save_raw(model, tmp_path, shard_bytes=100_000)
    assert len(list(tmp_path.glob("raw-*.safetensors"))) > 2
    back = load_raw(tmp_path)
    assert back.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.bfloat16().float())
