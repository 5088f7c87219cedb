// Images as pixels.

/**
 * RGBA bytes of image i of a batch [n, C, H, W] in [-1, 1]: floor(255 (x + 1) / 2) in float32, as `to_uint8` of
 * driftgen.support.images computes it.
 */
export function toPixels(data, i, { channels, height, width }) {
  const plane = height * width;
  const start = i * channels * plane;
  const pixels = new Uint8ClampedArray(4 * plane);
  for (let p = 0; p < plane; p++) {
    for (let c = 0; c < 3; c++) {
      const value = data[start + (channels === 3 ? c : 0) * plane + p];
      pixels[4 * p + c] = Math.floor(Math.fround((Math.fround(value + 1) / 2) * 255));
    }
    pixels[4 * p + 3] = 255;
  }
  return pixels;
}

/** Columns of a grid: a square of up to four images, then five a row, or ten where there is room. */
export function columnsOf(count, narrow) {
  if (count <= 4) return Math.ceil(Math.sqrt(count));
  return count <= 20 || narrow ? 5 : 10;
}

/** Whole factor by which images are enlarged in a downloaded sheet, so that small ones are seen. */
export function zoomOf(width) {
  return Math.max(1, Math.floor(128 / width));
}
