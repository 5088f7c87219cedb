#!/usr/bin/env bash
# Measure, on one idle GPU, the figures of policies, serving, large groups and the cifar10 step; then run the GPU tests.
#
#   tools/goes/gpu_figures.sh OUT
#
# Each measurement is a file in OUT; move the JSON files to their places in results/ and run `make tables`. WIDTHS,
# SECONDS_EACH, DEVICE and TESTS are for trials, such as DEVICE=cpu WIDTHS=64 SECONDS_EACH=1 TESTS=tests/ops.
set -uo pipefail
out=$1
device=${DEVICE:-cuda} widths=${WIDTHS:-64,256,1024} seconds=${SECONDS_EACH:-5}
tree=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
run() { # NAME ARGUMENT...
  local name=$1 start=$SECONDS
  shift
  PYTHONPATH=$tree${PYTHONPATH:+:$PYTHONPATH} "${PYTHON:-python3}" -m driftgen "$@" --device "$device" > "$out/$name.log" 2>&1
  echo "$name: exit $?, $((SECONDS - start)) s"
}
run latency policy latency --out "$out/latency-h200.json"  # results/policy
for group in "64 64 16" "256 256 32" "640 640 0" "512 2048 64"; do
  read -r generated positives unconditional <<< "$group"
  run "loss-$generated-$positives-$unconditional" bench loss --generated "$generated" --positives "$positives" \
    --unconditional "$unconditional" --width "$widths" --json "$out/loss-$generated-$positives-$unconditional.json"
done
run step bench step --recipe cifar10 ${STEP:-} --json "$out/cifar10-step.json"
run sampling bench sampling --preset "${PRESET:-B/2}" --batch "${BATCH:-256}" --mode compiled --mode graph --mode pipeline --mode stream \
  --json "$out/sampling-stream.json"
for model in digits cifar10; do # results/serve
  run "serve-$model" bench serve "$model" --seconds "$seconds" --json "$out/serve-$model.json"
done
cd "$tree" && timeout -s INT "${TEST_SECONDS:-400}" "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider -m cuda \
  ${TESTS:-tests} > "$out/tests.log" 2>&1
tail -n 5 "$out/tests.log"
