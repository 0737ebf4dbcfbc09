"""Made-up examples are the same in every run: whatever else is loaded, and whatever numbers stand there."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def found() -> list[int]:
    examples = list[int]()

    @settings(max_examples=300)
    @given(st.integers(0, 10**12))
    def some(n: int) -> None:
        examples.append(n)

    some()
    return examples


def test_numbers_of_our_modules_are_no_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = found()
    file = tmp_path / "of_ours.py"
    file.write_text("\n".join(f"NUMBER_{n} = {710_000_000_019 + 1_000_003 * n}" for n in range(200)))
    module = ModuleType("of_ours")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "of_ours", module)
    assert found() == before
