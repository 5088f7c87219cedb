#!/usr/bin/env bash
# Half an hour of one GPU: caches of the compiler, figures of the idle GPU, then Tiny-ImageNet at size base, trials of
# cifar10 and the GPU tests side by side.
#
#   tools/goes/half_hour.sh DATA OUT [SECONDS]
#
# It can start before DATA is complete (see unpack.py): caches and figures need none of it. Whatever still runs is
# interrupted SECONDS after the start. See poll.sh for what it has done so far. STEPS, ENCODER_STEPS, TRIALS and the
# variables of the scripts beside it may be set.
set -uo pipefail
data=$1 end=$((SECONDS + ${3:-1650})) random=$(mktemp -d)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
jobs=()
mkdir -p "$2/caches" "$2/figures"
out=$(cd "$2" && pwd)
here=$tree/tools/goes
exec > >(tee -a "$out/half_hour.log") 2>&1
device=${DEVICE:-cuda} quiet="--set output.samples_every=1000000 --set output.report_every=1000000"

figure() { # NAME FOLDER SECONDS: one measurement, into FOLDER/NAME.json
  local arguments
  case $1 in
    sampling) # results/speed-h200/sampling-stream.json, for 256, and the size of the parts of one batch
      arguments="sampling --preset ${PRESET:-B/2} --batch 64 --batch ${BATCH:-256} --mode compiled --mode graph --mode pipeline --mode stream" ;;
    recipe) arguments="step --recipe cifar10 ${STEP:-}" ;; # a row of results/speed-h200/cifar10-variants.json
    turns) arguments="step --recipe cifar10 ${STEP:-} --set encoders_per_step=1 --set batch.generated=256" ;;
    tiny) arguments="step --recipe tiny-imagenet --profile ${STEP:-}" ;;
    groups) # results/speed-h200/groups-256-256-32.json, with enough groups to fill the GPU
      arguments="loss --generated 256 --positives 256 --unconditional 32 --width ${WIDTHS:-64,256,1024} --groups ${GROUPS_OF:-256}" ;;
  esac
  step "$2/$1" "$3" "${PYTHON:-python3}" -m driftgen bench $arguments --device "$device" --json "$out/$2/$1.json"
}
cache() { # NAME RECIPE ARGUMENT...: a short pretraining on random images
  step "caches/$1" 200 "${PYTHON:-python3}" -m driftgen pretrain "${@:2}" --out "$out/caches/$1-run" $quiet \
    --set optim.steps=20 --set mae.finetune_steps=20 ${MORE_ENCODER:-}
}

"${PYTHON:-python3}" "$here/random_sets.py" "$random"
for name in sampling recipe turns tiny; do figure "$name" caches 200 & jobs+=($!); done
cache mae-tiny mae-folder --size base --set data.path="$random/tiny.npz" & jobs+=($!)
cache labels mae-cifar10-labels --set data.path="$random/train.npz" & jobs+=($!)
wait "${jobs[@]}"
echo "caches after $SECONDS s"
for name in ${FIGURES:-sampling groups}; do figure "$name" figures 90; done
step figures/splits 150 "${PYTHON:-python3}" "$here/split_times.py" ${SPLITS:-} --device "$device"
# results/serve/h200-digits.json, with faults
step figures/serve 120 "${PYTHON:-python3}" -m driftgen bench serve "${SERVED:-digits}" --seconds "${SECONDS_EACH:-2}" --device "$device" \
  --json "$out/figures/serve.json"
echo "figures after $SECONDS s"

jobs=()
(cd "$tree" && step tests-kernels 400 "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider -m cuda -n 2 --dist loadfile tests/ops tests/drift
 step tests $((end - SECONDS)) "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider -m cuda -n 2 --dist loadfile tests \
   --ignore=tests/ops --ignore=tests/drift --continue-on-collection-errors) & jobs+=($!)
need "$data/tiny.npz" "$data/inception.pt" "$data/train.npz"
# Its encoder recognizes all training images from step 700 on.
encoder=${ENCODER_STEPS:-700}
(export SETS=tiny STEPS=${STEPS:-3000} MORE_ENCODER="--set optim.steps=$encoder --set mae.finetune_steps=$encoder ${MORE_ENCODER:-}"
 # It stops early enough to be evaluated.
 step tiny $((end - SECONDS)) "$here/small_sets.sh" "$data" "$out/tiny" $(((end - SECONDS - 200) / 60))) & jobs+=($!)
(unset ENCODER_STEPS
 export SAMPLES=${SAMPLES:-640000}
 step trials $((end - SECONDS)) "$here/cifar10_trials.sh" "$data" "$out/trials" ${TRIALS:-start sweep control turns lite apart}) & jobs+=($!)
wait "${jobs[@]}"
echo "all done after $SECONDS s"
