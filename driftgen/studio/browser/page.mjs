// The page: asks the worker for images and frames, and shows them.
import { element, readSeed, showClasses, showModel } from "./controls.mjs";
import { columnsOf, zoomOf } from "./pixels.mjs";

const SLOW = 100; // milliseconds per image from which on fewer images are asked for at first
const MOST_THREADS = 4; // of half the cores: more are rarely faster
const PACE = 0.5; // noises passed per second of a walk
const NARROW = matchMedia("(max-width: 760px)");
// A function with one SIMD instruction, which the runtime is made of.
const SIMD = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11];

const state = {
  model: null,
  ready: false,
  settings: { chosen: null, alpha: 1, seed: 0, number: 20 }, // chosen null: every class in turn
  request: 0, // number of the newest request for images
  images: [], // pixels of the newest images, in order
  values: [], // what the network gave, batch by batch
  report: null, // of the last batch: calls and milliseconds
  failed: null, // the kind of request whose failure is shown
  walk: { place: 0, playing: false, waiting: false, dirty: false, frames: [], last: null, at: 0 },
};

/** Show a sentence about what went wrong; without a model nothing else works. */
function fail(text, during = null) {
  state.failed = during;
  element("trouble").textContent = text;
  element("trouble").hidden = false;
  element("loading").hidden = true;
  document.querySelector("main").hidden = !state.ready;
  setPlaying(false);
  document.querySelector(".stage").ariaBusy = "false";
}

/** Hide the sentence about a failed request after a success of its kind. */
function recover(kind) {
  if (state.failed !== kind) return;
  state.failed = null;
  element("trouble").hidden = true;
}

function say(text) {
  if (element("status").textContent !== text) element("status").textContent = text;
}

const show = (milliseconds) => (milliseconds < 10 ? milliseconds.toFixed(1) : milliseconds.toFixed(0));

function draw(canvas, pixels) {
  const { width, height } = state.model;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  canvas.classList.toggle("small", width < 128);
  canvas.getContext("2d").putImageData(new ImageData(pixels, width, height), 0, 0);
}

// ---- images ----

/** One canvas per image. Those that are there stay until their image arrives. */
function layOut() {
  const grid = element("grid");
  const { number } = state.settings;
  while (grid.children.length > number) grid.lastChild.remove();
  while (grid.children.length < number) {
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { role: "img", width: 1, height: 1 });
    grid.append(canvas);
  }
  const columns = columnsOf(number, NARROW.matches);
  grid.style.setProperty("--columns", columns);
  grid.style.setProperty("--rows", Math.ceil(number / columns));
}

function generate() {
  if (!state.ready) return;
  layOut();
  for (const canvas of element("grid").children) canvas.classList.add("old");
  Object.assign(state, { images: [], values: [], report: null });
  document.querySelector(".stage").ariaBusy = "true";
  worker.postMessage({ type: "generate", id: ++state.request, ...state.settings });
  element("place").max = walkLength();
  state.walk.dirty = true;
}

function receiveImages({ id, number, first, labels, pixels, values, spent, calls }) {
  if (id !== state.request) return;
  recover("generate");
  pixels.forEach((image, k) => {
    const canvas = element("grid").children[first + k];
    draw(canvas, image);
    canvas.classList.remove("old");
    canvas.ariaLabel = `Image ${first + k + 1}: ${state.model.classes[labels[k]]}`;
    state.images.push(image);
  });
  state.values.push(values);
  state.report = { calls, milliseconds: spent };
  const done = state.images.length;
  if (done < number) {
    say(`${done} of ${number} images, ${show(spent / done)} ms each`);
    return;
  }
  document.querySelector(".stage").ariaBusy = "false";
  element("download").disabled = false;
  const passes = calls === 1 ? "one network call" : `${calls} network calls`;
  say(
    number === 1
      ? `1 image, one network call: ${show(spent)} ms.`
      : `${number} images, ${passes}: ${show(spent)} ms, ${show(spent / number)} ms each.`,
  );
}

/** Choose settings, show them, and generate. */
function change(changes) {
  Object.assign(state.settings, changes);
  showSettings();
  generate();
}

function showSettings() {
  const { chosen, alpha, seed, number } = state.settings;
  showClasses(chosen);
  element("guidance-now").textContent = alpha === 1 ? "1 (none)" : alpha.toFixed(2);
  element("guidance").ariaValueText = element("guidance-now").textContent;
  if (document.activeElement !== element("guidance")) element("guidance").value = alpha;
  if (document.activeElement !== element("seed")) element("seed").value = seed;
  for (const input of element("numbers").querySelectorAll("input")) input.checked = Number(input.value) === number;
}

