"""Records on disk and as curves."""

import json
from pathlib import Path

import pytest

from diffusiongemma.train.report import Report, plot, read_metrics

METRICS = {"decoder": 1.0, "encoder": 2.0, "accuracy": 0.5, "balance": 1.0}


def record(step: int) -> dict[str, object]:
    return {
        "step": step, "progress": step / 10, "tokens": 1000 * step, "rate": 1.0, "grad_norm": 0.5, "load_max": 1.2,
        "load_entropy": 0.99, "tasks": {"a": METRICS, "b": METRICS}, "tokens_per_second": 5.0, "mfu": 0.3,
    }  # fmt: skip


def test_a_resumed_run_takes_back_what_it_will_do_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Report(tmp_path, 0)
    for step in range(1, 6):
        first.record(record(step))
    with first.path.open("a") as file:
        file.write('{"step": 6, "prog')  # killed while writing
    assert "MFU 30.0%" in capsys.readouterr().out
    Report(tmp_path, 3)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [record(step) for step in range(1, 6)]
    records.append({"step": 5, "tokens": 5000, "progress": 0.5, "evaluation": {"solved": 0.5}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    path = plot(tmp_path)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
