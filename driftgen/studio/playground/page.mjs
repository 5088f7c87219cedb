// The page: asks the worker for steps, draws what comes back, and reacts to controls, pointer and tour.
import { element, listenToControls, modeNames, shareSettings, showSettings, showShares } from "./controls.mjs";
import {
  createScale, drawCross, drawForces, drawLoss, drawNoise, drawPlane, drawStrokes, fitCanvas, fitView, readColors,
} from "./drawing.mjs";
import { COUNT, sampleTarget } from "./engine.mjs";
import { listenToPlane } from "./pens.mjs";
import { DEFAULTS, fromHash } from "./settings.mjs";
import { TOUR } from "./tour.mjs";
import { createRandom, energyDistance, modeShares, startOf, sumOfDistances, temperatureOf, TOYS } from "./toys.mjs";

const MOST_LOSSES = 1200; // beyond, every second one is dropped
const LATE = 14; // milliseconds after which the next step is asked for at once
const RUN_SETTINGS = ["mover", "target", "start", "seed", "strokes", "drops"]; // a change restarts the run

const state = {
  settings: fromHash(location.hash),
  run: 0,
  playing: false,
  pausing: false, // until the answer to the last step
  waiting: 0,
  dirty: true,
  target: null,
  report: { x: new Float64Array(0), parts: null, noise: null, steps: 0 },
  losses: [],
  every: 1, // steps per entry of losses
  seen: 0, // steps of this run
  view: { x: 0, y: 0, half: 3 },
  looking: null,
  pen: "look",
  stop: -1, // of the tour
  busy: 0, // milliseconds of script since the last frame
  frames: [],
  shownAt: 0,
};

const sources = ["engine-source", "worker-source"].map((id) => element(id).textContent);
const worker = new Worker(URL.createObjectURL(new Blob(sources, { type: "text/javascript" })));
let colors = readColors();

function ask(message) {
  state.waiting++;
  state.askedAt = performance.now();
  worker.postMessage({ ...message, run: state.run, arrows: state.looking !== null });
}

function askForStep() {
  if (!state.playing || state.waiting) return;
  ask({ type: "step", steps: 1, fill: state.settings.mover === "generator" });
}

const timed = (work) => (...inputs) => {
  const begin = performance.now();
  work(...inputs);
  state.busy += performance.now() - begin;
};

worker.onmessage = timed(({ data }) => {
  state.waiting--;
  if (data.run !== state.run) return;
  state.report = data;
  for (const loss of data.losses) addLoss(loss);
  state.stepTime = data.losses.length ? data.milliseconds / data.losses.length : state.stepTime;
  state.dirty = true;
  if (state.pausing) sayPaused();
  // A step that took about a frame would otherwise wait for the next one. A faster step waits: 60 steps a second.
  if (performance.now() - state.askedAt > LATE) askForStep();
});
worker.onerror = (event) => {
  state.waiting = Math.max(0, state.waiting - 1); // the request that failed has no other answer
  setPlaying(false);
  say(`The computation failed: ${event.message}`);
};

function addLoss(loss) {
  if (state.seen++ % state.every === 0) state.losses.push(loss);
  if (state.losses.length > MOST_LOSSES) {
    state.losses = state.losses.filter((_, k) => k % 2 === 0);
    state.every *= 2;
  }
}

function say(text) {
  if (element("status").textContent !== text) element("status").textContent = text;
}

/** Begin again with the present settings. */
function restart() {
  const { settings } = state;
  state.run++;
  state.target = sampleTarget(settings, COUNT, createRandom(settings.seed));
  Object.assign(state, { losses: [], every: 1, seen: 0, stepTime: undefined, withinTarget: undefined });
  state.report = { x: new Float64Array(0), parts: null, noise: null, steps: 0 };
  const { points } = state.target;
  const far = settings.start === "far" && points.length ? startOf("far", points).center : [];
  const drawn = [...settings.strokes, ...settings.drops].flat();
  state.view = settings.target === "drawing" || settings.start === "hand"
    ? fitView(points, drawn, far, [-3, -3, 3, 3])
    : fitView(points, far);
  ask({ type: "start", settings });
  say("");
  showHint();
  state.dirty = true;
}

