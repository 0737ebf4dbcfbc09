from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from diffusiongemma.errors import DeviceError
from diffusiongemma.ops import cpu

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(cpu.ISA_VARIABLE, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpu.ensure_cpu_bf16.cache_clear()
    yield
    cpu.ensure_cpu_bf16.cache_clear()


def illegal_instruction() -> None:
    os.kill(os.getpid(), signal.SIGILL)


@pytest.mark.parametrize(
    ("work", "alive", "timeout"),
    [
        (lambda: None, True, 120.0),
        (illegal_instruction, False, 120.0),
        (lambda: 1 / 0, False, 120.0),
        (lambda: time.sleep(120), False, 0.5),
    ],
)
def test_a_child_tells_whether_work_is_survived(
    work: Callable[[], object], alive: bool, timeout: float, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert cpu.survives(work, timeout) is alive
    assert time.monotonic() - began < 100  # neither the limit of those that end nor the sleep of the last is waited for
    assert capfd.readouterr() == ("", "")


def broken_amx(initialised: bool) -> Callable[[], None]:
    """A CPU whose AMX dies unless the variable holds it back in time."""

    def work() -> None:
        if initialised or os.environ.get(cpu.ISA_VARIABLE) != cpu.ISA_WITHOUT_AMX:
            illegal_instruction()

    return work


def test_a_broken_cpu_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_bf16_work", broken_amx(initialised=False))
    cpu.ensure_cpu_bf16()
    assert os.environ[cpu.ISA_VARIABLE] == cpu.ISA_WITHOUT_AMX


def test_too_late_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_bf16_work", broken_amx(initialised=True))
    with pytest.raises(DeviceError, match="Start again with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
        cpu.ensure_cpu_bf16()
    assert cpu.ISA_VARIABLE not in os.environ


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_bf16_work", broken_amx(initialised=False))
    monkeypatch.setenv(cpu.ISA_VARIABLE, "ALL")
    with pytest.raises(DeviceError, match="ONEDNN_MAX_CPU_ISA=ALL"):
        cpu.ensure_cpu_bf16()
    assert os.environ[cpu.ISA_VARIABLE] == "ALL"


def test_a_good_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []
    monkeypatch.setattr(cpu, "survives", lambda work: tries.append(work) or True)
    cpu.ensure_cpu_bf16()
    cpu.ensure_cpu_bf16()
    assert tries == [cpu._bf16_work]
    assert cpu.ISA_VARIABLE not in os.environ


def test_the_trial_itself_is_sound() -> None:
    """What the child computes must be able to succeed: an exception in it would look like a broken CPU."""
    if cpu.survives(cpu._bf16_work):
        cpu._bf16_work()
    else:
        pytest.skip("bfloat16 does not work in this process")


@pytest.fixture
def _vnni(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: True)
    cpu.fast_int8.cache_clear()
    yield
    cpu.fast_int8.cache_clear()


@pytest.mark.usefixtures("_vnni")
@pytest.mark.parametrize("initialised", [False, True])
def test_int8_on_a_broken_cpu_is_held_back_or_done_without(monkeypatch: pytest.MonkeyPatch, initialised: bool) -> None:
    monkeypatch.setattr(cpu, "_int8_work", broken_amx(initialised))
    assert cpu.fast_int8() is not initialised
    assert os.environ.get(cpu.ISA_VARIABLE) == (None if initialised else cpu.ISA_WITHOUT_AMX)


@pytest.mark.usefixtures("_vnni")
def test_int8_obeys_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_int8_work", broken_amx(initialised=False))
    monkeypatch.setenv(cpu.ISA_VARIABLE, "ALL")
    assert not cpu.fast_int8()
    assert os.environ[cpu.ISA_VARIABLE] == "ALL"


@pytest.mark.usefixtures("_vnni")
def test_int8_is_not_tried_where_there_are_no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: False)
    monkeypatch.setattr(cpu, "survives", lambda work: pytest.fail("tried"))
    assert not cpu.fast_int8()


def test_int8_is_done_without_where_onednn_may_not_use_the_instructions() -> None:
    """Held back to AVX2, it takes others for the same product, whose sums overflow 16 bits. Elsewhere it is right."""
    code = "from diffusiongemma.ops import cpu, int8_cpu; import torch\n"
    code += "a = torch.full((4, 64), 127, dtype=torch.int8)\n"
    code += "print(int8_cpu.sums(a, a).unique().tolist() == [64 * 127**2])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, cpu.ISA_VARIABLE: "AVX2", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "True"
