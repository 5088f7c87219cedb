// One run: q as points that the field moves, or as the output of a generator that is trained. It runs in a
// worker, so that the page stays smooth whatever a step costs.
import { DriftField, meanSquare } from "./field.mjs";
import { Adam, MLP } from "./mlp.mjs";
import { createRandom, fillNormal, sampleStrokes, sampleToy, startOf, TOYS } from "./toys.mjs";

export const COUNT = 500; // points of q and of p
const BATCH = 256; // samples and data points of a training step
const SIZES = [2, 48, 48, 48, 2]; // noise in the plane, so that it can be shown
const PLACED = 1024; // samples that place the generator at its start

/** Draw n data points of the target that the settings describe. */
export function sampleTarget(settings, n, random) {
  if (settings.target === "drawing") return sampleStrokes(settings.strokes, n, random);
  return sampleToy(settings.target, n, random);
}

/** Build the run that the settings describe. */
export function createRun(settings) {
  const random = createRandom(settings.seed);
  const target = sampleTarget(settings, COUNT, random);
  return settings.mover === "generator"
    ? new GeneratorRun(settings, target, random)
    : new PointsRun(settings, target, random);
}

class Run {
  constructor(settings, target, random) {
    this.settings = settings;
    this.target = target;
    this.random = random;
    this.field = new DriftField();
    this.steps = 0;
    this.losses = [];
  }

  /** Change sliders during a run. */
  set(settings) {
    this.settings = settings;
  }

  /** Where q starts: drawn points, or a Gaussian. Null if there is no target. */
  initial(n) {
    const { start, target, drops } = this.settings;
    if (start === "hand") return sampleStrokes(drops, n, this.random, 0.1).points;
    if (!this.target.points.length) return new Float64Array(0);
    const { center, spread } = startOf(start, this.target.points, TOYS[target]?.first);
    return fillNormal(new Float64Array(2 * n), this.random).map((z, k) => center[k % 2] + spread * z);
  }

  /** V at x. Without normalization V is a sum over all pairs, shown as a mean over them. */
  drift(x, positives) {
    const parts = this.field.compute(x, positives, this.settings);
    if (this.settings.normalization === "none") {
      const pairs = (x.length * positives.length) / 4;
      for (const part of Object.values(parts)) for (let k = 0; k < part.length; k++) part[k] /= pairs;
    }
    return parts;
  }

  /** The state that the page draws, with the arrows if it asks. The losses are those since the last report. */
  report(arrows) {
    const { x } = this;
    const parts = arrows && x.length && this.target.points.length ? this.parts() : null;
    const losses = this.losses;
    this.losses = [];
    return { x, parts, losses, steps: this.steps, noise: this.noise ?? null };
  }
}

class PointsRun extends Run {
  constructor(...all) {
    super(...all);
    this.x = this.initial(COUNT);
    this.positives = this.target.points;
  }

  parts() {
    return (this.next ??= this.drift(this.x, this.positives));
  }

  set(settings) {
    super.set(settings);
    this.next = null;
  }

  /** x ← x + step · V(x). */
  step() {
    if (!this.x.length || !this.target.points.length) return;
    const { drift } = this.parts();
    this.losses.push(meanSquare(drift));
    this.x = this.x.map((value, k) => value + this.settings.step * drift[k]);
    if (this.settings.fresh) this.positives = sampleTarget(this.settings, COUNT, this.random).points;
    this.next = null;
    this.steps++;
  }
}

class GeneratorRun extends Run {
  constructor(...all) {
    super(...all);
    this.noise = byAngle(fillNormal(new Float64Array(2 * COUNT), this.random));
    this.net = new MLP(SIZES, this.random);
    this.adam = new Adam(this.net.layers);
    const start = this.initial(PLACED);
    if (start.length) {
      const { center, spread } = gaussianOf(start);
      this.net.place(fillNormal(new Float64Array(2 * PLACED), this.random), center, spread);
    }
  }

  get x() {
    return this.net.forward(this.noise);
  }

  parts() {
    return this.drift(this.x, this.target.points);
  }

  /** One step of the plain loss ‖f(ε) − sg(f(ε) + V)‖² per coordinate, whose gradient is −2V (Algorithm 1). */
  step() {
    if (!this.target.points.length) return;
    const x = this.net.forward(fillNormal(new Float64Array(2 * BATCH), this.random));
    const { drift } = this.drift(x, sampleTarget(this.settings, BATCH, this.random).points);
    this.losses.push(meanSquare(drift));
    this.net.backward(drift.map((v) => (-2 * v) / drift.length));
    // A rate that falls with the steps lets the samples settle.
    this.adam.step(this.settings.rate / Math.sqrt(1 + this.steps / 200));
    this.steps++;
  }
}

function gaussianOf(points) {
  const { center, spread } = startOf("between", points);
  return { center, spread: spread / 0.15 / Math.SQRT2 };
}

/** Sort points by angle, so that points of one color follow each other. */
function byAngle(points) {
  const pairs = Array.from({ length: points.length / 2 }, (_, i) => points.slice(2 * i, 2 * i + 2));
  const angle = ([x, y]) => Math.atan2(y, x);
  return Float64Array.from(pairs.sort((a, b) => angle(a) - angle(b)).flatMap(([x, y]) => [x, y]));
}