function sayPaused() {
  state.pausing = false;
  if (state.report.steps) say(`Paused after ${state.report.steps} steps.`);
}

function setPlaying(playing) {
  state.playing = playing;
  element("play").textContent = playing ? "Pause" : "Play";
  state.pausing = !playing && state.waiting > 0; // a step under way still counts
  if (playing) choosePen("look");
  else if (!state.pausing) sayPaused();
  state.dirty = true;
}

function showHint() {
  const { settings, pen } = state;
  const missing = settings.target === "drawing" && !settings.strokes.length
    ? "Draw the target with the pointer: each stroke is a mode."
    : settings.start === "hand" && !settings.drops.length
      ? "Drop points where q should start: click or drag."
      : "";
  element("hint").textContent = missing;
  element("hint").hidden = !missing;
  const penned = settings.target === "drawing" || settings.start === "hand";
  element("pens").hidden = !penned;
  for (const input of element("pens").querySelectorAll("input")) {
    input.checked = input.value === pen;
    input.disabled = (input.value === "strokes" && settings.target !== "drawing")
      || (input.value === "drops" && settings.start !== "hand");
    input.parentElement.hidden = input.disabled;
  }
  element("clear").hidden = pen === "look";
  element("clear").textContent = pen === "drops" ? "Clear q" : "Clear p";
  element("plane").classList.toggle("pen", pen !== "look");
}

function choosePen(pen) {
  state.pen = pen;
  state.looking = null;
  showHint();
}

/** Change settings; restart if the run depends on them. */
function change(changes) {
  const settings = { ...state.settings, ...changes };
  if ("target" in changes && !("temperature" in changes)) {
    settings.temperature = TOYS[changes.target]?.temperature
      ?? temperatureOf(sampleTarget(settings, COUNT, createRandom(settings.seed)).points);
  }
  state.settings = settings;
  showSettings(settings);
  if ("target" in changes || "start" in changes) {
    if (changes.target === "drawing") choosePen("strokes");
    else if (changes.start === "hand") choosePen("drops");
    else if (settings.target !== "drawing" && settings.start !== "hand") choosePen("look");
  }
  if (RUN_SETTINGS.some((name) => name in changes)) restart();
  else ask({ type: "set", settings });
}

listenToControls((name, value) => change({ [name]: value }));
element("play").addEventListener("click", () => setPlaying(!state.playing));
element("once").addEventListener("click", () => {
  if (state.playing) setPlaying(false);
  state.pausing = false;
  say("");
  ask({ type: "step", steps: 1 });
});
element("restart").addEventListener("click", restart);
element("clear").addEventListener("click", () => change({ [state.pen]: [] }));
element("share").addEventListener("click", () => shareSettings(state.settings));
for (const input of element("pens").querySelectorAll("input")) {
  input.addEventListener("change", () => choosePen(input.value));
}
addEventListener("hashchange", () => {
  state.settings = fromHash(location.hash);
  showSettings(state.settings);
  restart();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colors = readColors();
  state.dirty = true;
});
new ResizeObserver(() => {
  state.dirty = true;
}).observe(element("plane"));

let growing = null; // the stroke that is being drawn, with its pen

const plane = listenToPlane(element("plane"), {
  pen: () => state.pen,
  view: () => state.view,
  look: (place) => {
    if (state.looking || place) state.dirty = true;
    state.looking = place;
  },
  moved: () => {
    state.dirty = true;
  },
  draw: (pen, stroke) => {
    growing = { pen, stroke };
    state.dirty = true;
  },
  done: (pen) => {
    const strokes = [...state.settings[pen], growing.stroke];
    growing = null;
    const first = pen === "strokes" ? { target: "drawing" } : {}; // sets the temperature
    const view = state.view;
    change({ [pen]: strokes, ...first });
    state.view = view; // the plane stays where it is under the pen
  },
});

