"""What the card's clock and power were while something was timed: the same card is slower at its power limit.

`nvidia-smi` is asked beside the run, ten times a second, in a process of its own. Where there is none, or it does not
answer, nothing is told; a figure never fails for it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch

from diffusiongemma.bench.timing import Rows

EVERY = 100  # milliseconds
ASKED = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # by newer drivers, and by older ones
HELD_BACK = {
    0x04: "the power limit",
    0x08: "a slowdown of the hardware",
    0x20: "heat",
    0x40: "heat, by the hardware",
    0x80: "the power supply",
}
ENDS = 5.0  # seconds that it has to end


@dataclass(frozen=True)
class Sample:
    """One answer; None is what the card does not tell."""

    sm: float | None  # MHz
    memory: float | None
    watts: float | None
    limit: float | None
    celsius: float | None
    reasons: int = 0

    @classmethod
    def read(cls, line: str) -> Sample | None:
        """A line as `nvidia-smi` writes it; None: that is none"""
        parts = [part.strip() for part in line.split(",")]
        if len(parts) not in (len(ASKED), len(ASKED) + 1):
            return None
        numbers = [_number(part) for part in parts[: len(ASKED)]]
        if all(number is None for number in numbers):
            return None
        sm, memory, watts, limit, celsius = numbers
        reasons = re.fullmatch(r"0x[0-9a-fA-F]+", parts[-1])
        return cls(sm, memory, watts, limit, celsius, int(parts[-1], 16) if reasons else 0)


@dataclass
class Clocks:
    """All samples of a run; empty until it has ended, and where nobody answered."""

    samples: list[Sample] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """What a result gets: `clocks`, or nothing, if nothing is known"""
        if not self.samples:
            return {}
        told: dict[str, Any] = {"samples": len(self.samples)}
        for name in ("sm", "memory", "watts", "limit", "celsius"):
            if seen := [value for sample in self.samples if (value := getattr(sample, name)) is not None]:
                told[name] = {"mean": mean(seen), "min": min(seen), "max": max(seen)}
        shares = {why: mean(bool(sample.reasons & bit) for sample in self.samples) for bit, why in HELD_BACK.items()}
        return {"clocks": told | {"held_back": {why: share for why, share in shares.items() if share}}}


def clock_rows(result: dict[str, Any], name: str = "clock") -> Rows:
    """What a result knows of clocks, for people: a row or none"""
    told = result.get("clocks")
    if not told:
        return []
    parts = []
    if "sm" in told:
        sm = told["sm"]
        parts.append(f"SM {sm['mean']:,.0f} MHz ({sm['min']:,.0f} to {sm['max']:,.0f})")
    if "memory" in told:
        parts.append(f"memory {told['memory']['mean']:,.0f} MHz")
    if "watts" in told:
        limit = f" of {told['limit']['max']:.0f}" if "limit" in told else ""
        parts.append(f"{told['watts']['mean']:.0f} W{limit}")
    if "celsius" in told:
        parts.append(f"{told['celsius']['max']:.0f} °C")
    parts += [
        f"held back by {why} in {share:.0%} of {told['samples']} samples" for why, share in told["held_back"].items()
    ]
    return [(name, ", ".join(parts))]


@contextmanager
def watching(device: torch.device) -> Iterator[Clocks]:
    """Inside, the card is looked at; what was seen is there afterwards."""
    clocks = Clocks()
    command = _command(device)
    if command is None:
        yield clocks
        return
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([*command, f"--loop-ms={EVERY}"], stdout=out, stderr=subprocess.DEVNULL)
        try:
            yield clocks
        finally:
            _end(process)
            out.seek(0)
            clocks.samples += [sample for line in out if (sample := Sample.read(line)) is not None]


def _command(device: torch.device) -> list[str] | None:
    """What asks for this card, with the reasons under the name that its driver knows; None: nobody can be asked"""
    if device.type != "cuda":
        return None
    # By its own name: CUDA and `nvidia-smi` may number cards differently.
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    which = [f"--id=GPU-{uuid.removeprefix('GPU-')}"] if uuid else []
    for reasons in (*REASONS, None):
        query = ",".join(filter(None, (*ASKED, reasons)))
        command = ["nvidia-smi", *which, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ENDS)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0 and any(map(Sample.read, done.stdout.splitlines())):
            return command
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(ENDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _number(text: str) -> float | None:
    """None: the card does not tell, "[N/A]" or "[Not Supported]" """
    try:
        return float(text)
    except ValueError:
        return None
