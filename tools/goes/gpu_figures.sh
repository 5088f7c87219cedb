#!/usr/bin/env bash
# Measure, on one idle GPU, the figures of sampling, large groups, the cifar10 step, policies and serving; then run the GPU tests.
#
#   tools/goes/gpu_figures.sh OUT
#
# Each measurement is a file in OUT; move the JSON files to their places in results/ and run `make tables`. WHAT names the
# parts to measure. OLD is a tree with an earlier version of the package, whose float32 loss is measured beside this one.
# WIDTHS, GROUPS_OF, SECONDS_EACH, PRESET, BATCH, STEP, DEVICE and TESTS are for trials, such as
# DEVICE=cpu WIDTHS=64 SECONDS_EACH=1 TESTS=tests/ops.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
mkdir -p "$1"
out=$(cd "$1" && pwd)
device=${DEVICE:-cuda} widths=${WIDTHS:-64,256,1024}

bench() { # NAME ARGUMENT...: into NAME.json
  local name=$1
  shift
  step "$name" 240 "${PYTHON:-python3}" -m driftgen "$@" --device "$device" --json "$out/$name.json"
}
loss() { # NAME ARGUMENT...: at the sizes of one group
  local name=$1
  shift
  bench "loss-$generated-$positives-$unconditional$name" bench loss --generated "$generated" --positives "$positives" \
    --unconditional "$unconditional" --width "$widths" "$@"
}

for part in ${WHAT:-sampling loss step latency serve tests}; do
  case $part in
    sampling) # results/speed-h200/sampling-stream.json
      bench sampling-stream bench sampling --preset "${PRESET:-B/2}" --batch "${BATCH:-256}" --mode compiled --mode graph --mode pipeline --mode stream ;;
    loss) # results/speed-h200/groups-....json
      for group in ${GROUPS_OF:-64/64/16 256/256/32 640/640/0 512/2048/64}; do
        IFS=/ read -r generated positives unconditional <<< "$group"
        [ -n "${OLD:-}" ] || { loss ""; continue; }
        for turn in 1 2; do
          PYTHONPATH=$OLD:$PYTHONPATH loss "-old-$turn" --dtype float32
          loss "-new-$turn" --dtype float32
        done
      done ;;
    step) # rows of results/speed-h200/cifar10-variants.json
      bench step-recipe bench step --recipe cifar10 ${STEP:-}
      bench step-turns-256 bench step --recipe cifar10 ${STEP:-} --set encoders_per_step=1 --set batch.generated=256 ;;
    latency) # results/policy
      step latency 120 "${PYTHON:-python3}" -m driftgen policy latency --device "$device" --out "$out/latency-h200.json" ;;
    serve) # results/serve
      for model in digits cifar10; do bench "serve-$model" bench serve "$model" --seconds "${SECONDS_EACH:-5}"; done ;;
    tests)
      cd "$tree" && step tests "${TEST_SECONDS:-400}" "${PYTHON:-python3}" -m pytest -p no:cacheprovider -m cuda ${TESTS:-tests}
      tail -n 3 "$out/tests.log" ;;
  esac
done
