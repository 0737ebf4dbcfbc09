#!/usr/bin/env bash
# Trains nano on a machine with a GPU that has only this tree: python3 with torch, safetensors, tokenizers, numpy.
# Steps, in any order and number, for example over three calls on the same machine:
#   scripts/train_nano_device.sh stash smoke
#   scripts/train_nano_device.sh stash unpack bench 40 train 8 20 collect 1
#   scripts/train_nano_device.sh train 9 20 collect 1        and then, at once: collect 2
# The lent machine goes back, with everything on it, after 30 idle seconds: start nothing beside these calls that could
# outlast them, and have the next call ready.
#
#   stash            keep what lies in $CARRY (part*/, tokenizer/, eval/) on this machine for later calls
#   smoke            twenty steps of nano's network on made-up data: does it compile, how fast is it (needs no parts)
#   unpack           token arrays and puzzles from all parts that were stashed
#   bench SECONDS    tokens a second and MFU for a few settings
#   train MAX TOTAL  train for MAX minutes of a schedule of TOTAL minutes; resumes
#   finetune RECIPE MAX TOTAL   the same with another recipe, in the same run (weights of tasks may differ)
#   collect N        copy metrics and the Nth four shards of the model to $OUT
set -euo pipefail
cd "$(dirname "$0")/.."
work=${WORK:-/tmp/dgemma-nano} carry=${CARRY:-carry} out=${OUT:-$work/out}
mkdir -p "$work/parts" "$out"
export PYTHONPATH=src PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=$work/inductor TORCHINDUCTOR_FX_GRAPH_CACHE=1
data=(--data "$work/data" --tokenizer "$work/tokenizer" --evaluation "$work/eval")

run() { # RECIPE MAX TOTAL
    python3 -m diffusiongemma.train "$1" --out "$work/run" --max-minutes "$2" --total-minutes "$3" "${data[@]}" 2>&1 |
        tee -a "$work/train.log"
}

while (($#)); do
    step=$1
    shift
    SECONDS=0
    case $step in
    stash)
        for part in "$carry"/part*/; do [ -d "$part" ] && cp -rn "$part" "$work/parts/"; done
        for name in tokenizer eval; do [ -d "$carry/$name" ] && cp -r "$carry/$name" "$work/"; done
        du -sh "$work"/parts/* ;;
    smoke)
        sed '/^\[\[task\]\]/,$d; s/^total_minutes.*/total_steps = 20/; s/^log_every.*/log_every = 5/; s/^evaluate_every.*/evaluate_every = 0/' \
            recipes/nano.toml >"$work/smoke.toml"
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
	views = 2
	END
        python3 -m diffusiongemma.train "$work/smoke.toml" --out "$work/smoke-$RANDOM" --tokenizer bytes 2>&1 ;;
    unpack)
        python3 -m diffusiongemma.train.data unpack "$work"/parts/* --out "$work/data" --workers "$(nproc)"
        ls -l "$work/data" ;;
    bench)
        python3 -m diffusiongemma.train recipes/nano.toml --out "$work/bench" --benchmark "$1" "${data[@]}" 2>&1
        shift ;;
    train)
        run recipes/nano.toml "$1" "$2"
        shift 2 ;;
    finetune)
        run "$1" "$2" "$3"
        shift 3 ;;
    collect)
        mapfile -t shards < <(ls "$work"/run/model/*.safetensors)
        cp "${shards[@]:$((($1 - 1) * 4)):4}" "$out/"
        if [ "$1" = 1 ]; then
            cp "$work"/run/model/*.json "$out/" && rm -f "$out/tokenizer.json" "$out/tokenizer_config.json"
            gzip -c "$work/run/metrics.jsonl" >"$out/metrics.jsonl.gz"
            [ -f "$work/run/curves.png" ] && cp "$work/run/curves.png" "$out/"
        else
            gzip -c "$work/train.log" >"$out/train.log.gz"
        fi
        echo "${#shards[@]} shards in all"
        ls -l "$out"
        shift ;;
    *)
        echo "unknown step $step" >&2
        exit 2 ;;
    esac
    echo "== $step: $SECONDS s"
done
