"""Paths of the authors' artifacts in tests/data."""

from pathlib import Path

ARTIFACTS = Path(__file__).parents[1] / "data" / "artifacts"
PIXEL, LATENT, MAE = (ARTIFACTS / n for n in ("ditgen_C_pixel_patch4", "ditgen_A_full", "mae_enc_b8_2222"))