function visit(stop) {
  state.stop = stop;
  element("tour").hidden = stop < 0;
  document.body.classList.toggle("touring", stop >= 0);
  if (stop < 0) {
    element("start-tour").focus();
    return;
  }
  const { title, text, settings, probe, play } = TOUR[stop];
  element("tour-count").textContent = `${stop + 1} of ${TOUR.length}`;
  element("tour-title").textContent = title;
  element("tour-text").textContent = text;
  element("tour-back").disabled = stop === 0;
  element("tour-next").textContent = stop === TOUR.length - 1 ? "Done" : "Next";
  change({ ...DEFAULTS, ...settings, temperature: TOYS[settings.target].temperature });
  choosePen("look");
  state.looking = probe ?? null;
  setPlaying(Boolean(play));
}
element("start-tour").addEventListener("click", () => {
  visit(0);
  element("tour-next").focus();
});
element("tour-back").addEventListener("click", () => visit(state.stop - 1));
element("tour-next").addEventListener("click", () => visit(state.stop === TOUR.length - 1 ? -1 : state.stop + 1));
element("tour-close").addEventListener("click", () => visit(-1));

function nearest(x, [px, py]) {
  let best = 0;
  let least = Infinity;
  for (let i = 0; i < x.length / 2; i++) {
    const squared = (x[2 * i] - px) ** 2 + (x[2 * i + 1] - py) ** 2;
    if (squared < least) [best, least] = [i, squared];
  }
  return best;
}

function draw() {
  const { report, settings } = state;
  const { context, width, height } = fitCanvas(element("plane"));
  const scale = createScale(state.view, width, height);
  drawPlane(context, { ...report, target: state.target.points }, scale, colors);
  if (growing) {
    drawStrokes(context, [growing.stroke], scale, growing.pen === "strokes" ? colors.data : colors.sample);
  }
  if (report.noise) drawNoise(context, report.noise, width, colors);
  if (state.looking && report.parts && report.x.length) {
    const i = nearest(report.x, state.looking);
    drawForces(context, report, i, scale, colors, Math.min(width, height));
  }
  if (plane.cross()) drawCross(context, scale.toScreen(...plane.cross()), colors.text);
  drawLoss(fitCanvas(element("loss")), state.losses, state.every, colors);
  const loss = state.losses.at(-1);
  element("loss-now").textContent = loss === undefined
    ? "no steps yet"
    : `step ${report.steps}, loss ${loss.toExponential(2)}`;
  const now = performance.now();
  if (now - state.shownAt > 250 || !state.playing) {
    state.shownAt = now;
    const names = modeNames(settings);
    const { x } = report;
    const { points } = state.target;
    showShares(names, x.length && points.length ? modeShares(x, state.target, names.length) : []);
    state.withinTarget ??= sumOfDistances(points, points);
    element("distance").textContent = x.length && points.length
      ? Math.max(0, energyDistance(x, points, state.withinTarget)).toFixed(4)
      : "–";
    showOutside(x, scale.toPlane(width, 0));
    showSpeed();
  }
}

/** Say how many samples have left the picture, in steps of 5%: more repulsion than attraction drives them out. */
function showOutside(x, [right, top]) {
  let count = 0;
  for (let k = 0; k < x.length; k += 2) {
    const inside = Math.abs(x[k] - state.view.x) < right - state.view.x
      && Math.abs(x[k + 1] - state.view.y) < top - state.view.y;
    if (!inside) count++;
  }
  const percent = Math.ceil((40 * count) / x.length) * 5;
  if (state.playing) say(percent ? `Up to ${percent}% of the samples are outside the picture.` : "");
}

const middle = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];

function showSpeed() {
  if (state.frames.length < 10 || state.stepTime === undefined) return;
  const script = middle(state.frames).toFixed(1);
  element("speed").textContent =
    `${script} ms of script per frame; ${state.stepTime.toFixed(1)} ms per step, in a worker.`;
}

function frame() {
  const begin = performance.now();
  askForStep();
  if (state.looking && !state.report.parts && state.waiting === 0) ask({ type: "look" });
  if (state.dirty) {
    state.dirty = false;
    draw();
    state.frames.push(performance.now() - begin + state.busy);
    if (state.frames.length > 600) state.frames.shift();
  }
  state.busy = 0;
  requestAnimationFrame(frame);
}

showSettings(state.settings);
restart();
requestAnimationFrame(frame);
globalThis.playground = state; // for tests and measurements
