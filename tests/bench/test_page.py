"""docs/benchmarks.md is what its script makes of docs/benchmarks.json, and the script understands what a run leaves."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from diffusiongemma.bench.ar import measure_ar
from diffusiongemma.bench.batch import measure_batch
from diffusiongemma.bench.e2e import measure_e2e
from diffusiongemma.bench.floor import PARTS
from diffusiongemma.bench.hardware import KNOWN
from diffusiongemma.bench.memory import measure_memory
from diffusiongemma.bench.prefill import measure_prefill
from diffusiongemma.bench.step import measure_step
from diffusiongemma.bench.subject import Subject, Target
from diffusiongemma.bench.timing import rounded
from scripted import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks_page")


def test_page_is_up_to_date(script: ModuleType) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    data = json.loads((ROOT / "docs" / "benchmarks.json").read_text(encoding="utf-8"))
    assert script.render(page, data) == page, "run scripts/benchmarks_page.py"
    assert {found["name"] for found in script.MARK.finditer(page)} == set(script.TABLES)
    assert (ROOT / "docs" / "roofline.png").stat().st_size > 10_000
    assert script.PARTS == PARTS
    machine = data["machine"]
    speeds = (machine["read_tb_s"] * 1e12, machine["tflop_s"] * 1e12, machine["tflop_s_8bit"] * 1e12)
    assert speeds == pytest.approx(KNOWN[machine["card"]])


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """Real results, as if of the 26B on a card."""
    subject = Subject.make(Target("tiny", quant="fp8"))
    outcomes = [
        measure_step(subject, prefixes=(16,), steps=4, repeat=1),
        measure_step(subject, prefixes=(16, 64), steps=4, repeat=1, breakdown=False),
        measure_e2e(subject, 16, 32, 1, repeat=1),
        measure_ar(subject, (1, 2), 16, 4, repeat=1),
        measure_batch(subject, (1, 8), 16, 32, 1, repeat=1),
        measure_prefill(subject, (16,), 1),
        measure_memory(subject, prefix=32),
    ]
    return [rounded(o.result) | {"card": "NVIDIA H200", "preset": "26b-a4b"} for o in outcomes]


def test_results_find_their_tables(script: ModuleType, lines: list[dict[str, Any]], tmp_path: Path) -> None:
    for name in ("benchmarks.json", "benchmarks.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path)
    store = tmp_path / "benchmarks.json"
    empty = json.loads(store.read_text(encoding="utf-8")) | {"results": []}
    store.write_text(json.dumps(empty), encoding="utf-8")
    peer = {"bench": "vs-transformers", "preset": "26b-a4b", "weights": "bfloat16", "card": "NVIDIA H200", "ms": 12.5,
            "floor_ms": 11.7, "speedup": 7.76, "transformers": "5.17.0", "transformers_ms": 97.0}  # fmt: skip
    first = lines[0] | {"ms": 6.54321, "ratio": 1.1}
    text = "\n".join(
        ["a table for people", json.dumps(lines[0] | {"card": None}), *map(json.dumps, [*lines, first, peer])]
    )
    (tmp_path / "results.jsonl").write_text(text + "\n{broken\n", encoding="utf-8")
    old_argv, sys.argv = sys.argv, ["page", "--docs", str(tmp_path), "--add", str(tmp_path / "results.jsonl")]
    try:
        script.main()
    finally:
        sys.argv = old_argv
    data = json.loads(store.read_text(encoding="utf-8"))
    assert len(data["results"]) == len(lines) + 1  # the second of the same step replaced the first
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    tables = {found["name"]: found["body"] for found in script.MARK.finditer(page)}
    assert "| a step, fp8 | ≤ 7 ms | 6.54 ms (fp8) | yes |" in tables["goals"]
    assert "| 8 users, fp8 | ≥ 4,000 tok/s |" in tables["goals"]
    assert "not measured" not in tables["goals"].splitlines()[8]
    assert "| fp8 |" in tables["step"]
    assert tables["parts"].count("\n") == 2 + len(PARTS) + 1
    assert "AR overtakes at" in tables["ar"]
    assert "| fp8, 8 users |" in tables["batch"]
    assert "5.17.0 97.0 ms, 7.8 times as long" in tables["others"]
    assert "step over 64 tokens, fp8" in tables["others"]
    assert (tmp_path / "roofline.png").stat().st_size > 10_000
    kinds = {kind for kind, *_ in script.points(data)}
    assert kinds == {"a step", "AR, users", "its experts and dense MLP"}


def test_kernels_are_those_of_the_steps(script: ModuleType, lines: list[dict[str, Any]]) -> None:
    """Summed by name and part, the longest first, what is short left out; the vendor's go by one name."""
    kernels = [
        {"kernel": "product_kernel", "part": "experts", "calls": 30.0, "us": 90.0},
        {"kernel": "nvjet_sm90_a", "part": "attention", "calls": 25.0, "us": 300.0},
        {"kernel": "nvjet_sm90_b", "part": "attention", "calls": 5.0, "us": 91.4},
        {"kernel": "product_kernel", "part": "attention", "calls": 25.0, "us": 238.0},
        {"kernel": "_rope_kernel", "part": "attention", "calls": 2.0, "us": 4.6},
    ]
    step = lines[0] | {"cases": [lines[0]["cases"][0] | {"kernels": kernels, "parts": {"experts": 2.0}}]}
    data: dict[str, Any] = {"results": [step]}
    assert script.kernels_table(data).splitlines()[2:] == [
        "| the vendor's product | attention | 391 (30) |",
        "| `product_kernel` | attention | 238 (25) |",
        "| `product_kernel` | experts | 90 (30) |",
    ]
    (_, _, density, speed) = next(point for point in script.points(data) if point[0] == "its experts and dense MLP")
    floors = [step["cases"][0]["floor"]["parts"][part] for part in ("experts", "dense MLP")]
    tflop, gigabytes = (sum(floor[name] for floor in floors) for name in ("tflop", "gb"))
    assert density == pytest.approx(1e3 * tflop / gigabytes)
    assert speed == pytest.approx(1e3 * tflop / 2.0)
