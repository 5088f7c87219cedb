// The worker: loads the model, then turns seeds, classes and guidance into pixels. The page never waits for it.
import { portableNoise } from "../portable_noise.mjs";
import { batchSize, inputsOf, labelOf, readModel } from "./model.mjs";
import { toPixels } from "./pixels.mjs";
import { around, between } from "./walk.mjs";

const RUNTIME = "../ort/ort.wasm.bundle.min.mjs"; // its .wasm file is beside it

let ort, session, model;
let perImage = 100; // milliseconds
let latest = 0; // request for images: a newer one ends an older one
let noises = { key: null }; // the pair of the walk

async function fetchFile(name, what) {
  let answer;
  try {
    answer = await fetch(new URL(`../${name}`, import.meta.url));
  } catch {
    throw new Error(`${what} cannot be fetched: is the server still running?`);
  }
  if (!answer.ok) throw new Error(`${what} cannot be fetched: ${name} gives ${answer.status}.`);
  return answer;
}

/** The bytes of the model, with a message to the page for each part that arrives. */
async function fetchModel(total) {
  const answer = await fetchFile("model.onnx", "The model");
  const parts = [];
  let loaded = 0;
  const reader = answer.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    loaded += value.length;
    self.postMessage({ type: "progress", loaded, total });
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

async function load({ threads }) {
  const answer = await fetchFile("model.json", "The description of the model");
  let record;
  try {
    record = await answer.json();
  } catch {
    throw new Error("model.json is damaged: write the page again.");
  }
  model = readModel(record);
  self.postMessage({ type: "model", model });
  const bytes = await fetchModel(model.bytes);
  try {
    ort = await import(RUNTIME);
  } catch {
    throw new Error("onnxruntime-web cannot be loaded: the folder ort of this page is incomplete.");
  }
  ort.env.wasm.numThreads = threads;
  ort.env.logLevel = "fatal"; // the page says what goes wrong
  try {
    session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
  } catch (error) {
    throw new Error(`The model cannot be loaded: ${plain(error)}`);
  }
  // The first calls are slow: the browser compiles while they run.
  for (let call = 0; call < 2; call++) {
    ({ milliseconds: perImage } = await run(portableNoise(model.tensors, 1, 0), [0], model.guidance.preset));
  }
  const runtime = `onnxruntime-web ${ort.env.versions.web ?? ort.env.versions.common}`;
  self.postMessage({ type: "ready", perImage, threads, runtime });
}

/** One call of the network: the images of all rows of the noise. */
async function run(noise, labels, alpha) {
  const inputs = inputsOf(noise, labels, alpha);
  const feeds = {};
  for (const name of session.inputNames) {
    const { type, data, dims } = inputs[name];
    feeds[name] = new ort.Tensor(type, data, dims);
  }
  const begin = performance.now();
  const { images } = await session.run(feeds);
  return { data: images.data, milliseconds: performance.now() - begin };
}

/** One batch of a request. The rest goes to the end of the queue, so that a walk goes on meanwhile. */
async function generate(request) {
  const { id, number, chosen, alpha, seed, first = 0, spent = 0, calls = 0 } = request;
  if (id !== latest) return;
  const n = batchSize(number - first, perImage);
  const labels = Array.from({ length: n }, (_, k) => labelOf(chosen, first + k, model));
  const { data, milliseconds } = await run(portableNoise(model.tensors, n, seed, first), labels, alpha);
  perImage = Math.max(0.01, milliseconds / n);
  const pixels = labels.map((_, k) => toPixels(data, k, model));
  const sofar = { spent: spent + milliseconds, calls: calls + 1 };
  const report = { type: "images", id, number, first, labels, pixels, values: data, ...sofar };
  self.postMessage(report, [data, ...pixels].map(({ buffer }) => buffer));
  await new Promise((resolve) => setTimeout(resolve)); // messages that have arrived meanwhile come first
  if (first + n < number) enqueue({ ...request, ...sofar, first: first + n });
}

async function frame({ place, number, chosen, alpha, seed }) {
  const { left, right, way, nearer } = around(place, number);
  const key = [seed, left, right].join();
  if (noises.key !== key) {
    const [from, to] = [left, right].map((i) => portableNoise(model.tensors, 1, seed, i));
    noises = { key, from, to };
  }
  const label = labelOf(chosen, nearer, model);
  const { data, milliseconds } = await run(between(noises.from, noises.to, way), [label], alpha);
  const pixels = toPixels(data, 0, model);
  self.postMessage({ type: "frame", place, left, right, way, label, pixels, milliseconds }, [pixels.buffer]);
}

/** The message of an error of the runtime as one sentence; errors of WebAssembly are numbers. */
function plain(error) {
  const text = String(error?.message ?? error).split("\n")[0].replace(/^.*ERROR_MESSAGE: /, "").trim();
  return /^\d*$/.test(text) ? "out of memory, or the file is damaged." : text.slice(0, 300);
}

const WORK = { load, generate, frame };
let queue = Promise.resolve(); // one call of the network at a time

function enqueue(request) {
  queue = queue
    .then(() => WORK[request.type](request))
    .catch((error) => self.postMessage({ type: "failed", during: request.type, text: plain(error) }));
}

self.onmessage = ({ data }) => {
  if (data.type === "generate") latest = data.id;
  enqueue(data);
};