/** All images on one sheet, small ones enlarged by a whole factor. */
async function download() {
  const { model, settings, images } = state;
  const columns = columnsOf(settings.number, false);
  const zoom = zoomOf(model.width);
  const gap = 2 * zoom;
  const [width, height] = [model.width * zoom, model.height * zoom];
  const sheet = document.createElement("canvas");
  sheet.width = columns * (width + gap) - gap;
  sheet.height = Math.ceil(settings.number / columns) * (height + gap) - gap;
  const context = sheet.getContext("2d");
  Object.assign(context, { imageSmoothingEnabled: false, fillStyle: "white" });
  context.fillRect(0, 0, sheet.width, sheet.height);
  images.forEach((_, i) => {
    const [x, y] = [(i % columns) * (width + gap), Math.floor(i / columns) * (height + gap)];
    context.drawImage(element("grid").children[i], x, y, width, height);
  });
  const blob = await new Promise((resolve) => sheet.toBlob(resolve));
  const link = document.createElement("a");
  const what = settings.chosen === null ? "" : `-${model.classes[settings.chosen]}`;
  link.href = URL.createObjectURL(blob);
  link.download = `${model.name}${what}-seed-${settings.seed}.png`.replace(/[^\w.-]+/g, "-");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// ---- the walk ----

const walkLength = () => Math.max(2, state.settings.number); // between at least two noises

function askForFrame() {
  const { walk } = state;
  if (!state.ready || walk.waiting) return;
  Object.assign(walk, { waiting: true, dirty: false });
  worker.postMessage({ type: "frame", ...state.settings, number: walkLength(), place: walk.place });
}

function receiveFrame({ place, left, right, way, label, pixels, milliseconds }) {
  const { walk } = state;
  Object.assign(walk, { waiting: false, last: { place, label, pixels, milliseconds } });
  recover("frame");
  draw(element("walk"), pixels);
  const name = state.model.classes[label];
  element("walk").ariaLabel = `Between image ${left + 1} and image ${right + 1}: ${name}`;
  const where = `image ${left + 1} → ${right + 1}, ${Math.round(100 * way)}%`;
  element("place-now").textContent = where;
  element("place").ariaValueText = where;
  if (document.activeElement !== element("place") || walk.playing) element("place").value = place;
  const now = performance.now();
  walk.frames = [...walk.frames.filter((time) => now - time < 1000), now];
  const rate = walk.playing && walk.frames.length > 1 ? `${walk.frames.length} frames/s, ` : "";
  if (now - walk.at > 250 || !walk.playing) {
    walk.at = now;
    element("rate").textContent = `${rate}${show(milliseconds)} ms${rate ? "" : " per frame"}`;
  }
}

function setPlaying(playing) {
  state.walk.playing = playing;
  Object.assign(state.walk, { frames: [], before: undefined });
  element("play").textContent = playing ? "Pause" : "Play";
}

function onFrame(now) {
  const { walk } = state;
  if (walk.playing) {
    walk.place = (walk.place + (PACE * Math.min(500, now - (walk.before ?? now))) / 1000) % walkLength();
    walk.before = now;
  }
  if (walk.playing || walk.dirty) askForFrame();
  requestAnimationFrame(onFrame);
}

// ---- start ----

function begin({ perImage, threads, runtime }) {
  state.ready = true;
  state.settings.number = perImage < SLOW ? 20 : 10;
  element("loading").hidden = true;
  const { model } = state;
  const size = `${model.width}×${model.height}`;
  const weight = `${(model.bytes / 1e6).toFixed(1)} MB`;
  const workers = threads === 1 ? "1 thread" : `${threads} threads`;
  element("facts").textContent =
    `${model.name}: ${model.architecture}, ${size} pixels, ${weight}. ${runtime}, WebAssembly, ${workers}.`;
  for (const part of document.querySelectorAll("main :disabled")) part.disabled = false;
  change({});
  requestAnimationFrame(onFrame);
}

const RECEIVE = {
  progress: ({ loaded, total }) => {
    element("loaded").value = loaded / total;
    element("loading-text").textContent = `Loading the model: ${(loaded / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB`;
  },
  model: ({ model }) => {
    state.model = model;
    state.settings.alpha = model.guidance.preset;
    showModel(model, (chosen) => change({ chosen }));
    layOut();
    showSettings();
  },
  ready: begin,
  images: receiveImages,
  frame: receiveFrame,
  failed: ({ text, during }) => {
    if (during === "frame") state.walk.waiting = false;
    if (during === "generate") element("download").disabled = true; // until there are images again
    fail(text, during);
  },
};

element("again").addEventListener("click", () => {
  const seed = element("seed");
  change({ seed: Math.floor(Math.random() * 1e6) });
  seed.value = state.settings.seed;
  readSeed(seed);
});
element("download").addEventListener("click", download);
element("guidance").addEventListener("input", () => change({ alpha: element("guidance").valueAsNumber }));
element("seed").addEventListener("input", () => {
  const seed = readSeed(element("seed"));
  if (seed !== null) change({ seed });
});
for (const input of element("numbers").querySelectorAll("input")) {
  input.addEventListener("change", () => change({ number: Number(input.value) }));
}
element("play").addEventListener("click", () => setPlaying(!state.walk.playing));
element("place").addEventListener("input", () => {
  setPlaying(false);
  state.walk.place = element("place").valueAsNumber % walkLength();
  state.walk.dirty = true;
});
element("controls").addEventListener("submit", (event) => event.preventDefault());
NARROW.addEventListener("change", layOut);

let worker;
if (typeof WebAssembly !== "object" || !WebAssembly.validate(new Uint8Array(SIMD))) {
  fail("This browser lacks WebAssembly with SIMD, which the network needs: use a current Firefox, Chrome, Edge or Safari.");
} else {
  worker = new Worker(new URL("worker.mjs", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => RECEIVE[data.type](data);
  worker.onerror = () => fail("The script that runs the network cannot be loaded: the folder of this page is incomplete.");
  // Threads need memory that workers share, which a server must allow by two headers.
  const cores = globalThis.crossOriginIsolated ? navigator.hardwareConcurrency : 1;
  worker.postMessage({ type: "load", threads: Math.min(MOST_THREADS, Math.ceil(cores / 2)) });
}
globalThis.page = state; // for tests and measurements
