import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from diffusiongemma.ops.linear import MKL_VARIABLE, STRICT, ask_for_steady_rows, linear, rows_are_steady


@pytest.fixture(params=[1, 2, 8])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("width", "out"), [(64, 96), (224, 512), (512, 1408)])
def test_a_row_keeps_its_bits_whatever_its_neighbours(width: int, out: int, threads) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(700, width, generator=generator), torch.randn(out, width, generator=generator)
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(32)])
    assert torch.allclose(alone, F.linear(x[:32].double(), weight.double()).float(), atol=1e-3)
    for start, rows in [(0, 2), (3, 5), (0, 8), (7, 9), (1, 10), (0, 11), (0, 31), (5, 64), (0, 257), (0, 700)]:
        together = linear(x[start : start + rows], weight)
        seen = min(32 - start, rows)
        assert torch.equal(together[:seen], alone[start : start + seen])


def test_no_rows() -> None:
    assert linear(torch.empty(0, 4), torch.ones(3, 4)).shape == (0, 3)


@pytest.mark.parametrize(
    ("maker", "before", "after"),
    [("GenuineIntel", None, STRICT), ("GenuineIntel", "COMPATIBLE", "COMPATIBLE"), ("AuthenticAMD", None, None)],
)
def test_mkl_is_asked_on_intel_unless_the_user_was_first(
    monkeypatch: pytest.MonkeyPatch, maker: str, before: str | None, after: str | None
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"vendor_id : {maker}\n")
    monkeypatch.setenv(MKL_VARIABLE, before or "")  # so that it is put back
    if before is None:
        monkeypatch.delenv(MKL_VARIABLE)
    ask_for_steady_rows()
    assert os.environ.get(MKL_VARIABLE) == after


def test_who_multiplied_before_is_warned_where_it_matters() -> None:
    """In a process of its own, as MKL reads the variable once; where rows are steady anyway, nobody is."""
    code = (
        "import torch\n"
        "torch.ones(64, 64) @ torch.ones(64, 64)\n"
        "from diffusiongemma.ops import linear\n"
        "print(linear.rows_are_steady(), linear.rows_are_steady())\n"
    )
    quiet = {name: value for name, value in os.environ.items() if name != MKL_VARIABLE}
    ran = subprocess.run([sys.executable, "-c", code], env=quiet, capture_output=True, text=True, check=True)
    steady = ran.stdout.split()
    assert len(set(steady)) == 1
    assert ran.stderr.count(f"{MKL_VARIABLE}={STRICT}") == (steady[0] == "False")
    assert rows_are_steady()  # here, where the package came first
