"""Cases through the engine: rounds, order, seeds, failures, and the same bits every time."""

import dataclasses
import threading
from dataclasses import dataclass

import pytest

from diffusiongemma.engine import Engine, Limits, Request, SamplingParams
from diffusiongemma.errors import ConfigError, DiffusionGemmaError
from diffusiongemma.tasks.arithmetic_gen import problems
from diffusiongemma.tasks.evaluation import SEEDS_A_CASE, Graded, Report, Variant, Work, evaluate, held
from diffusiongemma.text.bytes import byte_tokenizer
from tasks.oracle import Oracle, real_engine, small_model

FAST = Variant("diffusion", 3)


@dataclass(frozen=True)
class Count:
    """Asks again until the answer, a number, is reached."""

    name: str = "count"
    headline: str = "even"

    def work(self, engine: Engine, case: int, variant: Variant, seed: int) -> Work:
        steps, texts = 0, []
        for i in range(case):
            (outcome,) = yield [Request((2,), variant.params(engine.params, seed=seed + i, max_new_tokens=4))]
            steps += outcome.metrics.steps
            texts.append(outcome.text)
        return Graded(str(case), "", seed, "".join(texts), {"even": case % 2 == 0}, steps, case)


def test_work_that_asks_again_runs_in_rounds() -> None:
    oracle, seen = Oracle(lambda request: "x"), []
    report = evaluate(oracle, Count(), [3, 0, 1], FAST, seed=7, progress=lambda done, of: seen.append((done, of)))
    assert [one.text for one in report.graded] == ["xxx", "", "x"]  # in the order of the cases
    assert [one.steps for one in report.graded] == [9, 0, 3]
    assert seen == [(1, 2), (2, 2), (1, 1), (1, 1)]
    first, third = 7, 7 + 2 * SEEDS_A_CASE
    assert [request.params.seed for request in oracle.asked] == [first, third, first + 1, first + 2]
    assert [one.seed for one in report.graded] == [7, 7 + SEEDS_A_CASE, third]


def test_cases_are_graded_while_others_run() -> None:
    """A case that ends early does not wait for the last; what it asks again does."""
    with Engine(small_model(), byte_tokenizer(), limits=Limits(max_rows=4)) as engine:
        graded = []

        class Watched(Count):
            def work(self, engine: Engine, case: int, variant: Variant, seed: int) -> Work:
                params = variant.params(engine.params, seed=seed, max_new_tokens=4, canvas=4)
                (outcome,) = yield [Request((2,), dataclasses.replace(params, steps=case, early_stop=False))]
                graded.append((case, engine.scheduler.busy))
                return Graded(str(case), "", seed, outcome.text, {"even": True}, outcome.metrics.steps, 4)

        report = evaluate(engine, Watched(), [400, 1, 2], FAST)
    assert graded[:2] == [(1, True), (2, True)]
    assert [one.steps for one in report.graded] == [400, 1, 2]


def test_a_report_adds_up() -> None:
    graded = [
        Graded("a", "x", 0, "", {"good": True, "near": 0.5}, 4, 8),
        Graded("b", "y", 1, "", {"good": False}, 6, 2),
    ]
    report = Report(FAST, graded, 2.0)
    figures = report.figures()
    assert (figures["good"].value, figures["good"].count) == (0.5, 2)
    assert (figures["near"].value, figures["near"].count) == (0.5, 1)  # over the cases that have it
    assert report.figures("y")["good"].value == 0
    assert (report.mean_steps.value, report.tokens_per_forward) == (5.0, 1.0)
    told = report.to_dict()
    assert told["seconds_per_case"] == 1.0
    assert sorted(told["kinds"]) == ["x", "y"]
    assert told["figures"]["good"].keys() == {"value", "low", "high", "count"}


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
def test_the_same_seed_gives_the_same_report_in_any_batch(mode: str) -> None:
    from diffusiongemma.tasks.arithmetic import Arithmetic

    cases, reports = problems(0, 7), []
    for rows, seed in ((1, 0), (4, 0), (16, 0), (16, 1)):
        with Engine(small_model(), byte_tokenizer(), limits=Limits(max_rows=rows)) as engine:
            variant = dataclasses.replace(FAST, mode=mode, options={} if mode == "diffusion" else {"temperature": 1.0})
            reports.append(evaluate(engine, Arithmetic(), cases, variant, seed))
    texts = [[one.text for one in report.graded] for report in reports]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    assert [one.steps for one in reports[0].graded] == [one.steps for one in reports[2].graded]


