#!/usr/bin/env bash
# Compare changes of the recipe cifar10 on one GPU: side by side, with as many samples each, from the shipped weights, or
# from random ones (scratch...).
#
#   tools/goes/cifar10_trials.sh DATA OUT TRIAL...
#
# TRIAL is one of those below. Two encoders that learn the labels, which differ in seed and mask, are taken from
# DATA/labels-1 and DATA/labels-2, or trained first and written to OUT in 8 bits; so is a third one, from DATA/labels-3, which
# also learns to tell the samples of the shipped model from real images, for apart. DATA also holds train.npz, inception.pt
# and, for lite, efficientnet-lite0-57934424.pth. SAMPLES is the number of generated samples of a training, EVALUATED that
# of an evaluation. ENCODER_STEPS, MORE and MORE_ENCODER are for shorter runs.
set -uo pipefail
data=$1 out=$2
shift 2
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
mkdir -p "$out"

encoder() { # NAME ARGUMENT...
  local name=$1
  shift
  [ -e "$data/$name/config.json" ] && { ln -sfn "$(cd "$data/$name" && pwd)" "$out/$name-8bit"; return; }
  run pretrain mae-cifar10-labels --out "$out/$name" --set data.path="$data/train.npz" \
    --set optim.steps="${ENCODER_STEPS:=2000}" --set mae.finetune_steps="$ENCODER_STEPS" "$@" ${MORE_ENCODER:-} > "$out/$name.log" 2>&1
  run convert shards "$out/$name" "$out/$name-8bit" --dtype int8 --no-decoder >> "$out/$name.log" 2>&1
}

trial() { # NAME GENERATED EMA ARGUMENT...
  local name=$1 generated=$2 ema=$3 init=(--init cifar10)
  shift 3
  [[ $name == scratch* ]] && init=()
  run train cifar10 "${init[@]}" --out "$out/$name" --set data.path="$data/train.npz" --set seed=0 --set optim.lr=2e-3 \
    --set optim.decay_share=0.6 --set optim.steps=$((samples / 10 / generated)) --set optim.warmup=$((64 * 100 / generated)) \
    --set batch.generated="$generated" --set "ema=[$ema]" --set output.metrics_every=50 --set output.samples_every=1000000 \
    --set output.report_every=1000000 --set output.eval_every=null "$@" ${MORE:-} > "$out/$name.log" 2>&1 || return
  figures "$name" "$out/$name"
}

figures() { # NAME MODEL
  local name=$1
  run eval "$2" --data "$out/stats.safetensors" --encoder "$data/inception.pt" --fast -n "${EVALUATED:-10000}" \
    --guidance 1.0,1.5 --batch-size 500 --out "$out/$name-eval" > "$out/$name-eval.log" 2>&1
}

need "$data/train.npz" "$data/inception.pt"
encoder labels-1 --set seed=1 &
encoder labels-2 --set seed=2 --set mae.options.mask_ratio=0.5 --set mae.finetune_weight=0.1 &
if [[ " $* " == *" apart "* ]]; then
  (PYTHONPATH=$tree "${PYTHON:-python3}" "$tree/tools/goes/real_and_samples.py" "$data/train.npz" cifar10 "$out/real-and-samples.npz"
   encoder labels-3 --set seed=3 --set data.path="$out/real-and-samples.npz") > "$out/real-and-samples.log" 2>&1 &
fi
run eval stats "$data/train.npz" "$out/stats.safetensors" --encoder "$data/inception.pt" --fast > "$out/stats.log" 2>&1
wait
own="{kind: mae, path: $out/labels-1-8bit}, {kind: mae, path: $out/labels-2-8bit}"
lite="{kind: efficientnet-lite0, path: $data/efficientnet-lite0-57934424.pth, options: {size: ${SIZE:-64}}}"
samples=${SAMPLES:-1280000}
for name in "$@"; do
  case $name in
    start) figures start cifar10 & ;; # where all others begin
    control) trial control 64 0.998 --set "encoders=[$own]" & ;;
    # Each step uses one of the two encoders: 20,000 samples a second.
    turns) trial turns 256 0.992 --set "encoders=[$own]" --set encoders_per_step=1 & ;;
    turns-fast) trial turns-fast 256 0.992 --set "encoders=[$own]" --set encoders_per_step=1 --set optim.lr=4e-3 & ;;
    # The same from random weights, where FID falls fast and few samples tell.
    scratch) trial scratch 64 0.998 --set "encoders=[$own]" --set optim.lr=3e-3 & ;;
    scratch-turns) trial scratch-turns 256 0.992 --set "encoders=[$own]" --set encoders_per_step=1 --set optim.lr=3e-3 & ;;
    scratch-turns-fast) trial scratch-turns-fast 256 0.992 --set "encoders=[$own]" --set encoders_per_step=1 --set optim.lr=6e-3 & ;;
    large) trial large 256 0.992 --set "encoders=[$own]" & ;;
    apart) trial apart 64 0.998 --set "encoders=[$own, {kind: mae, path: $out/labels-3-8bit}]" & ;;
    # With ImageNet weights: a figure to be labeled so.
    lite) trial lite 64 0.998 --set "encoders=[$own, $lite]" & ;;
    *) echo "no trial $name: choose from start, control, turns, turns-fast, scratch, scratch-turns, scratch-turns-fast, large, apart, lite" >&2; exit 2 ;;
  esac
done
wait
grep -h '"FID"' "$out"/*-eval/evaluation.json
