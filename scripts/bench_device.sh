#!/usr/bin/env bash
# The whole set of benchmarks on a machine with a GPU that has only this tree, most important first, within five minutes:
#   OUT=out scripts/bench_device.sh            # results.jsonl and the output of every part in $OUT
#   PRESET=tiny scripts/bench_device.sh        # the same on a small network, to check the script
# Every part is a process with a time limit of its own: one that fails or hangs does not end the others. Parts over the
# same weights share a process, because weights are made once there.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-out} preset=${PRESET:-26b-a4b} budget=${BUDGET:-300}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
results=$out/results.jsonl
SECONDS=0

part() { # NAME LIMIT COMMAND…: at most LIMIT seconds, and no more than are left of the budget
    local name=$1 limit=$2 began=$SECONDS left=$((budget - SECONDS))
    shift 2
    if ((left < 10)); then
        echo "== $name: not begun, $SECONDS s are gone"
        return
    fi
    ((limit < left)) || limit=$left
    timeout --signal=INT --kill-after=5 "$limit" python3 -m diffusiongemma.bench "$@" --json "$results" 2>&1 |
        tee "$out/$name.txt" | cut -c1-400
    echo "== $name: exit code ${PIPESTATUS[0]}, $((SECONDS - began)) s, $SECONDS s in all"
}

suite=(suite --preset "$preset" --random-weights --repeat 3)
small=() # what a small network has no room for
[ "$preset" = 26b-a4b ] || small=(--prefix 64 --long 1024 --context 512)
group=${GROUP_SIZE:-64} # of int4; the small network's rows are too short for 64
[ "$preset" = tiny ] && group=32

part fp8 90 "${suite[@]}" "${small[@]}" --quant fp8 --parts step,e2e
part int4 70 "${suite[@]}" "${small[@]}" --quant int4 --group "$group" --parts step,e2e,memory
part bf16 60 "${suite[@]}" "${small[@]}" --quant bf16 --parts step,e2e
part twin 50 "${suite[@]}" "${small[@]}" --quant fp8 --parts ar --users 1 --repeat 2
part users 80 "${suite[@]}" "${small[@]}" --quant fp8 --parts batch --users 8,16 --repeat 2
part long 40 "${suite[@]}" "${small[@]}" --quant int4 --group "$group" --parts long --repeat 2
part transformers 60 vs-transformers --preset "$preset" --prefix "$([ "$preset" = 26b-a4b ] && echo 512 || echo 64)"
wc -l "$results"
