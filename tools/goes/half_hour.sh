#!/usr/bin/env bash
# Half an hour of one GPU: figures while it is idle, size base on Tiny-ImageNet alone, then the GPU tests beside trials.
#
#   tools/goes/half_hour.sh DATA OUT [SECONDS]
#
# Waits for each file of DATA (see unpack.py) when it is needed, so it can start before all have arrived. Ends SECONDS after
# its start: the trials get what is left. OLD, STEPS, ENCODER_STEPS, TRIALS and the variables of the scripts beside it
# may be set.
set -uo pipefail
data=$1 end=$((SECONDS + ${3:-1650}))
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
mkdir -p "$2"
out=$(cd "$2" && pwd)
here=$tree/tools/goes
exec > >(tee -a "$out/half_hour.log") 2>&1

WHAT=${WHAT:-sampling loss step} GROUPS_OF=${GROUPS_OF:-64/64/16 256/256/32 512/2048/64} WIDTHS=${WIDTHS:-64,256} \
  "$here/gpu_figures.sh" "$out/figures"
need "$data/tiny.npz" "$data/inception.pt"
# Its encoder recognizes all training images from step 700 on.
encoder=${ENCODER_STEPS:-700}
SETS=tiny STEPS=${STEPS:-3500} MORE_ENCODER="--set optim.steps=$encoder --set mae.finetune_steps=$encoder ${MORE_ENCODER:-}" \
  step tiny 900 "$here/small_sets.sh" "$data" "$out/tiny" 14
MORE= MORE_ENCODER=${MORE_ENCODER:-} step trials $((end - SECONDS)) "$here/cifar10_trials.sh" "$data" "$out/trials" ${TRIALS:-control turns} &
WHAT=tests TEST_SECONDS=$((end - SECONDS)) "$here/gpu_figures.sh" "$out/figures"
wait
echo "all done after $SECONDS s"
