#!/usr/bin/env bash
# Train the CIFAR-10 model that ships further, on one GPU, with other encoders.
#
#   tools/goes/cifar10_encoders.sh DATA OUT [MINUTES]
#
# KINDS names the encoders, "coarse fine" by default:
#   coarse, fine  two masked autoencoders each, which differ in their seed and see patches of 2x2 pixels, or every
#                 pixel; each step draws one of each kind, or with PER_STEP=1 one of them all. DATA may hold them
#                 from an earlier go; otherwise they are trained first.
#   pretrained    EfficientNet-lite0 with ImageNet weights, DATA/efficientnet-lite0-57934424.pth: a figure to be
#                 labeled so.
# ENTRIES names them as recipes do instead, with the paths of encoders that are there.
#
# DATA also holds train.npz and inception.pt. The generator starts from the shipped weights, from those in DATA/init,
# or, with INIT=none, from random weights with the learning rate of the recipe. It ends with its schedule near MINUTES
# after the start. Its weights in 8 bits, their figures and the encoders in 8 bits are written to OUT. GENERATED is
# the number of samples per class. STEPS, MORE and MORE_ENCODER are for trials.
set -uo pipefail
data=$1 out=$2 end=$((SECONDS + 60 * ${3:-24}))
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
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
entries=${ENTRIES:-}
[ -n "$entries" ] || : "${KINDS:=coarse fine}"
for kind in ${KINDS:-}; do
  case $kind in
    coarse) encoder coarse-1 1 & encoder coarse-2 2 & ;;
    fine) encoder fine-1 3 "${fine[@]}" & encoder fine-2 4 "${fine[@]}" & ;;
  esac
  entry="{kind: mae, path: $out/$kind-1-8bit, pool: [$out/$kind-2-8bit]}"
  if [ "$kind" = pretrained ]; then
    entry="{kind: efficientnet-lite0, path: $data/efficientnet-lite0-57934424.pth, options: {size: ${SIZE:-128}}}"
  fi
  entries+="${entries:+, }$entry"
done
(run eval stats "$data/train.npz" "$out/stats.safetensors" --encoder "$data/inception.pt" --fast > "$out/stats.log" 2>&1)
wait

init=cifar10
[ -e "$data/init" ] && init=$data/init
init=${INIT:-$init}
start=(--init "$init" --set optim.lr=2e-3 --set optim.warmup=100 --set optim.decay_share=0.6)
[ "$init" = none ] && start=()
arguments=(cifar10 "${start[@]}" --set data.path="$data/train.npz" --set "encoders=[$entries]"
  --set output.eval_every="${EVERY:-1500}"
  --set output.sample_guidance=1.5 --set output.eval_encoder="$data/inception.pt"
  --set output.eval_reference="$out/stats.safetensors" --set output.eval_samples=10000
  --set batch.generated="${GENERATED:=64}" --set encoders_per_step="${PER_STEP:-null}")
if [ -z "${STEPS:-}" ]; then # the schedule counts steps: a trial says how many fit
  run train "${arguments[@]}" --out "$out/trial" --set optim.steps=150 --set output.metrics_every=50 \
    --set output.eval_every=null ${MORE:-} > "$out/trial.log" 2>&1
  STEPS=$("${PYTHON:-python3}" - "$out/trial/metrics.jsonl" $((end - SECONDS)) "$GENERATED" <<'PY'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
rate = [row["samples_per_second"] for row in rows if "samples_per_second" in row][-1]
print(int(rate / (10 * int(sys.argv[3])) * (float(sys.argv[2]) - 60) * 0.9))
PY
  )
fi
echo "$STEPS steps in $((end - SECONDS)) s"
timeout -s INT $((end - SECONDS)) "${PYTHON:-python3}" -m driftgen train "${arguments[@]}" \
  --out "$out/run" --set optim.steps="$STEPS" ${MORE:-} > "$out/run.log" 2>&1
run convert shards "$out/run" "$out/int8" --dtype int8 > "$out/convert.log" 2>&1
run eval "$out/int8" --data "$out/stats.safetensors" --encoder "$data/inception.pt" --fast -n "${SAMPLES:-50000}" \
  --guidance "${GUIDANCES:-1.0,1.3,1.5,1.8}" --batch-size 500 --out "$out/eval" > "$out/eval.log" 2>&1
