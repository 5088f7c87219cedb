// The generator: a multilayer perceptron on plain arrays, with its own backward pass and Adam.
import { fillNormal } from "./toys.mjs";

/** f(ε): layers of sizes [noise, hidden, ..., data], SiLU between them, as driftgen.generators.MLP. */
export class MLP {
  constructor(sizes, random) {
    this.layers = sizes.slice(1).map((outputs, k) => {
      const inputs = sizes[k];
      const weight = fillNormal(new Float64Array(inputs * outputs), random);
      for (let i = 0; i < weight.length; i++) weight[i] *= 1.7 / Math.sqrt(inputs); // keeps the variance
      return {
        inputs,
        outputs,
        weight,
        bias: new Float64Array(outputs),
        weightGradient: new Float64Array(weight.length),
        biasGradient: new Float64Array(outputs),
      };
    });
  }

  /** Return samples [n, data] of noise [n, noise], and keep what the backward pass needs. */
  forward(noise) {
    this.inputs = [];
    this.linear = [];
    let values = noise;
    this.layers.forEach((layer, k) => {
      const n = values.length / layer.inputs;
      const linear = new Float64Array(n * layer.outputs);
      for (let row = 0; row < n; row++) affine(layer, values, row, linear);
      this.inputs.push(values);
      this.linear.push(linear);
      values = k < this.layers.length - 1 ? linear.map(silu) : linear;
    });
    return values;
  }

  /** Set the gradients of all weights from the gradient of the last forward pass's output. */
  backward(outputGradient) {
    let gradient = outputGradient;
    for (let k = this.layers.length - 1; k >= 0; k--) {
      const layer = this.layers[k];
      const n = gradient.length / layer.outputs;
      layer.weightGradient.fill(0);
      layer.biasGradient.fill(0);
      const below = new Float64Array(n * layer.inputs);
      for (let row = 0; row < n; row++) affineBackward(layer, this.inputs[k], gradient, row, below);
      if (k > 0) for (let i = 0; i < below.length; i++) below[i] *= siluSlope(this.linear[k - 1][i]);
      gradient = below;
    }
  }

  /** Rescale the last layer so that samples start around a center with a standard deviation. */
  place(noise, center, spread) {
    const samples = this.forward(noise);
    const last = this.layers.at(-1);
    const n = samples.length / last.outputs;
    for (let axis = 0; axis < last.outputs; axis++) {
      let mean = 0;
      let square = 0;
      for (let row = 0; row < n; row++) mean += samples[row * last.outputs + axis] / n;
      for (let row = 0; row < n; row++) square += (samples[row * last.outputs + axis] - mean) ** 2 / (n - 1);
      const factor = spread / Math.sqrt(square);
      for (let i = 0; i < last.inputs; i++) last.weight[i * last.outputs + axis] *= factor;
      last.bias[axis] = center[axis] + (last.bias[axis] - mean) * factor;
    }
  }
}

const silu = (z) => z / (1 + Math.exp(-z));

function siluSlope(z) {
  const gate = 1 / (1 + Math.exp(-z));
  return gate * (1 + z * (1 - gate));
}

// Weights are [inputs, outputs]: the inner loops then add to independent sums, which processors overlap.
function affine({ inputs, outputs, weight, bias }, values, row, out) {
  const result = out.subarray(row * outputs, (row + 1) * outputs);
  result.set(bias);
  for (let i = 0; i < inputs; i++) {
    const value = values[row * inputs + i];
    const w = i * outputs;
    for (let o = 0; o < outputs; o++) result[o] += value * weight[w + o];
  }
}

function affineBackward({ inputs, outputs, weight, weightGradient, biasGradient }, values, gradient, row, below) {
  const g = gradient.subarray(row * outputs, (row + 1) * outputs);
  for (let o = 0; o < outputs; o++) biasGradient[o] += g[o];
  for (let i = 0; i < inputs; i++) {
    const value = values[row * inputs + i];
    const w = i * outputs;
    let sum = 0;
    for (let o = 0; o < outputs; o++) {
      weightGradient[w + o] += value * g[o];
      sum += g[o] * weight[w + o];
    }
    below[row * inputs + i] = sum;
  }
}

/** Adam with the toy study's betas. */
export class Adam {
  constructor(layers, betas = [0.9, 0.95]) {
    this.betas = betas;
    this.steps = 0;
    this.slots = layers.flatMap((layer) =>
      ["weight", "bias"].map((name) => ({
        value: layer[name],
        gradient: layer[`${name}Gradient`],
        mean: new Float64Array(layer[name].length),
        square: new Float64Array(layer[name].length),
      })),
    );
  }

  step(rate) {
    const [b1, b2] = this.betas;
    this.steps++;
    const scale = rate / (1 - b1 ** this.steps);
    const correction = 1 / (1 - b2 ** this.steps);
    for (const { value, gradient, mean, square } of this.slots) {
      for (let i = 0; i < value.length; i++) {
        mean[i] += (1 - b1) * (gradient[i] - mean[i]);
        square[i] += (1 - b2) * (gradient[i] * gradient[i] - square[i]);
        value[i] -= (scale * mean[i]) / (Math.sqrt(square[i] * correction) + 1e-8);
      }
    }
  }
}
