"""Every measurement runs on a CPU in seconds, and its figures hang together. How fast it is here does not matter."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusiongemma.bench import e2e as e2e_module
from diffusiongemma.bench import memory as memory_module
from diffusiongemma.bench import prefill as prefill_module
from diffusiongemma.bench import step as step_module
from diffusiongemma.bench import subject as subject_module
from diffusiongemma.bench import suite as suite_module
from diffusiongemma.bench.ar import advantage, measure_ar, overtakes
from diffusiongemma.bench.batch import measure_batch
from diffusiongemma.bench.drive import random_tokens, same_prompt
from diffusiongemma.bench.e2e import measure_e2e
from diffusiongemma.bench.floor import PARTS
from diffusiongemma.bench.look import look
from diffusiongemma.bench.memory import measure_memory
from diffusiongemma.bench.prefill import measure_prefill
from diffusiongemma.bench.replay import FILL, filled_lane, replay_seconds
from diffusiongemma.bench.step import measure_step
from diffusiongemma.bench.subject import Subject, Target
from diffusiongemma.bench.suite import Plan, run_suite
from diffusiongemma.bench.timing import Outcome, rounded, show, slope
from diffusiongemma.engine import Engine, Limits
from diffusiongemma.engine import engine as engine_module
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.errors import ConfigError, DiffusionGemmaError, InputError
from diffusiongemma.model.backend import torch_ops
from diffusiongemma.model.quantize import formats_in


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.make(Target("tiny"))


def told(outcome: Outcome) -> dict[str, str]:
    return dict(outcome.rows)


def check_frame(outcome: Outcome, bench: str) -> dict[str, Any]:
    """What every one of them must say: config, card, torch; and that its result is JSON."""
    rows = told(outcome)
    assert {"config", "card", "torch"} <= rows.keys()
    text = " ".join([*rows, *rows.values()])
    assert all(word in text for word in ("floor", "figure", "ratio"))
    result: dict[str, Any] = json.loads(json.dumps(rounded(outcome.result)))
    assert result["bench"] == bench
    assert (result["preset"], result["weights"], result["random_weights"]) == ("tiny", "float32", True)
    assert result["torch"] == torch.__version__
    assert result["machine"]["origin"] == "measured now"
    return result


def test_step(subject: Subject) -> None:
    outcome = measure_step(subject, users=2, prefixes=(24, 80), steps=4, repeat=1)
    result = check_frame(outcome, "step")
    assert result["runner"] == "Runner"
    assert [case["prefix"] for case in result["cases"]] == [24, 80]
    assert result["ratio"] == pytest.approx(result["ms"] / result["floor_ms"], rel=1e-4)
    assert 0 < result["floor_ms"] < result["ms"]
    assert len(result["experts_hit"]["layers"]) == 6
    for case in result["cases"]:
        assert "trouble" not in case
        assert set(case["parts"]) == set(PARTS)
        assert all(ms > 0 for ms in case["parts"].values())
        assert set(case["floor"]["parts"]) == set(PARTS)
    assert "prefix 80 : 24" in told(outcome)
    assert "experts hit" in told(outcome)


def test_a_figure_survives_its_explanation(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> dict[str, float]:
        raise RuntimeError("CUPTI is busy")

    monkeypatch.setattr(step_module, "parts_of_plain", broken)
    outcome = measure_step(subject, prefixes=(16,), steps=4, repeat=1)
    assert outcome.result["ms"] > 0
    assert told(outcome)["  TROUBLE"] == "not taken apart: RuntimeError: CUPTI is busy"


def test_recorded_step_is_a_step() -> None:
    """The fast runner without a card: its twins stand for kernels, its functions for graphs."""
    subject = Subject.make(Target("tiny"))
    limits = Limits(max_rows=2, max_bytes=1 << 22)
    runner = FastRunner(subject.model, torch_ops(), limits)
    with Engine(subject.model, subject.tokenizer, limits=limits, runner=runner) as engine:
        lane = filled_lane(engine, 2, 20, 32)
        assert lane is runner.lane(32)
        replay, board = lane.recorded(lane.kind()), lane.board
        before = board.counts[0, :2].tolist()
        assert min(before) >= FILL
        assert replay_seconds(engine, replay, 3, 1) > 0
        assert board.counts[0, :2].tolist() == [n + 6 for n in before]
        # The engine goes on as if nothing had been.
        prompt = random_tokens(engine, 20)
        assert len(same_prompt(engine, prompt, 1, 32, steps=2).results[0].tokens) == 32
    with subject.engine(1, 64) as plain:
        assert filled_lane(plain, 1, 20, 32) is None


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Subject:
    """Its engines have the fast runner, without a card."""
    monkeypatch.setattr(
        engine_module, "choose_runner", lambda model, limits, kernels=None: FastRunner(model, torch_ops(), limits)
    )
    return Subject.make(Target("tiny"))


def test_experts_are_counted_in_the_pass_that_is_timed(fast: Subject) -> None:
    """All tokens go one way in the fused network alone, as NaN once sent them: the figure must say so."""
    least = fast.model.config.top_k_experts / fast.model.config.num_experts
    with fast.engine(2, 64) as engine:
        lane = filled_lane(engine, 2, 20, 32)
        assert lane is not None
        network, ops = lane.network, lane.network.ops
        seen = look(network, lambda: lane.step(lane.kind()))
        assert network.ops is ops
        assert seen.trouble is None
        assert min(seen.shares) > least

        def one_way(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            index, weight = ops.route(*args)
            return index[:1].expand_as(index), weight

        network.ops = replace(ops, route=one_way, placing=0)
        assert look(network, lambda: lane.step(lane.kind())).shares == [least] * 6
        network.ops = ops
        with torch.inference_mode():
            lane.board.soft[1, 3, 2] = torch.nan
        assert "hidden states, entropies" in str(look(network, lambda: lane.step(lane.kind())).trouble)


def test_figures_of_a_network_that_makes_no_numbers_are_marked(fast: Subject) -> None:
    fast.model.norm.weight.data.fill_(torch.nan)
    outcome = measure_step(fast, prefixes=(16,), steps=4, repeat=1, breakdown=False)
    assert "not to be believed: hidden states" in told(outcome)["  TROUBLE"]
    assert "hidden states" in outcome.result["cases"][0]["trouble"]
    drawn = measure_ar(fast, (2,), prefix=16, tokens=8, repeat=1)
    assert "hidden states" in drawn.result["cases"][0]["trouble"]


def test_steps_that_were_not_taken_are_no_figure(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "step_seconds", lambda *_: 1e-9)
    with pytest.raises(DiffusionGemmaError, match="do not take the steps"):
        measure_step(subject, prefixes=(16,), steps=4, repeat=1)
    monkeypatch.undo()
    monkeypatch.setitem(step_module.ASKED, "confidence", 100.0)
    monkeypatch.setitem(step_module.ASKED, "stability", 0)
    with pytest.raises(DiffusionGemmaError, match="done after 1 of"):
        measure_step(subject, prefixes=(16,), steps=8, repeat=1)


def test_e2e(subject: Subject) -> None:
    result = check_frame(measure_e2e(subject, prefix=24, tokens=64, steps=2, repeat=1), "e2e")
    assert result["tokens_per_second"] == pytest.approx(64 / result["seconds"], rel=1e-4)
    assert result["tokens_per_second_without_prefill"] >= result["tokens_per_second"]
    assert result["ms_a_pass"] == pytest.approx(1e3 * result["seconds"] / 4, rel=1e-4)  # two blocks of two steps
    assert result["cold_seconds"] > 0
    assert measure_e2e(subject, 24, 32, 1, repeat=1).result["cold_seconds"] == subject.cold_seconds  # only once is cold


@pytest.mark.parametrize(("reading", "left_out"), [(1e-4, 1e-4), (1e4, 0.0)])
def test_a_disturbed_reading_of_the_prompt_is_not_subtracted(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, reading: float, left_out: float
) -> None:
    monkeypatch.setattr(e2e_module, "reading_seconds", lambda *_: reading)
    result = measure_e2e(subject, prefix=24, tokens=32, steps=1, repeat=1).result
    assert result["tokens_per_second_without_prefill"] == pytest.approx(32 / (result["seconds"] - left_out))


def test_a_prompt_that_is_read_faster_than_can_be_is_doubted(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept prompt that is slow to copy leaves too little: the page once told a fifth of what the weights take."""
    for reading in (1e-9, 10.0):
        for module in (e2e_module, prefill_module):
            monkeypatch.setattr(module, "reading_seconds", lambda *_, reading=reading: reading)
        whole = measure_e2e(subject, prefix=24, tokens=32, steps=1, repeat=1)
        alone = measure_prefill(subject, (48,), repeat=1)
        for outcome, result in ((whole, whole.result), (alone, alone.result["cases"][0])):
            told = [text for name, text in outcome.rows if name.strip() == "TROUBLE"]
            assert told == ([result["trouble"]] if reading < 1 else [])
            assert ("trouble" in result) == (reading < 1)


