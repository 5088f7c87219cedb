#!/usr/bin/env bash
# Train Fashion-MNIST and Tiny-ImageNet (20 classes) side by side on one GPU, and evaluate them.
#
#   tools/goes/small_sets.sh DATA OUT [MINUTES]
#
# Tiny-ImageNet is trained as a user's own images, by folder and mae-folder at size base, whose values are those of
# the recipes tiny-imagenet and mae-tiny-imagenet.
#
# DATA holds fashion.npz, fashion-test.npz, tiny.npz, tiny-test.npz and inception.pt; unpack.py
# writes the last three. Whatever the time allows
# is trained: the generators stop MINUTES after the start, and what they have then is evaluated and written to
# OUT. A second call resumes. SETS names the sets to train. An encoder in DATA/mae-NAME is taken instead of a new
# one. MORE holds further arguments of every training, such as --set compile=false.
set -uo pipefail
data=$1 out=$2 end=$((SECONDS + 60 * ${3:-18}))
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
samples=${SAMPLES:-50000}
mkdir -p "$out"

train() { # NAME RECIPE CHANNELS ARGUMENT...: the encoder, the generator, and the figures of one data set
  local name=$1 set=$2 channels=$3 left
  shift 3
  local encoder=$data/mae-$name
  if [ ! -e "$encoder/config.json" ]; then
    encoder=$out/mae-$name
    run pretrain "mae-$set" "$@" --out "$encoder" --set data.path="$data/$name.npz" ${MORE_ENCODER:-} \
      > "$encoder.log" 2>&1 || return
  fi
  left=$((end - SECONDS))
  # The schedule counts steps: a short trial says how many fit.
  local steps=${STEPS:-$(fitting_steps "$name" "$set" "$left" "$encoder" "$@")}
  echo "$name: $steps steps in $left s"
  timeout -s INT "$left" "${PYTHON:-python3}" -m driftgen train "$set" "$@" --out "$out/$name" \
    --set data.path="$data/$name.npz" --set "encoders=[{kind: mae, path: $encoder}]" \
    --set optim.steps="$steps" ${MORE:-} > "$out/$name.log" 2>&1
  run sample "$out/$name" -n 80 --guidance 1.5 --seed 0 --out "$out/$name-samples" > "$out/$name-sample.log" 2>&1
  run eval stats "$data/$name.npz" "$out/$name-stats.safetensors" --encoder "$data/inception.pt" --fast \
    --channels "$channels" > "$out/$name-stats.log" 2>&1
  run eval "$out/$name" --data "$out/$name-stats.safetensors" --encoder "$data/inception.pt" --fast \
    --guidance "${GUIDANCES:-1.0,1.5}" -n "$samples" --batch-size 500 --out "$out/$name-eval" \
    > "$out/$name-eval.log" 2>&1
  [ ! -e "$data/$name-test.npz" ] || run eval "$data/$name-test.npz" --channels "$channels" --data "$out/$name-stats.safetensors" --fast \
    --encoder "$data/inception.pt" --out "$out/$name-test-eval" > "$out/$name-test-eval.log" 2>&1
}

fitting_steps() { # NAME RECIPE LEFT ENCODER ARGUMENT...: steps that fit into the seconds that are left
  run train "$2" "${@:5}" --out "$out/trial-$1" --set data.path="$data/$1.npz" \
    --set "encoders=[{kind: mae, path: $4}]" --set optim.steps=150 \
    --set output.metrics_every=50 ${MORE:-} > "$out/trial-$1.log" 2>&1
  "${PYTHON:-python3}" - "$out/trial-$1/metrics.jsonl" "$3" <<'PY'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
rate = [row["samples_per_second"] for row in rows if "samples_per_second" in row][-1]
print(int(rate / 640 * (float(sys.argv[2]) - 120) * 0.95))
PY
}

for name in ${SETS:-fashion tiny}; do
  case $name in
    fashion) train fashion fashion-mnist 1 & ;;
    tiny) train tiny folder 3 --size base & ;;
  esac
done
wait
