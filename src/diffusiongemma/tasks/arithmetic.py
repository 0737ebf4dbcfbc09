"""Small arithmetic: one question, one answer that counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diffusiongemma.engine import Engine, Request
from diffusiongemma.errors import DataError
from diffusiongemma.tasks import format
from diffusiongemma.tasks.arithmetic_gen import Problem, problems
from diffusiongemma.tasks.evaluation import Graded, Variant, Work
from diffusiongemma.tasks.prompts import chat_tokens
from diffusiongemma.tasks.sets import read_json_lines, take

COUNT = 1_000  # problems, unless fewer are asked for


def cases(file: Path | None, limit: int | None, seed: int) -> list[Problem]:
    """Held-out problems made by the seed, or JSON lines with `question` and `answer`."""
    if file is None:
        return take(problems(seed, COUNT), limit, seed)
    rows = [Problem("own", row["question"], row["answer"]) for _, row in read_json_lines(file, ("question", "answer"))]
    if not rows:
        raise DataError(f"{file} holds no problem")
    return take(rows, limit, seed)


@dataclass(frozen=True)
class Arithmetic:
    name: str = "arithmetic"
    headline: str = "correct"

    def work(self, engine: Engine, case: Problem, variant: Variant, seed: int) -> Work:
        prompt = chat_tokens(engine, format.arithmetic_request(case.question))
        options: dict[str, int] = {"max_new_tokens": format.ARITHMETIC_CANVAS, "seed": seed}
        if variant.mode == "diffusion":
            options["canvas"] = min(format.ARITHMETIC_CANVAS, engine.model.config.canvas_length)
        (outcome,) = yield [Request(prompt, variant.params(engine.params, **options), drafts=False)]
        scores: dict[str, bool | float] = {"correct": outcome.text.strip() == case.answer}
        steps, decided = outcome.metrics.steps, len(outcome.tokens)
        return Graded(case.question, case.kind, seed, outcome.text, scores, steps, decided)
