// A model as the page needs it, from the metadata that `driftgen export` writes; and the inputs of its network.
import { NAME } from "../portable_noise.mjs";

const USUAL_GUIDANCE = [1, 4]; // of the training recipes, for models that do not record their own

/** The model of a record, the content of model.json. Throws an error with a plain sentence if it is of no use. */
export function readModel(record) {
  const images = record?.outputs?.images;
  if (record?.format !== "driftgen" || !images) {
    throw new Error("model.json does not describe a generator of images.");
  }
  if (record.noise.generator !== NAME) {
    throw new Error(`The model takes noise of "${record.noise.generator}", this page makes "${NAME}".`);
  }
  const [channels, height, width] = images.shape.slice(1);
  if (channels !== 1 && channels !== 3) throw new Error(`The images have ${channels} channels, not 1 or 3.`);
  const { names, number } = record.classes;
  const count = number ?? names?.length ?? 1;
  const [low, high] = record.guidance.range ?? USUAL_GUIDANCE;
  const preset = record.guidance.default;
  return {
    name: record.name,
    architecture: record.architecture,
    bytes: record.bytes,
    channels,
    height,
    width,
    classes: Array.from({ length: count }, (_, k) => names?.[k] ?? String(k)),
    guidance: { low: Math.min(low, preset), high: Math.max(high, preset), preset, takes: low < high },
    tensors: record.noise.tensors,
  };
}

/** The class of image i: the chosen one, or each class in turn if `chosen` is null. */
export function labelOf(chosen, i, model) {
  return chosen ?? i % model.classes.length;
}

/** The inputs of the network by name, as {type, data, dims}. `noise` is the result of `portableNoise`. */
export function inputsOf(noise, labels, alpha) {
  const inputs = {};
  for (const [name, { data, dims }] of Object.entries(noise)) {
    inputs[name] = { type: data instanceof BigInt64Array ? "int64" : "float32", data, dims };
  }
  const n = labels.length;
  inputs.labels = { type: "int64", data: BigInt64Array.from(labels, BigInt), dims: [n] };
  inputs.alpha = { type: "float32", data: new Float32Array(n).fill(alpha), dims: [n] };
  return inputs;
}

/** Images per network call: as many as fit into a fifth of a second, so that the first ones appear soon. */
export function batchSize(remaining, millisecondsPerImage) {
  return Math.max(1, Math.min(remaining, Math.floor(200 / millisecondsPerImage)));
}