def test_batches_do_not_depend_on_how_fast_requests_come() -> None:
    """Everything handed in while the engine is held is there when its next tick begins."""
    with real_engine() as engine:
        sizes = []
        engine.scheduler.on_tick = lambda: sizes.append(len(engine.scheduler.running))
        params = SamplingParams(max_new_tokens=3, steps=2, seed=0, canvas=4, early_stop=False)
        for _ in range(3):
            with held(engine):
                sizes.clear()  # its thread stands still in the gate's tick
                handles = [engine.submit(Request((2, 110 + i), params, drafts=False)) for i in range(5)]
            for handle in handles:
                list(handle)
            assert sizes[:2] == [0, 5]  # the gate's own tick is over, then all five are there at once


def test_the_engine_goes_on_if_handing_in_fails() -> None:
    with real_engine() as engine:
        with pytest.raises(RuntimeError, match="stop"), held(engine):
            raise RuntimeError("stop")
        assert engine.generate("a", max_new_tokens=2, steps=1, seed=0).metrics.steps == 1


def test_a_case_that_fails_is_told_and_nothing_keeps_running() -> None:
    with Engine(small_model(), byte_tokenizer(), limits=Limits(max_bytes=40_000)) as engine:
        params = SamplingParams(max_new_tokens=1, steps=1)
        engine.check(Request((2,), params))

        class TooLarge(Count):
            def work(self, engine: Engine, case: int, variant: Variant, seed: int) -> Work:
                yield [Request((2,) * 900, variant.params(engine.params, max_new_tokens=4))]
                raise AssertionError("it cannot come back")

        with pytest.raises(DiffusionGemmaError, match="a case failed: .*K/V cache"):
            evaluate(engine, TooLarge(), [1, 2], FAST)
        assert engine.generate("a", max_new_tokens=2, steps=1).tokens is not None


def test_variants_say_what_they_are_and_refuse_what_has_no_effect() -> None:
    base = SamplingParams()
    assert Variant("ar").params(base).temperature == 0.0
    assert Variant("ar", options={"temperature": 0.7}).params(base).temperature == 0.7
    got = Variant("diffusion", 8, False, {"entropy_bound": 0.3}).params(base, seed=4)
    assert (got.steps, got.early_stop, got.entropy_bound, got.seed) == (8, False, 0.3, 4)
    assert Variant().params(dataclasses.replace(base, steps=12)).steps == 12  # the model's own
    with pytest.raises(ConfigError, match="temperature has no effect"):
        Variant("diffusion", options={"temperature": 1.0}).params(base)
    labels = [v.label for v in (Variant(), Variant("diffusion", 8), Variant("diffusion", None, False), Variant("ar"))]
    assert labels == ["diffusion", "diffusion 8", "diffusion, all steps", "ar"]


def test_without_early_stop_all_steps_are_taken() -> None:
    from diffusiongemma.tasks.arithmetic import Arithmetic

    loose = {"stability": 0, "confidence": 100.0}
    with real_engine() as engine:
        for early, steps in ((True, 1), (False, 6)):
            report = evaluate(engine, Arithmetic(), problems(0, 2), Variant("diffusion", 6, early, loose))
            assert {one.steps for one in report.graded} == {steps}


def test_nothing_is_left_waiting_for_the_gate() -> None:
    before = threading.active_count()
    with real_engine() as engine:
        evaluate(engine, Count(), [1, 1], FAST)
    assert threading.active_count() <= before
