#!/usr/bin/env bash
# `dgemma eval` of the embedded nano on a machine with a GPU that has only this tree, most important first:
#   OUT=out scripts/eval_device.sh 100                 # every evaluation at most 100 s, all of them at most $BUDGET (560)
#   OUT=out scripts/eval_device.sh 100 svg line-8      # only these
#   MODEL=random:tiny EXTRA="--limit 2" scripts/eval_device.sh 60   # here, to check the script
# Each evaluation is a process of its own, one after another: side by side they would wait for each other. $OUT gets
# summary.jsonl (the figures) and evals.tar.gz (all answers and messages), new after every evaluation, so that a call that
# is cut off keeps what it has. Then, where there is a renderer:
#   tar xzf evals.tar.gz; dgemma eval svg --answers evals/svg.jsonl     # where no renderer was: the same for svg-*.jsonl
#   dgemma eval svg --answers evals/svg-steps.jsonl --json >evals/svg-steps.json
#   python scripts/compare_choices.py evals/line-8.jsonl
#   python scripts/plot_steps.py evals/*-steps.json --out docs/nano_steps.png
# Other settings: BATCH (cases that run at once, 32), DEVICE (auto), CARRY/lib (a folder with resvg_py and PIL, if they
# fit the Python there: icons are then graded at once).
set -uo pipefail
cd "$(dirname "$0")/.."
limit=${1:?seconds for one evaluation}
shift
out=${OUT:-out} budget=${BUDGET:-560} batch=${BATCH:-32} model=${MODEL:-nano} device=${DEVICE:-auto} wanted=" $* "
work=$(mktemp -d)
mkdir -p "$out" "$work/evals"
out=$(cd "$out" && pwd)
: >"$out/summary.jsonl"
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
lib=$PWD/${CARRY:-carry}/lib
if PYTHONPATH=$lib python3 -c 'import resvg_py; from PIL import Image' 2>/dev/null; then
    PYTHONPATH=$PYTHONPATH:$lib
fi
SECONDS=0

judge() { # NAME ARGUMENTS…
    local name=$1 began=$SECONDS left=$((budget - SECONDS)) most=$limit to=$work/evals/$1 code=0
    shift
    [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
    if ((left < 15)); then
        echo "== $name: not begun, $SECONDS s are gone"
        return 0
    fi
    ((most < left)) || most=$left
    # shellcheck disable=SC2086
    timeout --signal=INT --kill-after=5 "$most" python3 -m diffusiongemma eval "$@" -m "$model" --device "$device" \
        --batch "$batch" --json --output "$to.jsonl" ${EXTRA:-} >"$to.json" 2>"$to.err" || code=$?
    echo "== $name: exit code $code, $((SECONDS - began)) s, $SECONDS s in all"
    ((code == 0)) || tail -n 3 "$to.err"
    python3 - "$name" "$to.json" <<-'END' | tee -a "$out/summary.jsonl"
	import json, sys
	for line in open(sys.argv[2]):
	    found = json.loads(line)
	    for run in found["runs"]:
	        figures = {n: [round(f[k], 4) for k in ("value", "low", "high")] for n, f in run["figures"].items()}
	        told = {"name": sys.argv[1], "set": found["set"], "run": run["variant"], "options": run["options"]}
	        told |= {"settings": found["settings"]}
	        told |= {"cases": run["cases"], "steps": round(run["steps"]["value"], 2), "seconds": round(run["seconds"], 1)}
	        told |= {"tokens_per_forward": round(run["tokens_per_forward"], 2), **figures}
	        print(json.dumps(told))
	    for label, cost in found["early_stop_cost_points"].items():
	        points = [round(cost[k], 2) for k in ("value", "low", "high")]
	        print(json.dumps({"name": sys.argv[1], "set": found["set"], "early_stop_costs_points": {label: points}}))
	END
    tar czf "$work/evals.tar.gz" -C "$work" evals && mv "$work/evals.tar.gz" "$out/evals.tar.gz"
}

boards=(--set qqwing_expert --set gymnasium_sudoku)
judge svg svg --attempts 6
judge line infill --set line
judge line-8 infill --set line --candidates 8 --check python
judge sudoku sudoku "${boards[@]}" --set own_36_46 --attempts 5
judge blocks infill --set lines --set inside --limit 250
judge line-ar infill --set line --mode ar
judge blocks-ar infill --set lines --set inside --limit 250 --mode ar
judge sudoku-ar sudoku "${boards[@]}" --mode ar
judge line-all infill --set line --all-steps
judge sudoku-all sudoku "${boards[@]}" --all-steps
judge svg-all svg --all-steps
judge sudoku-steps sudoku "${boards[@]}" --steps 1,2,4,8,16,32,48,96,192
judge line-steps infill --set line --limit 500 --steps 1,2,4,8,16,24,32,48
judge svg-steps svg --limit 200 --steps 8,16,24,32,48,96
# Icons: what a later stop, fewer tokens a step, or another temperature give, on the same names and seeds.
judge svg-stability svg --limit 200 -o stability=2
judge svg-confidence svg --limit 200 -o confidence=0.001
judge svg-careful svg --limit 200 --steps 96 -o entropy_bound=0.05
judge svg-slow svg --limit 200 --steps 128 -o entropy_bound=0.02
judge svg-forget svg --limit 200 --steps 96 -o forget=8
judge svg-cool svg --limit 200 -o t_min=0.05 -o t_max=0.2
judge svg-warm svg --limit 200 --steps 96 -o t_min=0.2 -o t_max=0.6
judge line-careful infill --set line -o entropy_bound=0.05
judge blocks-8 infill --set lines --set inside --limit 250 --candidates 8 --check python
judge svg-ar svg --limit 200 --mode ar
judge arithmetic arithmetic --mode both
judge sudoku-gen sudoku --set npm_sudoku_gen --attempts 5
rm -r "$work"
ls -l "$out"
