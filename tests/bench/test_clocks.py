"""Clocks and power beside a figure, from a stand-in for `nvidia-smi`; where there is none, nothing is told."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffusiongemma.bench import clocks as module
from diffusiongemma.bench.clocks import Clocks, Sample, clock_rows, watching
from diffusiongemma.bench.step import measure_step
from diffusiongemma.bench.subject import Subject, Target

CUDA = torch.device("cuda")
NAMED = "for a in $@; do case $a in --query-gpu=*%s*) exit 2;; esac; done\n"
ANSWERS = """
case $* in *GPU-4711*) ;; *) exit 6;; esac
line() {
    case $* in
    *_reasons*) echo "$SM, 3201, 690.5, 700.00, 61, 0x0000000000000004";;
    *) echo "$SM, 3201, [N/A], 700.00, 61";;
    esac
}
SM=1980; line $*
case $* in *loop-ms*) SM=1620; while :; do line $*; sleep 0.01; done;; esac
"""


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a script can be put that is `nvidia-smi`"""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="4711"))
    return tmp_path / "nvidia-smi"


def answer(file: Path, script: str) -> None:
    file.write_text(f"#!/bin/sh\n{script}")
    file.chmod(0o755)


def seen(least: int = 3) -> Clocks:
    """What is seen in a run that lasts until so many samples should be there, however busy the machine is"""
    for seconds in (0.3, 2.0, 20.0):
        with watching(CUDA) as clocks:
            assert not clocks.samples
            time.sleep(seconds)
        if len(clocks.samples) >= least:
            break
    return clocks


def test_clocks_and_power_of_a_run(card: Path) -> None:
    answer(card, ANSWERS)
    told = seen().to_dict()["clocks"]
    assert told["samples"] >= 3
    assert told["sm"]["max"] == 1980
    assert told["sm"]["min"] == 1620
    assert 1620 < told["sm"]["mean"] < 1980
    assert told["watts"] == {"mean": 690.5, "min": 690.5, "max": 690.5}
    assert told["held_back"] == {"the power limit": 1.0}


@pytest.mark.parametrize("unknown", ["clocks_event", "_reasons"])
def test_drivers_call_the_reasons_differently_or_do_not_know_them(card: Path, unknown: str) -> None:
    answer(card, NAMED % unknown + ANSWERS)
    told = seen().to_dict()["clocks"]
    assert told["sm"]["max"] == 1980
    assert ("the power limit" in told["held_back"]) == (unknown == "clocks_event")
    assert ("watts" in told) == (unknown == "clocks_event"), "what a card does not tell is left out"


@pytest.mark.parametrize(
    "script", [None, "exit 9", "echo 'No devices were found'", "echo '[N/A], [N/A], [N/A], [N/A], [N/A], [N/A]'"]
)
def test_nothing_is_told_where_nobody_answers(card: Path, script: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if script is None:
        monkeypatch.setenv("PATH", str(card.parent))
    else:
        answer(card, script)
    with watching(CUDA) as clocks:
        pass
    assert clocks.to_dict() == {}
    assert clock_rows(clocks.to_dict()) == []


def test_who_does_not_end_is_ended(card: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "ENDS", 5.0)
    pid = tmp_path / "pid"
    answer(card, f"trap '' TERM\n[ -e {pid}.asked ] && echo $$ > {pid}\ntouch {pid}.asked\n{ANSWERS}")
    with watching(CUDA):
        while not (pid.exists() and pid.read_text().strip()):
            time.sleep(0.01)
        monkeypatch.setattr(module, "ENDS", 0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_failure_inside_is_not_hidden(card: Path) -> None:
    answer(card, ANSWERS)
    with pytest.raises(RuntimeError, match="inside"), watching(CUDA):
        raise RuntimeError("inside")


def test_a_row_for_people() -> None:
    samples = [Sample(1620.0, 3201.0, 700.0, 700.0, 60.0, 4), Sample(1980.0, 3201.0, 500.0, 700.0, 62.0, 1)]
    (row,) = clock_rows(Clocks(samples).to_dict(), "  clock")
    text = "SM 1,800 MHz (1,620 to 1,980), memory 3,201 MHz, 600 W of 700, 62 °C"
    assert row == ("  clock", f"{text}, held back by the power limit in 50% of 2 samples")


def test_a_measured_step_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module.Clocks,
        "to_dict",
        lambda _: {"clocks": {"samples": 1, "sm": dict.fromkeys(("mean", "min", "max"), 1500), "held_back": {}}},
    )
    outcome = measure_step(Subject.make(Target("tiny")), prefixes=(24,), steps=4, repeat=1, breakdown=False)
    assert ("  clock", "SM 1,500 MHz (1,500 to 1,500)") in outcome.rows
    assert outcome.result["cases"][0]["clocks"]["sm"]["mean"] == 1500
