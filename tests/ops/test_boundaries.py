"""`scripts/bench_boundaries.py`: what it measures compiles for Hopper and waits where it says; and it notices numbers
that were read too early. It runs on a card alone."""

import pytest
import torch

from ops.hopper import Machine
from scripted import load_script

script = load_script("bench_boundaries")


@pytest.mark.parametrize("eager", [False, True])
def test_links_wait_for_the_one_before(eager: bool) -> None:
    machine = Machine.of(script.link_of(eager, 0).code())
    assert machine.local == 0
    waits = [n for n, line in enumerate(machine.code) if line.startswith("ACQBULK")]
    lets = [n for n, line in enumerate(machine.code) if line.startswith("PREEXIT")]
    reads = [n for n, line in enumerate(machine.code) if line.startswith("LDG")]
    assert len(waits) == len(lets) == len(reads) == 1
    assert waits[0] < reads[0]
    assert (lets[0] < waits[0]) == eager


def test_the_chain_counts_programs() -> None:
    machine = Machine.of(script.chain_of().code())
    assert machine.local == 0
    assert machine.count("ATOM", "ATOMG") == 1
    assert machine.count("BAR") >= 2


def test_numbers_that_were_read_too_early() -> None:
    numbers = torch.stack((torch.full((8,), 4), torch.full((8,), 5)))
    script.check(numbers, 4)
    script.check(numbers, 5)
    numbers[1, 3] = 4
    with pytest.raises(SystemExit, match="4 to 5, not 5"):
        script.check(numbers, 5)
