"""Tables and roofline plot of docs/benchmarks.md, from docs/benchmarks.json.

    python scripts/benchmarks_page.py [--add FILE …] [--docs FOLDER]

`--add` takes files of JSON lines as `dgemma bench … --json FILE` writes them (a later result replaces an earlier one of
the same measurement). Lines that are no JSON are passed over, so that the whole output of a run can be given. Results
without a card are not taken: a CPU's are in the log. Then the tables between the page's markers are written anew and
the plot is drawn.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
NONE = "–"
WEIGHTS = ("bfloat16", "fp8", "int4-64", "int4-32")
PARTS = ("experts", "attention", "dense MLP", "vocabulary end", "self-conditioning", "rest")
LEAST = 20.0  # µs of a step: what takes less has no line
Data = dict[str, Any]
Row = dict[str, Any]


# ---- taking results in -------------------------------------------------------------------------------------------


def objects(text: str) -> Iterator[Any]:
    """Every JSON value that stands alone on a line, or the one that the whole text is."""
    try:
        yield json.loads(text)
        return
    except ValueError:
        pass
    for line in text.splitlines():
        if line.startswith(("{", "[")):
            try:
                yield json.loads(line)
            except ValueError:
                continue


def key(result: Row) -> tuple[Any, ...]:
    """Results with the same key are of the same measurement."""
    names = ["bench", "preset", "weights", "card", "canvas", "steps", "tokens"]
    names += ["users"] if result["bench"] in ("step", "memory") else []  # elsewhere it is part of the result
    prefixes = tuple(case.get("prefix") for case in result.get("cases", ()))
    return (*(result.get(name) for name in names), prefixes)


def take(data: Data, text: str) -> int:
    """Add what the text of one file holds -> how many results."""
    taken = 0
    for value in objects(text):
        if isinstance(value, dict) and value.get("bench") not in (None, "suite") and value.get("card"):
            data["results"] = [old for old in data["results"] if key(old) != key(value)] + [value]
            taken += 1
    return taken


# ---- tables ------------------------------------------------------------------------------------------------------


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(columns)
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def of(data: Data, bench: str, weights: str | None = None) -> list[Row]:
    """Results of the 26B, in the order of the weights."""
    found = [r for r in data["results"] if r["bench"] == bench and r["preset"] == "26b-a4b"]
    found = [r for r in found if weights is None or r["weights"].startswith(weights)]
    order = {name: i for i, name in enumerate(WEIGHTS)}
    return sorted(found, key=lambda r: order.get(r["weights"], len(order)))


def steps(data: Data, weights: str | None = None, cases: int = 1) -> list[Row]:
    return [r for r in of(data, "step", weights) if len(r["cases"]) == cases]


def goals(data: Data) -> str:
    def last(bench: str, weights: str, name: str) -> tuple[float, str] | None:
        """The newest figure of these weights."""
        usable = steps(data, weights) if bench == "step" else of(data, bench, weights)
        found = [r for r in data["results"] if r in usable]
        return (found[-1][name], found[-1]["weights"]) if found else None

    eight = [(c["tokens_per_second"], r["weights"]) for r in of(data, "batch", "fp8") for c in r["cases"]
             if c["users"] == 8 and "error" not in c]  # fmt: skip
    ratios = [(r["cases"][1]["ms"] / r["cases"][0]["ms"], r["weights"]) for r in steps(data, cases=2)]
    rows: list[tuple[str, float, str, tuple[float, str] | None, bool]] = [
        ("a step, bf16", 13.0, "ms", last("step", "bfloat16", "ms"), True),
        ("a step, fp8", 7.0, "ms", last("step", "fp8", "ms"), True),
        ("a step, 4-bit", 4.5, "ms", last("step", "int4", "ms"), True),
        ("1,024 tokens, fp8", 2000, "tok/s", last("e2e", "fp8", "tokens_per_second"), False),
        ("1,024 tokens, 4-bit", 3000, "tok/s", last("e2e", "int4", "tokens_per_second"), False),
        ("a token of the twin, fp8", 2.2, "ms", last("ar", "fp8", "ms"), True),
        ("8 users, fp8", 4000, "tok/s", eight[-1] if eight else None, False),
        ("memory, 4-bit, 8,192 tokens", 18.0, "GB", last("memory", "int4", "peak_gb"), True),
        ("step over 32,768 : 512 tokens", 1.6, "", max(ratios, default=None), True),
        ("cold start", 60, "s", max(((r["cold_seconds"], r["weights"]) for r in of(data, "e2e")), default=None), True),
    ]

    def line(what: str, limit: float, unit: str, figure: tuple[float, str] | None, most: bool) -> tuple[str, ...]:
        goal = f"{'≤' if most else '≥'} {limit:,g} {unit}".strip()
        if figure is None:
            return what, goal, "not measured yet", ""
        value, weights = figure
        holds = value <= limit if most else value >= limit
        shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        return what, goal, f"{shown} {unit}".strip() + f" ({weights})", "yes" if holds else "no"

    return table(("what", "goal", "here", "holds"), (line(*row) for row in rows))


def step_table(data: Data) -> str:
    rows = [
        (r["weights"], f"{r['floor_ms']:.2f}", f"{r['ms']:.2f}", f"{r['ratio']:.2f}",
         f"{r['replay_ms']:.2f}" if "replay_ms" in r else NONE, f"{r['experts_hit']['mean']:.1%}")
        for r in steps(data)
    ]  # fmt: skip
    peers = [(f"{p['name']} ({p['origin']})", "", p["ms"], "", "", "") for p in data["peers"] if "ms" in p]
    return table(("ms", "floor", "a step, all in", "ratio", "graph alone", "experts hit"), rows + peers)


def parts_table(data: Data) -> str:
    found = [r for r in steps(data) if "parts" in r["cases"][0]]

    def cell(result: Row, part: str) -> str:
        case = result["cases"][0]
        return f"{case['parts'].get(part, 0):.2f} ({case['floor']['parts'][part]['ms']:.2f})"

    rows = [(part, *(cell(r, part) for r in found)) for part in PARTS]
    if found:
        rows.append(("nothing runs", *(f"{r['cases'][0].get('idle_ms', 0):.2f}" for r in found)))
    return table(("ms (floor)", *(r["weights"] for r in found)), rows)


def e2e_table(data: Data) -> str:
    rows: list[tuple[str, ...]] = [
        (r["weights"], f"{r['tokens_per_second']:,.0f}",
         NONE if "trouble" in r else f"{r['tokens_per_second_without_prefill']:,.0f}",
         f"{r['ms_a_pass']:.2f}", f"{r['ratio']:.2f}", f"{r['cold_seconds']:.1f}")
        for r in of(data, "e2e")
    ]  # fmt: skip
    for p in (p for p in data["peers"] if "tokens_per_second" in p and p.get("users", 1) == 1):
        counted, left_out = (
            (NONE, p["tokens_per_second"]) if p.get("prefill") == "left out" else (p["tokens_per_second"], NONE)
        )
        rows.append((f"{p['name']} ({p['origin']})", counted, left_out, p.get("pass_ms", NONE), "", ""))
    return table(("one user", "tok/s", "without prefill", "ms a pass", "ratio to floor", "cold start, s"), rows)


def ar_table(data: Data) -> str:
    rows = [
        (f"{r['weights']}, {c['users']} users", f"{c['floor_ms']:.2f}", f"{c['ms']:.2f}",
         f"{c['users'] / c['ms'] * 1e3:,.0f}",
         *(f"{r['diffusion_to_ar'][n][str(c['users'])]:.2f}" for n in ("12", "16", "24", "48")))
        for r in of(data, "ar") for c in r["cases"]
    ]  # fmt: skip
    for r in of(data, "ar"):
        told = (NONE if at is None else f"{at:.1f}" for at in (r["overtakes_at"][n] for n in ("12", "16", "24", "48")))
        rows.append((f"{r['weights']}: AR overtakes at … users", "", "", "", *told))
    names = ("the twin", "floor, ms", "ms a token", "tok/s in all", "diffusion : AR, 12 steps", "16", "24", "48")
    return table(names, rows)


def batch_table(data: Data) -> str:
    rows = [
        (f"{r['weights']}, {c['users']} users", "", "failed", "", "") if "error" in c else
        (f"{r['weights']}, {c['users']} users", f"{c['floor_tokens_per_second']:,.0f}",
         f"{c['tokens_per_second']:,.0f}",
         f"{c['ratio']:.2f}", f"{c['peak_gb']:.1f}")
        for r in of(data, "batch") for c in r["cases"]
    ]  # fmt: skip
    for p in (p for p in data["peers"] if p.get("users", 1) > 1):
        rows.append((f"{p['name']}, {p['users']} users ({p['origin']})", "", p["tokens_per_second"], "", ""))
    return table(("tokens a second in all", "floor", "figure", "ratio", "peak GB"), rows)


def others_table(data: Data) -> str:
    rows: list[tuple[str, ...]] = []
    for r in steps(data, cases=2):
        short, long = r["cases"]
        what = f"step over {long['prefix']:,} tokens, {r['weights']}"
        rows.append(
            (
                what,
                f"{long['floor_ms']:.2f} ms",
                f"{long['ms']:.2f} ms, {long['ms'] / short['ms']:.2f} times that over {short['prefix']}",
            )
        )
    for r in of(data, "prefill"):
        for c in r["cases"]:
            speed = f"{c['tokens_per_second']:,.0f} tok/s"
            rows.append(
                (f"prompt of {c['prefix']:,}, {r['weights']}", f"{c['prefix'] / c['floor_seconds']:,.0f} tok/s", speed)
            )
    for r in of(data, "memory"):
        figure = f"{r['peak_gb']:.2f} GB (making {r['making_peak_gb']:.2f}, writing {r['writing_peak_gb']:.2f})"
        rows.append((f"memory, {r['prefix']:,} tokens, {r['weights']}", f"{r['floor_gb']:.2f} GB", figure))
    for r in of(data, "vs-transformers"):
        there = f"Transformers {r['transformers']} {r['transformers_ms']:.1f} ms"
        figure = f"{r['ms']:.2f} ms; {there}, {r['speedup']:.1f} times as long"
        rows.append((f"same run, {r['weights']}", f"{r['floor_ms']:.2f} ms", figure))
    return table(("what", "floor", "figure"), rows)


def kernels_table(data: Data) -> str:
    """What each kernel takes of a step, and how often it is called; kernels of one name by the part they belong to"""
    found = [r for r in steps(data) if "kernels" in r["cases"][0]]
    taken: dict[tuple[str, str], dict[str, list[float]]] = {}
    for result in found:
        for kernel in result["cases"][0]["kernels"]:
            name = "the vendor's product" if kernel["kernel"].startswith("nvjet") else kernel["kernel"]
            both = taken.setdefault((name, kernel["part"]), {}).setdefault(result["weights"], [0.0, 0.0])
            both[0] += kernel["us"]
            both[1] += kernel["calls"]
    most = {key: max(us for us, _ in by_weights.values()) for key, by_weights in taken.items()}

    def cell(by_weights: dict[str, list[float]], weights: str) -> str:
        us, calls = by_weights.get(weights, (0.0, 0))
        return f"{us:,.0f} ({calls:g})" if calls else NONE

    rows = [
        (f"`{name}`" if "_" in name else name, part, *(cell(taken[name, part], r["weights"]) for r in found))
        for name, part in sorted(taken, key=lambda key: -most[key]) if most[name, part] >= LEAST
    ]  # fmt: skip
    return table(("kernel", "part", *(f"{r['weights']}, µs (calls)" for r in found)), rows)


TABLES: dict[str, Callable[[Data], str]] = {
    "goals": goals, "step": step_table, "parts": parts_table, "e2e": e2e_table, "ar": ar_table, "batch": batch_table,
    "others": others_table, "kernels": kernels_table,
}  # fmt: skip


def render(page: str, data: Data) -> str:
    """The page with its tables written anew."""
    return MARK.sub(lambda found: found[1] + TABLES[found["name"]](data) + found[4], page)


# ---- the plot ----------------------------------------------------------------------------------------------------


def points(data: Data) -> Iterator[tuple[str, str, float, float]]:
    """(kind, label, operations a byte, TFLOP/s)"""
    for r in steps(data):
        work = r["cases"][0]["floor"]
        yield "a step", r["weights"], work["tflop"] / work["gb"] * 1e3, work["tflop"] / r["ms"] * 1e3
    for r in of(data, "ar"):
        for case in (c for c in r["cases"] if "floor" in c):
            work = case["floor"]
            label = f"{r['weights']}, {case['users']}"
            yield "AR, users", label, work["tflop"] / work["gb"] * 1e3, work["tflop"] / case["ms"] * 1e3
    for r in steps(data):
        case = r["cases"][0]
        if "parts" in case:  # experts and dense MLP run beside each other
            parts = ("experts", "dense MLP")
            ms = sum(case["parts"].get(part, 0) for part in parts)
            tflop, gigabytes = (sum(case["floor"]["parts"][part][name] for part in parts) for name in ("tflop", "gb"))
            if ms:
                yield "its experts and dense MLP", r["weights"], tflop / gigabytes * 1e3, tflop / ms * 1e3


def draw(data: Data, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    machine = data["machine"]
    xs = [1.0, 1000.0]
    for name, style in (("tflop_s", "--"), ("tflop_s_8bit", "-")):
        ys = [
            min(machine["read_tb_s"] * x, machine[name]) for x in (xs[0], machine[name] / machine["read_tb_s"], xs[1])
        ]
        kind = "8-bit" if "8bit" in name else "bf16"
        axes.plot([xs[0], machine[name] / machine["read_tb_s"], xs[1]], ys, style, color="0.4",
                  label=f"{machine['read_tb_s']} TB/s, {machine[name]:g} TFLOP/s {kind}")  # fmt: skip
    markers = {"a step": "*", "AR, users": "o", "its experts and dense MLP": "s"}
    for kind, marker in markers.items():
        found = [(label, x, y) for k, label, x, y in points(data) if k == kind]
        if found:
            axes.plot(
                [x for _, x, _ in found], [y for _, _, y in found], marker, ms=9 if marker == "*" else 5, label=kind
            )
        for label, x, y in found:
            aside, side = ((-6, 5), "right") if marker == "s" else ((6, -9), "left")
            axes.annotate(label, (x, y), textcoords="offset points", xytext=aside, ha=side, fontsize=7)
    axes.set(xscale="log", yscale="log", xlim=xs, ylim=(1, 3000), xlabel="operations a byte read", ylabel="TFLOP/s")
    axes.set_title(f"{machine['card']}, DiffusionGemma 26B-A4B", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="results to take in")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where benchmarks.json and benchmarks.md lie")
    args = parser.parse_args()
    store, page = args.docs / "benchmarks.json", args.docs / "benchmarks.md"
    data: Data = json.loads(store.read_text(encoding="utf-8"))
    for file in args.add:
        print(f"{file}: {take(data, file.read_text(encoding='utf-8'))} results")
    store.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page.write_text(render(page.read_text(encoding="utf-8"), data), encoding="utf-8")
    draw(data, args.docs / "roofline.png")


if __name__ == "__main__":
    main()
