"""What each way to choose between candidates for a hole gives, from one run that kept them all.

    dgemma eval infill --set line --candidates 8 --output line.jsonl
    python scripts/compare_choices.py line.jsonl

One line a set, number of candidates, check and choice, as JSON: the scores with their 95% intervals. `best` is no
choice but the most that any could give: by each score the best candidate of all, which nobody knows without the answer.
A file of before there was `ratio` gets it by `dgemma eval infill --answers line.jsonl --output line.jsonl`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusiongemma.engine.candidates import Candidate
from diffusiongemma.engine.choice import Choice
from diffusiongemma.errors import DataError
from diffusiongemma.tasks.sets import read_json_lines
from diffusiongemma.tasks.statistics import figure

Tried = list[dict[str, Any]]  # the candidates of one case as `tasks/infill.py` told them
Scores = dict[str, bool | float]


def read(path: Path) -> dict[str, list[Tried]]:
    """set and variant -> its cases"""
    found: dict[str, list[Tried]] = defaultdict(list)
    for number, row in read_json_lines(path, ("task", "set", "variant")):
        tried = row.get("tried")
        if row["task"] != "infill" or not tried or not all("parses" in one for one in tried):
            raise DataError(f"{path}, line {number} has no candidates: eval infill --candidates 8 --output keeps them")
        found[f"{row['set']}, {row['variant']}"].append(tried)
    return found


def chosen(tried: Tried, check: bool, choice: Choice) -> Scores:
    """The scores of the candidate that wins. What parses is known already."""
    rivals = []
    for i, one in enumerate(tried):
        texts, sound = None if one["text"] is None else (one["text"],), not check or one["parses"]
        rivals.append(Candidate(i, ((),), texts, one["score"], one["finish_reason"], one["opens"], sound))
    scores: Scores = tried[choice.order(rivals, ())[0].seed]["scores"]
    return scores


def most(tried: Tried) -> Scores:
    return {name: max(one["scores"][name] for one in tried) for name in tried[0]["scores"]}


def told(scores: Sequence[Scores]) -> dict[str, Any]:
    values: dict[str, list[bool | float]] = defaultdict(list)
    for one in scores:
        for name, value in one.items():
            values[name].append(value)
    return {
        name: [round(x, 4) for x in (f.value, f.low, f.high)] for name, found in values.items() for f in [figure(found)]
    }


def compare(cases: Sequence[Tried]) -> Iterator[dict[str, Any]]:
    widest = max(map(len, cases))
    for count in sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n <= widest} | {widest}):
        some = [tried[:count] for tried in cases]
        for choose in ("likeliest", "middle") if count > 2 else ("likeliest",):
            for check in (False, True) if count > 1 else (False,):
                choice = Choice(choose=choose)  # type: ignore[arg-type]
                scores = [chosen(tried, check, choice) for tried in some]
                about = {"candidates": count, "check": "python" if check else "none", "choose": choose}
                yield about | {"cases": len(some)} | told(scores)
        if count > 1:
            yield {"candidates": count, "choose": "best", "cases": len(some)} | told([most(tried) for tried in some])


def main(
    file: Annotated[Path, typer.Argument(help="What `dgemma eval infill --candidates N --output` wrote.")],
) -> None:
    for name, cases in read(file).items():
        for row in compare(cases):
            print(json.dumps({"set": name} | row), flush=True)


if __name__ == "__main__":
    typer.run(main)
