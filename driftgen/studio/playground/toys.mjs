// Distributions in the plane: the toys of driftgen, drawings, and where q starts.
// A sampler returns { points, modes }: flat coordinates, and the mode that each point belongs to.

/** Random numbers in [0, 1) that depend on the seed alone (mulberry32). */
export function createRandom(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** Fill an array with standard normal numbers (Box-Muller). */
export function fillNormal(out, random) {
  for (let k = 0; k < out.length; k += 2) {
    const radius = Math.sqrt(-2 * Math.log(1 - random()));
    const angle = 2 * Math.PI * random();
    out[k] = radius * Math.cos(angle);
    if (k + 1 < out.length) out[k + 1] = radius * Math.sin(angle);
  }
  return out;
}

const choose = (count, random) => Math.floor(count * random());

function mixture(centers, spread) {
  return (noise, random) => {
    const mode = choose(centers.length, random);
    return [centers[mode][0] + spread * noise[0], centers[mode][1] + spread * noise[1], mode];
  };
}

const EIGHT = Array.from({ length: 8 }, (_, k) => [
  2 * Math.cos((k * Math.PI) / 4),
  2 * Math.sin((k * Math.PI) / 4),
]);

function swissRoll(noise, random) {
  const part = random();
  const angle = 1.5 * Math.PI * Math.sqrt(1 + 8 * part);
  const scale = angle / (2.25 * Math.PI);
  const third = Math.min(2, Math.floor(3 * part));
  return [scale * Math.cos(angle) + 0.05 * noise[0], scale * Math.sin(angle) + 0.05 * noise[1], third];
}

function checkerboard(_, random) {
  const column = choose(4, random);
  const half = choose(2, random);
  const row = 2 * half + (column % 2);
  return [column + random() - 2, row + random() - 2, 2 * column + half];
}

function twoMoons(noise, random) {
  const angle = Math.PI * random();
  const lower = choose(2, random);
  const sign = lower ? -1.5 : 1.5;
  return [
    sign * (Math.cos(angle) - 0.5) + 0.08 * noise[0],
    sign * (Math.sin(angle) - 0.25) + 0.08 * noise[1],
    lower,
  ];
}

/** draw(noise, random) returns [x, y, mode]. The temperature is driftgen's default for the toy. */
export const TOYS = {
  bimodal: {
    draw: mixture([[-1.5, 0], [1.5, 0]], 0.25),
    temperature: 0.85,
    modes: ["left", "right"],
    first: [-1.5, 0],
  },
  "eight-gaussians": {
    draw: mixture(EIGHT, 0.15),
    temperature: 0.5,
    modes: ["0°", "45°", "90°", "135°", "180°", "225°", "270°", "315°"],
    first: [2, 0],
  },
  "swiss-roll": { draw: swissRoll, temperature: 0.2, modes: ["inner third", "middle", "outer third"] },
  checkerboard: {
    draw: checkerboard,
    temperature: 0.5,
    modes: ["a1", "a3", "b2", "b4", "c1", "c3", "d2", "d4"],
    first: [-1.5, -1.5],
  },
  "two-moons": { draw: twoMoons, temperature: 0.35, modes: ["upper moon", "lower moon"] },
};

/** Draw n points of a toy. */
export function sampleToy(name, n, random) {
  const points = new Float64Array(2 * n);
  const modes = new Uint8Array(n);
  const noise = new Float64Array(2);
  for (let i = 0; i < n; i++) {
    const [x, y, mode] = TOYS[name].draw(fillNormal(noise, random), random);
    points[2 * i] = x;
    points[2 * i + 1] = y;
    modes[i] = mode;
  }
  return { points, modes };
}

/**
 * Draw n points uniformly along strokes, with a little noise. A stroke is a list [x0, y0, x1, y1, ...]; a single
 * point counts as a short stroke. The mode of a point is its stroke.
 */
export function sampleStrokes(strokes, n, random, spread = 0.06) {
  const dot = 0.5; // the length that a dot counts for
  const lengths = strokes.map((stroke) => {
    let length = dot;
    for (let k = 2; k < stroke.length; k += 2) {
      length += Math.hypot(stroke[k] - stroke[k - 2], stroke[k + 1] - stroke[k - 1]);
    }
    return length;
  });
  const total = lengths.reduce((a, b) => a + b, 0);
  const points = fillNormal(new Float64Array(strokes.length ? 2 * n : 0), random);
  const modes = new Uint8Array(points.length / 2);
  for (let i = 0; i < modes.length; i++) {
    let left = random() * total;
    let chosen = 0;
    while (chosen < strokes.length - 1 && left > lengths[chosen]) left -= lengths[chosen++];
    const [x, y] = pointAlong(strokes[chosen], (left / lengths[chosen]) * (lengths[chosen] - dot));
    points[2 * i] = x + spread * points[2 * i];
    points[2 * i + 1] = y + spread * points[2 * i + 1];
    modes[i] = chosen;
  }
  return { points, modes };
}

function pointAlong(stroke, distance) {
  let left = distance;
  for (let k = 2; k < stroke.length; k += 2) {
    const [dx, dy] = [stroke[k] - stroke[k - 2], stroke[k + 1] - stroke[k - 1]];
    const length = Math.hypot(dx, dy);
    if (length > 0 && left <= length) {
      return [stroke[k - 2] + (dx * left) / length, stroke[k - 1] + (dy * left) / length];
    }
    left -= length;
  }
  return stroke.slice(-2);
}

/** A temperature for drawn data: a quarter of the mean distance between points, as driftgen has for files. */
export function temperatureOf(points) {
  let sum = 0;
  let count = 0;
  for (let i = 0; i + 1 < points.length / 2; i += 2) {
    for (let j = 1; j < points.length / 2; j += 2) {
      sum += Math.hypot(points[2 * i] - points[2 * j], points[2 * i + 1] - points[2 * j + 1]);
      count++;
    }
  }
  return count ? Math.min(2, Math.max(0.05, (0.25 * sum) / count)) : 0.5;
}

/** Center and standard deviation of q at the start (driftgen's "between", "far" and "collapsed"). */
export function startOf(name, data, first) {
  const n = data.length / 2;
  const mean = [0, 0];
  for (let k = 0; k < data.length; k++) mean[k % 2] += data[k] / n;
  let square = 0;
  for (let k = 0; k < data.length; k++) square += (data[k] - mean[k % 2]) ** 2 / Math.max(1, n - 1);
  const size = Math.sqrt(square);
  if (name === "between") return { center: mean, spread: 0.15 * size };
  if (name === "far") return { center: [mean[0], mean[1] + 3 * size], spread: 0.15 * size };
  let leftmost = 0;
  for (let i = 1; i < n; i++) if (data[2 * i] < data[2 * leftmost]) leftmost = i;
  return { center: first ?? [data[2 * leftmost], data[2 * leftmost + 1]], spread: 0.08 * size };
}

/** The share of x in each mode, by the nearest data point, relative to the share of the data (1 is ideal). */
export function modeShares(x, target, count) {
  const due = new Float64Array(count);
  const found = new Float64Array(count);
  for (const mode of target.modes) due[mode] += 1 / target.modes.length;
  const { points, modes } = target;
  for (let i = 0; i < x.length / 2; i++) {
    let best = Infinity;
    let mode = 0;
    for (let j = 0; j < modes.length; j++) {
      const dx = points[2 * j] - x[2 * i];
      const dy = points[2 * j + 1] - x[2 * i + 1];
      const squared = dx * dx + dy * dy;
      if (squared < best) {
        best = squared;
        mode = modes[j];
      }
    }
    found[mode] += 2 / x.length;
  }
  return found.map((share, mode) => share / due[mode]);
}

/** Sum of the distances between all points of x and all of y. */
export function sumOfDistances(x, y) {
  let sum = 0;
  for (let i = 0; i < x.length; i += 2) {
    for (let j = 0; j < y.length; j += 2) {
      const dx = x[i] - y[j];
      const dy = x[i + 1] - y[j + 1];
      sum += Math.sqrt(dx * dx + dy * dy);
    }
  }
  return sum;
}

/** Unbiased energy distance 2 E‖x − y‖ − E‖x − x'‖ − E‖y − y'‖: about 0 if q equals p. */
export function energyDistance(x, y, withinY = sumOfDistances(y, y)) {
  const [n, m] = [x.length / 2, y.length / 2];
  const within = sumOfDistances(x, x) / (n * (n - 1)) + withinY / (m * (m - 1));
  return (2 * sumOfDistances(x, y)) / (n * m) - within;
}
