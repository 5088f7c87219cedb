#!/usr/bin/env bash
# Train and score PushT policies on one GPU: images with two networks, then states with a U-Net.
#
#   tools/goes/policies.sh DATA OUT
#
# DATA holds pusht_cchi_v7_lowdim.npz and its frames. Two trainings share the GPU; each is scored beside the next.
# Scores are written to OUT. A second call resumes. MORE, STEPS, CHECKPOINTS and EPISODES are for trials.
set -uo pipefail
data=$1 out=$2
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
export SDL_VIDEODRIVER=dummy
mkdir -p "$out"

train() { # NAME STEPS RECIPE ARGUMENT...
  local name=$1 steps=${STEPS:-$2} recipe=$3
  shift 3
  run policy train "$recipe" --set data.path="$data/pusht_cchi_v7_lowdim.npz" "$@" --out "$out/$name" \
    --set optim.steps="$steps" --set output.checkpoint_every=$((steps / 30 + 1)) ${MORE:-} > "$out/$name.log" 2>&1
  run policy eval "$out/$name" --checkpoints "${CHECKPOINTS:-10}" --episodes "${EPISODES:-50}" --out "$out/$name-eval" \
    > "$out/$name-eval.log" 2>&1 &
}
small=(--set generator.kind=chunk-mlp --set generator.preset=base --set batch.observations=256
  --set batch.generated=8 --set optim.lr=1e-3 --set optim.clip=1.0 --set optim.weight_decay=0.01)
(
  train image-mlp 7000 pusht-image "${small[@]}"
  train state-unet 4000 pusht-state
  wait
) &
(
  train image-unet 7000 pusht-image
  train state-unet-diffusion 5000 pusht-state --set method=diffusion --set batch.observations=1024
  wait
) &
wait
tail -n 3 "$out"/*-eval.log
