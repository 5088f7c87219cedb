// Noise from a seed, equal to driftgen/support/portable_noise.py bit for bit; that file defines it.
// Every step is IEEE arithmetic: Math.log, Math.sin and Math.cos differ between browsers.

export const NAME = "philox4x32-10 box-muller 1"; // "noise.generator" in the metadata of an exported model

const LN2 = 0.6931471805599453;
const STEP = 6.283185307179586 / 4294967296;
const POWERS = [1];
while (POWERS.length < 34) POWERS.push(2 * POWERS.at(-1));

/** High word of the 64-bit product of two words. */
function multiplyHigh(a, b) {
  const [ah, al, bh, bl] = [a >>> 16, a & 0xffff, b >>> 16, b & 0xffff];
  const middle = ah * bl + ((al * bl) >>> 16); // below 2^53
  return (ah * bh + Math.floor((middle + al * bh) / 65536)) >>> 0;
}

/** The four words of Philox4x32-10 for one counter of four words. */
export function philox(counter, seed) {
  let [a, b, c, d] = counter;
  let [key, other] = [seed >>> 0, Math.floor(seed / 4294967296)];
  for (let round = 0; round < 10; round++) {
    const [xh, xl] = [multiplyHigh(0xd2511f53, a), Math.imul(0xd2511f53, a) >>> 0];
    const [yh, yl] = [multiplyHigh(0xcd9e8d57, c), Math.imul(0xcd9e8d57, c) >>> 0];
    [a, b, c, d] = [(yh ^ b ^ key) >>> 0, yl, (xh ^ d ^ other) >>> 0, xl];
    [key, other] = [(key + 0x9e3779b9) >>> 0, (other + 0xbb67ae85) >>> 0];
  }
  return [a, b, c, d];
}

/** ln((w + 1/2) / 2^32). */
function log(w) {
  let exponent = 32 - Math.clz32(w);
  let fraction = (2 * w + 1) / POWERS[exponent];
  if (fraction > 1.4142135623730951) [fraction, exponent] = [0.5 * fraction, exponent + 1];
  const s = (fraction - 1) / (fraction + 1);
  const z = s * s;
  let series = 1 / 21;
  for (let denominator = 19; denominator > 0; denominator -= 2) series = series * z + 1 / denominator;
  return (exponent - 33) * LN2 + 2 * s * series;
}

/** Cosine and sine of 2 pi w / 2^32. */
function cosSin(w) {
  const quarter = Math.floor((w + 536870912) / 1073741824);
  const x = (w - quarter * 1073741824) * STEP;
  const z = x * x;
  let [cosine, sine] = [1, 1];
  for (let k = 8; k > 0; k--) {
    cosine = 1 - (z * cosine) / ((2 * k - 1) * (2 * k));
    sine = 1 - (z * sine) / (2 * k * (2 * k + 1));
  }
  sine = x * sine;
  return [[cosine, sine], [-sine, cosine], [-cosine, -sine], [sine, -cosine]][quarter & 3];
}

/**
 * The noise of n samples from index `first` on, for the layout `metadata.noise.tensors` of an exported model.
 * Returns {data, dims} by input: Float32Array for "normal", BigInt64Array for "integers".
 */
export function portableNoise(tensors, n, seed, first = 0) {
  if (!Number.isSafeInteger(seed) || seed < 0) throw new RangeError(`seed ${seed} must be from 0 to 2^53 - 1`);
  const result = {};
  tensors.forEach(({ input, shape, distribution, entries }, tensor) => {
    const size = shape.reduce((product, side) => product * side, 1);
    const normal = distribution === "normal";
    const data = new (normal ? Float32Array : BigInt64Array)(n * size);
    for (let i = 0; i < n; i++) {
      const sample = first + i;
      for (let start = 0; start < size; start += 4) {
        const counter = [start / 4, tensor, sample >>> 0, Math.floor(sample / 4294967296)];
        const words = philox(counter, seed);
        for (let j = 0; j < 4 && start + j < size; j++) {
          const place = i * size + start + j;
          if (normal) {
            const radius = Math.sqrt(-2 * log(words[j & 2]));
            data[place] = radius * cosSin(words[(j & 2) + 1])[j & 1];
          } else {
            data[place] = BigInt(Math.floor((words[j] * entries) / 4294967296));
          }
        }
      }
    }
    result[input] = { data, dims: [n, ...shape] };
  });
  return result;
}
