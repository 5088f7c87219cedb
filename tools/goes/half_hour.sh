#!/usr/bin/env bash
# Half an hour of one GPU: caches of the compiler, figures of the idle GPU, then trials of cifar10 and the GPU tests
# side by side.
#
#   tools/goes/half_hour.sh DATA OUT [SECONDS]
#
# It can start before DATA is complete (see unpack.py): caches and figures need the weights of EfficientNet-lite0 alone. Whatever still runs is
# interrupted SECONDS after the start. See poll.sh for what it has done so far. TRIALS and the variables of
# cifar10_trials.sh may be set.
set -uo pipefail
data=$1 end=$((SECONDS + ${3:-1650})) random=$(mktemp -d)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
jobs=()
mkdir -p "$2/caches" "$2/figures"
# A package that is missing would end every step below, one after the other.
"${PYTHON:-python3}" -c "import fastapi, pytest, torch, uvicorn, driftgen.cli" || exit 2
out=$(cd "$2" && pwd)
here=$tree/tools/goes
exec > >(tee -a "$out/half_hour.log") 2>&1
weights=$data/efficientnet-lite0-57934424.pth
device=${DEVICE:-cuda} quiet="--set output.samples_every=1000000 --set output.report_every=1000000"

figure() { # NAME FOLDER SECONDS: one measurement, into FOLDER/NAME.json
  local arguments
  case $1 in
    sampling) # results/speed-h200/sampling-stream.json, for 256, and the size of the parts of one batch
      arguments="sampling --preset ${PRESET:-B/2} --batch 64 --batch ${BATCH:-256} --mode compiled --mode graph --mode pipeline --mode stream" ;;
    recipe) arguments="step --recipe cifar10 ${STEP:-}" ;; # a row of results/speed-h200/cifar10-variants.json
    turns) arguments="step --recipe cifar10 ${STEP:-} --set encoders_per_step=1 --set batch.generated=256" ;;
    lite-*) # EfficientNet-lite0 on images of so many pixels, alone
      need "$weights"
      arguments="step --recipe cifar10 ${STEP:-} --set encoders=[{\"kind\":\"efficientnet-lite0\",\"path\":\"$weights\",\"options\":{\"size\":${1#lite-}}}]" ;;
    groups) # results/speed-h200/groups-256-256-32-many.json
      arguments="loss --generated 256 --positives 256 --unconditional 32 --width ${WIDTHS:-64,256,1024} --groups ${GROUPS_OF:-256}" ;;
  esac
  step "$2/$1" "$3" "${PYTHON:-python3}" -m driftgen bench $arguments --device "$device" --json "$out/$2/$1.json"
}
cache() { # NAME RECIPE ARGUMENT...: a short pretraining on random images
  step "caches/$1" 200 "${PYTHON:-python3}" -m driftgen pretrain "${@:2}" --out "$out/caches/$1-run" $quiet \
    --set optim.steps=20 --set mae.finetune_steps=20 ${MORE_ENCODER:-}
}

"${PYTHON:-python3}" "$here/random_sets.py" "$random"
for name in sampling recipe turns lite-64 lite-128; do figure "$name" caches 200 & jobs+=($!); done
cache labels mae-cifar10-labels --set data.path="$random/train.npz" & jobs+=($!)
wait "${jobs[@]}"
echo "caches after $SECONDS s"
for name in ${FIGURES:-sampling groups lite-64 lite-128}; do figure "$name" figures 90; done
step figures/splits 150 "${PYTHON:-python3}" "$here/split_times.py" ${SPLITS:-} --device "$device"
# Tiles for groups of 256/256/32 at width 1,024, whose time per pair is above the aim
(cd "$tree" && step figures/tiles 150 "${PYTHON:-python3}" -m benchmarks.tune tiles --generated 256 --positives 256 --unconditional 32 \
  --groups 256 --widths 1024 --json "$out/figures/tiles.json")
echo "figures after $SECONDS s"

jobs=()
(cd "$tree" && step tests-kernels 400 "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider -m cuda -n 2 --dist loadfile tests/ops tests/drift
 step tests $((end - SECONDS)) "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider -m cuda -n 2 --dist loadfile tests \
   --ignore=tests/ops --ignore=tests/drift --continue-on-collection-errors) & jobs+=($!)
need "$data/inception.pt" "$data/train.npz"
(export SAMPLES=${SAMPLES:-640000}
 step trials $((end - SECONDS)) "$here/cifar10_trials.sh" "$data" "$out/trials" ${TRIALS:-start control turns lite apart}) & jobs+=($!)
wait "${jobs[@]}"
echo "all done after $SECONDS s"
