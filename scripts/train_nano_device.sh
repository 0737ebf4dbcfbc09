#!/usr/bin/env bash
# Trains nano on a machine with a GPU that has only this tree: python3 with torch, safetensors, tokenizers, numpy.
# Steps, in any order and number, for example over three calls on the same machine:
#   CARRY=carry  scripts/train_nano_device.sh freeze stash smoke 10
#   CARRY=carry2 scripts/train_nano_device.sh stash unpack train 8.5 17
#   scripts/train_nano_device.sh train 9 17 collect
# The lent machine goes back, with everything on it, after 30 idle seconds: start nothing beside these calls that could
# outlast them, and have the next call ready.
#
#   freeze           keep this tree's code for later calls (or that of $CARRY/tree, where other work goes on in this one)
#   stash            keep what lies in $CARRY (part*/, tokenizer/, eval/, init/: weights to begin with, for
#                    EXTRA="--init-from $WORK/init") on this machine for later calls
#   smoke [SECONDS]  twenty steps of nano's network on made-up data, or its speed in detail (needs no parts)
#   unpack           token arrays and puzzles from all parts that were stashed
#   bench SECONDS    tokens a second and MFU for a few settings
#   train MAX TOTAL  train for MAX minutes of a schedule of TOTAL minutes; resumes
#                    ($EXTRA: more options, such as `--experts dense`)
#   finetune RECIPE MAX TOTAL   the same with another recipe, in the same run (weights of tasks may differ)
#   collect          metrics, curves and the averaged weights in int8 (four shards) to $OUT
#   ship             the averaged weights as they would be shipped, in $WORK/shipped, for scripts/evaluate.py --model
set -euo pipefail
cd "$(dirname "$0")/.."
work=${WORK:-/tmp/dgemma-nano} carry=${CARRY:-carry} out=${OUT:-$work/out}
mkdir -p "$work/parts" "$out"
# The tree that was frozen on this machine, where there is one: a run must not change its code between two calls.
tree=$PWD && [ -d "$work/tree" ] && tree=$work/tree
export PYTHONPATH=$tree/src PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=$work/inductor TORCHINDUCTOR_FX_GRAPH_CACHE=1
data=(--data "$work/data" --tokenizer "$work/tokenizer" --evaluation "$work/eval")

run() { # RECIPE MAX TOTAL
    python3 -m diffusiongemma.train "$1" --out "$work/run" --max-minutes "$2" --total-minutes "$3" "${data[@]}" ${EXTRA:-} 2>&1 |
        tee -a "$work/train.log"
}

while (($#)); do
    step=$1
    shift
    SECONDS=0
    case $step in
    freeze)
        mkdir -p "$work/tree" && cp -r src recipes "$work/tree/"
        if [ -d "$carry/tree" ]; then
            rm -rf "$work/tree/src/diffusiongemma"/[!a]* && cp -r "$carry/tree/." "$work/tree/"
        fi
        tree=$work/tree PYTHONPATH=$work/tree/src ;;
    stash)
        for part in "$carry"/part*/; do [ -d "$part" ] && cp -rn "$part" "$work/parts/"; done
        for name in tokenizer eval init; do [ -d "$carry/$name" ] && cp -r "$carry/$name" "$work/"; done
        du -sh "$work"/parts/* ;;
    smoke)
        sed '/^\[\[task\]\]/,$d; s/^total_minutes.*/total_steps = 20/; s/^log_every.*/log_every = 5/; s/^evaluate_every.*/evaluate_every = 0/' \
            "$tree/recipes/nano.toml" >"$work/smoke.toml"
        cat >>"$work/smoke.toml" <<-END
	[[task]]
	name = "arithmetic"
	kind = "arithmetic"
	weight = 0.5
	prefix = 384
	canvas = 64
	views = 3
	[[task]]
	name = "sudoku"
	kind = "sudoku"
	weight = 0.5
	prefix = 104
	canvas = 96
	rounds = 5
	noise = [0.3, 1.0]
	END
        if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
            python3 -m diffusiongemma.train "$work/smoke.toml" --out "$work/smoke" --tokenizer bytes --benchmark "$1" 2>&1
            shift
        else
            python3 -m diffusiongemma.train "$work/smoke.toml" --out "$work/smoke-$RANDOM" --tokenizer bytes 2>&1
        fi ;;
    unpack)
        python3 -m diffusiongemma.train.data unpack "$work"/parts/* --out "$work/data" --workers "$(nproc)"
        ls -l "$work/data" ;;
    bench)
        python3 -m diffusiongemma.train "$tree/recipes/nano.toml" --out "$work/bench" --benchmark "$1" "${data[@]}" 2>&1
        shift ;;
    train)
        run "$tree/recipes/nano.toml" "$1" "$2"
        shift 2 ;;
    finetune)
        run "$1" "$2" "$3"
        shift 3 ;;
    collect)
        python3 - "$work/run" "$out" <<-'END'
	import sys
	from pathlib import Path
	from diffusiongemma.train.checkpoint import averaged
	from diffusiongemma.train.export import save_raw
	save_raw(averaged(Path(sys.argv[1])), Path(sys.argv[2]), int8=True)
	END
        cp "$work/train.log" "$work/run/"
        (cd "$work/run" && tar czf "$out/run.tar.gz" metrics.jsonl train.log curves.png)
        ls -l "$out" ;;
    ship)
        rm -rf "$work/shipped"
        python3 -m diffusiongemma.train.ship "$work/run" "$work/shipped" --tokenizer "$work/tokenizer" ;;
    *)
        echo "unknown step $step" >&2
        exit 2 ;;
    esac
    echo "== $step: $SECONDS s"
done
