// The worker: builds runs and answers each request of the page with the state after some steps.
import { createRun } from "./engine.mjs";

const BUDGET = 12; // milliseconds of training per request: a frame lasts 16.7

let current = null;

self.onmessage = ({ data }) => {
  if (data.type === "start") current = createRun(data.settings);
  if (data.type === "set") current?.set(data.settings);
  if (!current) return;
  const begin = performance.now();
  if (data.steps) {
    do current.step();
    while (data.fill && performance.now() - begin < BUDGET);
  }
  const report = current.report(data.arrows);
  self.postMessage({ ...report, run: data.run, milliseconds: performance.now() - begin });
};
