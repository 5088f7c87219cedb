#!/usr/bin/env bash
# Go on with the CIFAR-10 model that ships, on one GPU, with a pool of encoders of two kinds.
#
#   tools/goes/cifar10_pool.sh DATA OUT [MINUTES]
#
# DATA holds train.npz, inception.pt and, where they exist, encoders of an earlier go; the others are trained.
# "coarse" encoders see patches of 2x2 pixels, "fine" ones every pixel; there are two of each, which differ in
# their seed, and each step draws one of each kind. The generator starts from the shipped weights, or those in
# DATA/init, and ends with its schedule near MINUTES after the start. Its weights in 8 bits, their figures and
# the encoders in 8 bits are written to OUT. STEPS, MORE and MORE_ENCODER are for trials.
set -uo pipefail
data=$1 out=$2 end=$((SECONDS + 60 * ${3:-24}))
tree=$(cd "$(dirname "$0")/../.." && pwd)
run() { PYTHONPATH=$tree "${PYTHON:-python3}" -m driftgen "$@"; }
mkdir -p "$out"

encoder() { # NAME SEED ARGUMENT...
  local name=$1 seed=$2 steps=${ENCODER_STEPS:-3000}
  shift 2
  [ -e "$data/$name/config.json" ] && { ln -sfn "$(cd "$data/$name" && pwd)" "$out/$name-8bit"; return; }
  run pretrain mae-cifar10-labels --out "$out/$name" --set data.path="$data/train.npz" --set seed="$seed" \
    --set optim.steps="$steps" --set mae.finetune_steps="$steps" "$@" ${MORE_ENCODER:-} > "$out/$name.log" 2>&1
  run convert shards "$out/$name" "$out/$name-8bit" --dtype int8 --no-decoder >> "$out/$name.log" 2>&1
}
fine=(--set mae.options.patchify=1 --set mae.options.base_channels=64)
encoder coarse-1 1 &
encoder coarse-2 2 &
encoder fine-1 3 "${fine[@]}" &
encoder fine-2 4 "${fine[@]}" &
(run eval stats "$data/train.npz" "$out/stats.safetensors" --encoder "$data/inception.pt" --fast > "$out/stats.log" 2>&1)
wait

pair() { echo "{kind: mae, path: $out/$1-1-8bit, pool: [$out/$1-2-8bit]}"; }
init=cifar10
[ -e "$data/init" ] && init=$data/init
arguments=(cifar10 --init "$init" --set data.path="$data/train.npz" --set "encoders=[$(pair coarse), $(pair fine)]"
  --set optim.lr=2e-3 --set optim.warmup=100 --set optim.decay_share=0.6 --set output.eval_every="${EVERY:-1500}"
  --set output.sample_guidance=1.5 --set output.eval_encoder="$data/inception.pt"
  --set output.eval_reference="$out/stats.safetensors" --set output.eval_samples=10000)
if [ -z "${STEPS:-}" ]; then # the schedule counts steps: a trial says how many fit
  run train "${arguments[@]}" --out "$out/trial" --set optim.steps=200 --set output.metrics_every=50 \
    --set output.eval_every=null ${MORE:-} > "$out/trial.log" 2>&1
  STEPS=$("${PYTHON:-python3}" - "$out/trial/metrics.jsonl" $((end - SECONDS)) <<'PY'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
rate = [row["samples_per_second"] for row in rows if "samples_per_second" in row][-1]
print(int(rate / 640 * (float(sys.argv[2]) - 60) * 0.9))
PY
  )
fi
echo "$STEPS steps in $((end - SECONDS)) s"
timeout -s INT $((end - SECONDS)) env PYTHONPATH="$tree" "${PYTHON:-python3}" -m driftgen train "${arguments[@]}" \
  --out "$out/run" --set optim.steps="$STEPS" ${MORE:-} > "$out/run.log" 2>&1
run convert shards "$out/run" "$out/int8" --dtype int8 > "$out/convert.log" 2>&1
run eval "$out/int8" --data "$out/stats.safetensors" --encoder "$data/inception.pt" --fast -n "${SAMPLES:-50000}" \
  --guidance "${GUIDANCES:-1.0,1.3,1.5,1.8}" --batch-size 500 --out "$out/eval" > "$out/eval.log" 2>&1
