// The settings of a run, and their form in a link.
import { KERNELS, NORMALIZATIONS } from "./field.mjs";
import { TOYS } from "./toys.mjs";

export const RANGES = {
  temperature: [0.05, 2],
  step: [0.05, 2],
  rate: [0.0003, 0.02],
  attraction: [0, 2],
  repulsion: [0, 2],
};

export const DEFAULTS = {
  mover: "points",
  target: "bimodal",
  start: "between",
  kernel: "laplace",
  normalization: "both",
  temperature: TOYS.bimodal.temperature,
  step: 1,
  rate: 0.004,
  attraction: 1,
  repulsion: 1,
  fresh: false,
  seed: 0,
  strokes: [],
  drops: [],
};

const CHOICES = {
  mover: ["points", "generator"],
  target: [...Object.keys(TOYS), "drawing"],
  start: ["between", "far", "collapsed", "hand"],
  kernel: Object.keys(KERNELS),
  normalization: NORMALIZATIONS,
};

const UNITS = 50; // strokes are stored in units of 1/50
const MOST_NUMBERS = 4000; // of all strokes together: a link stays below 32 kB
const MOST_STROKES = 32;

/** The settings as the part of a link behind #, without those that have their default. */
export function toHash(settings) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(settings)) {
    if (Array.isArray(value)) {
      if (value.length) words.set(name, value.map(strokeToText).join("_"));
    } else if (value !== DEFAULTS[name] || name === "temperature") {
      words.set(name, typeof value === "number" ? String(+value.toPrecision(4)) : String(value));
    }
  }
  return words.toString();
}

/** Read settings from a link. Values that make no sense are left at their defaults. */
export function fromHash(hash) {
  const words = new URLSearchParams(hash.replace(/^#/, ""));
  const settings = { ...DEFAULTS };
  for (const [name, choices] of Object.entries(CHOICES)) {
    if (choices.includes(words.get(name))) settings[name] = words.get(name);
  }
  settings.temperature = TOYS[settings.target]?.temperature ?? DEFAULTS.temperature;
  for (const [name, [low, high]] of Object.entries(RANGES)) {
    const value = Number.parseFloat(words.get(name));
    if (Number.isFinite(value)) settings[name] = Math.min(high, Math.max(low, value));
  }
  const seed = Number.parseInt(words.get("seed"), 10);
  if (seed >= 0 && seed < 2 ** 32) settings.seed = seed;
  settings.fresh = words.get("fresh") === "true";
  settings.strokes = strokesFromText(words.get("strokes"));
  settings.drops = strokesFromText(words.get("drops"));
  return settings;
}

const strokeToText = (stroke) => stroke.map((value) => Math.round(value * UNITS)).join(".");

function strokesFromText(text) {
  const strokes = [];
  let left = MOST_NUMBERS;
  for (const part of (text ?? "").split("_").slice(0, MOST_STROKES)) {
    const numbers = part.split(".").map((word) => Number.parseInt(word, 10) / UNITS);
    const usable = numbers.every((value) => Math.abs(value) <= 100) && numbers.length % 2 === 0;
    if (usable && numbers.length <= left) strokes.push(numbers);
    left -= numbers.length;
  }
  return strokes;
}
