#!/usr/bin/env bash
# Train and score PushT policies side by side on one GPU: images with two networks, states with a U-Net.
#
#   tools/goes/policies.sh DATA OUT [MINUTES]
#
# DATA holds pusht_cchi_v7_lowdim.npz and its frames. All runs share the GPU; each ends with its schedule near
# MINUTES after the start, by a trial of 300 steps beside the others. Scores and latencies are written to OUT.
# A second call resumes. MORE, STEPS, CHECKPOINTS, EPISODES and DEVICE are for trials.
set -uo pipefail
data=$1 out=$2 end=$((SECONDS + 60 * ${3:-18}))
tree=$(cd "$(dirname "$0")/../.." && pwd)
export SDL_VIDEODRIVER=dummy
run() { PYTHONPATH=$tree "${PYTHON:-python3}" -m driftgen policy "$@"; }
mkdir -p "$out"

train() { # NAME RECIPE ARGUMENT...
  local name=$1 recipe=$2 steps=${STEPS:-}
  shift 2
  local arguments=("$recipe" --set data.path="$data/pusht_cchi_v7_lowdim.npz" "$@")
  if [ -z "$steps" ]; then
    run train "${arguments[@]}" --out "$out/trial-$name" --set optim.steps=300 --set output.metrics_every=100 \
      > "$out/trial-$name.log" 2>&1
    steps=$("${PYTHON:-python3}" - "$out/trial-$name/metrics.jsonl" $((end - SECONDS)) <<'PY'
import json, sys
rows = [row for row in map(json.loads, open(sys.argv[1])) if "seconds" in row]
rate = (rows[-1]["step"] - rows[0]["step"]) / (rows[-1]["seconds"] - rows[0]["seconds"])
print(int(rate * (float(sys.argv[2]) - 30) * 0.9))
PY
    )
  fi
  echo "$name: $steps steps"
  run train "${arguments[@]}" --out "$out/$name" --set optim.steps="$steps" \
    --set output.checkpoint_every=$((steps / 30 + 1)) ${MORE:-} > "$out/$name.log" 2>&1
  run eval "$out/$name" --checkpoints "${CHECKPOINTS:-10}" --episodes "${EPISODES:-50}" --out "$out/$name-eval" \
    > "$out/$name-eval.log" 2>&1
}
small=(--set generator.kind=chunk-mlp --set generator.preset=base --set batch.generated=8)
train image-mlp pusht-image "${small[@]}" --set optim.lr=1e-3 &
train image-unet pusht-image &
train state-unet pusht-state &
train state-unet-diffusion pusht-state --set method=diffusion --set batch.observations=1024 &
wait
run latency --device "${DEVICE:-cuda}" --out "$out/latency-h200.json" > "$out/latency.log" 2>&1
tail -n 3 "$out"/*-eval.log