def test_batch_goes_on_after_a_failure(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject.engine

    def engine(users: int, length: int, spare: int = 2) -> Any:
        if users == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return made(users, length, spare)

    monkeypatch.setattr(subject, "engine", engine)
    outcome = measure_batch(subject, (1, 2, 3), prefix=24, tokens=40, steps=1, repeat=1)
    result = check_frame(outcome, "batch")
    assert told(outcome)["users 2"] == "failed: CUDA out of memory."
    first, failed, last = result["cases"]
    assert failed["error"].startswith("CUDA out of memory")
    assert last["tokens_per_second"] == pytest.approx(3 * 40 / last["seconds"], rel=1e-4)
    assert result["users"] in (first["users"], last["users"])
    with pytest.raises(DiffusionGemmaError, match="no number of users"):
        measure_batch(subject, (2,), prefix=24, tokens=40, steps=1, repeat=1)


def test_ar(subject: Subject) -> None:
    result = check_frame(measure_ar(subject, (1, 2), prefix=24, tokens=8, repeat=1), "ar")
    assert set(result["diffusion_to_ar"]) == set(result["overtakes_at"]) == {"12", "16", "24", "48"}
    one, two = result["cases"]
    assert one["experts_hit"] == 0.25 < two["experts_hit"]
    assert result["diffusion_to_ar"]["16"]["1"] == pytest.approx(advantage(one, 16, 32), abs=2e-3)


def test_advantage_and_crossing_by_hand() -> None:
    case = {"ms": 2.0, "step_ms": 6.0, "commit_ms": 4.0}
    assert advantage(case, 16, 256) == pytest.approx(256 * 2.0 / 100.0)
    assert overtakes([(1, 4.0), (2, 3.0), (4, 2.0)]) is None
    assert overtakes([(1, 0.9)]) == 1.0
    # A straight line of logarithms from (2, 4) to (8, 1/4) passes 1 in the middle.
    assert overtakes([(1, 5.0), (2, 4.0), (8, 0.25)]) == pytest.approx(4.0)
    assert overtakes([(1, 5.0), (2, 1.0)]) == pytest.approx(2.0)


def test_prefill(subject: Subject) -> None:
    result = check_frame(measure_prefill(subject, (48, 700), repeat=1), "prefill")
    assert [case["prefix"] for case in result["cases"]] == [48, 700]
    assert all(case["tokens_per_second"] == pytest.approx(case["prefix"] / case["seconds"], rel=1e-4)
               for case in result["cases"])  # fmt: skip


def test_memory(subject: Subject) -> None:
    result = check_frame(measure_memory(subject, prefix=100), "memory")
    assert result["peak_gb"] == max(result["making_peak_gb"], result["writing_peak_gb"]) > result["floor_gb"]
    assert result["limit_gb"] == 18.0
    with pytest.raises(ConfigError, match="more than the model's 4096 positions"):
        measure_memory(subject, prefix=4096)


def test_memory_is_that_of_experts_that_lie_there_once(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card with memory to spare, and behind parts that used it: 29 GB were told of 17"""
    seen = list[object]()

    def engine(*args: Any, limits: Limits, **options: Any) -> Engine:
        seen.append(limits.packed)
        return Engine(*args, limits=limits, **options)

    monkeypatch.setattr(memory_module, "drop_packed", lambda model: seen.append("dropped"))
    monkeypatch.setattr(subject_module, "Engine", engine)
    measure_memory(subject, prefix=16)
    assert seen == ["dropped", False]


@pytest.mark.parametrize(("quant", "group", "name"), [("fp8", None, "fp8"), ("int4", 32, "int4-32+fp8")])
def test_quantised_subjects(quant: str, group: int | None, name: str) -> None:
    subject = Subject.make(Target("tiny", quant=quant, group=group))
    assert subject.weights == name
    assert {fmt.kind for fmt in formats_in(subject.model).values()} == {quant, "fp8", "int8"}
    result = measure_step(subject, prefixes=(16,), steps=4, repeat=1, breakdown=False).result
    assert result["weights"] == name
    assert "parts" not in result["cases"][0]


def test_a_checkpoint_or_its_geometry(tmp_path: Path) -> None:
    from diffusiongemma.checkpoint import save_model

    model = Subject.make(Target("tiny")).model
    save_model(model, tmp_path / "model")
    geometry = Subject.make(Target(str(tmp_path / "model"), random_weights=True, quant="bf16"))
    assert geometry.random
    assert geometry.weights == "bfloat16"
    assert geometry.model.config.hidden_size == model.config.hidden_size
    with pytest.raises(ConfigError, match="--group 64 has no effect"):
        Subject.make(Target("tiny", group=64))
    with pytest.raises(ConfigError, match="no number format"):
        Subject.make(Target("tiny", quant="int3"))
    loaded = Subject.make(Target("nano", device="cpu"))
    assert not loaded.random
    assert loaded.model.config.vocab_size == 8192


def test_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: Any, **__: Any) -> Outcome:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(suite_module, "measure_e2e", broken)
    plan = Plan(users=(1,), prefix=16, long=40, context=64, steps=1, repeat=1)
    file = tmp_path / "lines.jsonl"
    missing = run_suite(Target("tiny"), ("e2e", "memory", "long"), plan, file=file)
    assert missing == ["e2e"]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["bench"] for line in lines] == ["memory", "step", "suite"]
    assert "illegal memory access" in lines[-1]["missing"]["e2e"]
    assert [case["prefix"] for case in lines[1]["cases"]] == [16, 40]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == lines[-1]
    late = run_suite(Target("tiny"), ("memory",), plan, seconds=1e-9)
    assert late == ["memory"]
    with pytest.raises(InputError, match="no part 'speed'"):
        run_suite(Target("tiny"), ("speed",), plan)


@pytest.mark.usefixtures("fast")
def test_all_over_the_fast_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools, kept prompts and boards as on a card, with torch twins for kernels."""
    monkeypatch.setattr(suite_module, "LENGTHS", (16, 600))
    plan = Plan(users=(1, 3), prefix=16, long=100, context=64, steps=1, repeat=1)
    file = tmp_path / "lines.jsonl"
    assert run_suite(Target("tiny"), ("long", "e2e", "memory", "batch", "prefill"), plan, file=file) == []
    lines = {line["bench"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert lines["step"]["runner"] == "FastRunner"
    assert [case["replay_ms"] > 0 for case in lines["step"]["cases"]] == [True, True]
    assert [case["users"] for case in lines["batch"]["cases"] if "error" not in case] == [1, 3]


def test_slope() -> None:
    assert slope(lambda: 1.0, lambda: 3.0, 4, 3) == 0.5
    assert slope(lambda: 3.0, lambda: 2.0, 4, 1) == 0.5  # the short one was disturbed


def test_show_rounds_and_adds_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome("title", [("a", "b")], {"x": math.pi, "list": [{"y": 1 / 3}], "n": 3})
    for _ in range(2):
        show(outcome, tmp_path / "out")
    assert (tmp_path / "out").read_text().splitlines() == ['{"x": 3.14159, "list": [{"y": 0.333333}], "n": 3}'] * 2
    assert capsys.readouterr().out.splitlines()[-1] == '{"x": 3.14159, "list": [{"y": 0.333333}], "n": 3}'
