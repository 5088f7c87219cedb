// Pictures on canvases: the plane with both distributions, the arrows of one point, the noise, the loss.

const HUES = 24; // colors of samples by the angle of their noise

/** A canvas that keeps the sharpness of the screen. Returns its size in CSS pixels. */
export function fitCanvas(canvas) {
  const ratio = Math.min(2, globalThis.devicePixelRatio || 1);
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** The colors of the style sheet, so that light and dark are decided there. */
export function readColors() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["data", "sample", "attract", "repel", "drift", "muted", "line", "card", "text"];
  const colors = Object.fromEntries(names.map((name) => [name, color(name)]));
  colors.hues = Array.from({ length: HUES }, (_, k) => `hsl(${(360 * k) / HUES} ${color("hue-tone")})`);
  return colors;
}

/** The square of the plane that holds all points, with a margin: center and half width. */
export function fitView(...sets) {
  let [left, right, low, high] = [-2, 2, -2, 2];
  for (const points of sets) {
    for (let k = 0; k < points.length; k += 2) {
      left = Math.min(left, points[k]);
      right = Math.max(right, points[k]);
      low = Math.min(low, points[k + 1]);
      high = Math.max(high, points[k + 1]);
    }
  }
  return { x: (left + right) / 2, y: (low + high) / 2, half: (0.5 * Math.max(right - left, high - low)) * 1.15 };
}

/** Map between the plane and a canvas. */
export function createScale(view, width, height) {
  const unit = Math.min(width, height) / (2 * view.half);
  return {
    unit,
    toScreen: (x, y) => [width / 2 + (x - view.x) * unit, height / 2 - (y - view.y) * unit],
    toPlane: (px, py) => [view.x + (px - width / 2) / unit, view.y - (py - height / 2) / unit],
  };
}

function drawDots(context, points, scale, radius, alpha, colorOf) {
  context.globalAlpha = alpha;
  let last;
  for (let k = 0; k < points.length; k += 2) {
    const color = colorOf(k / 2);
    if (color !== last) context.fillStyle = last = color; // parsing a color takes longer than a dot
    context.beginPath();
    context.arc(...scale.toScreen(points[k], points[k + 1]), radius, 0, 7);
    context.fill();
  }
  context.globalAlpha = 1;
}

/** The color of each sample by the angle of its noise: neighbors in noise keep their color as they move. */
export function hueIndex(noise, i) {
  const turn = Math.atan2(noise[2 * i + 1], noise[2 * i]) / (2 * Math.PI);
  return Math.floor((turn < 0 ? turn + 1 : turn) * HUES) % HUES;
}

/** Both distributions. Samples of a generator have the colors of their noise. */
export function drawPlane(context, { target, x, noise }, scale, colors) {
  drawDots(context, target, scale, 2.3, 0.55, () => colors.data);
  drawDots(context, x, scale, 2.9, 0.9, (i) => (noise ? colors.hues[hueIndex(noise, i)] : colors.sample));
}

/** Strokes while they are drawn. */
export function drawStrokes(context, strokes, scale, color) {
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = 2;
  context.globalAlpha = 0.5;
  for (const stroke of strokes) {
    context.beginPath();
    for (let k = 0; k < stroke.length; k += 2) context.lineTo(...scale.toScreen(stroke[k], stroke[k + 1]));
    context.stroke();
    if (stroke.length === 2) {
      context.beginPath();
      context.arc(...scale.toScreen(stroke[0], stroke[1]), 4, 0, 7);
      context.fill();
    }
  }
  context.globalAlpha = 1;
}

function drawArrow(context, [x0, y0], [x1, y1], { color, halo, label, dashed }) {
  const length = Math.hypot(x1 - x0, y1 - y0);
  if (length < 2) return;
  const [ux, uy] = [(x1 - x0) / length, (y1 - y0) / length];
  const head = Math.min(9, length / 2);
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = 2.5;
  context.setLineDash(dashed ? [6, 4] : []);
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1 - ux * head, y1 - uy * head);
  context.stroke();
  context.setLineDash([]);
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x1 - ux * head - uy * head * 0.55, y1 - uy * head + ux * head * 0.55);
  context.lineTo(x1 - ux * head + uy * head * 0.55, y1 - uy * head - ux * head * 0.55);
  context.fill();
  context.font = "600 13px system-ui, sans-serif";
  context.textAlign = ux < -0.3 ? "right" : ux > 0.3 ? "left" : "center";
  context.textBaseline = "middle";
  context.strokeStyle = halo; // keeps the label readable on top of points
  context.lineWidth = 4;
  context.strokeText(label, x1 + ux * 8, y1 + uy * 12);
  context.fillText(label, x1 + ux * 8, y1 + uy * 12);
}

/** V⁺, −V⁻ and V of one point, enlarged to be seen: the longest arrow has at most a third of the picture. */
export function drawForces(context, { x, parts }, i, scale, colors, extent) {
  const part = (values) => [values[2 * i], values[2 * i + 1]];
  const [attract, repel, drift] = [part(parts.attract), part(parts.repel), part(parts.drift)];
  const longest = Math.max(Math.hypot(...attract), Math.hypot(...repel)) * scale.unit;
  const zoom = Math.min(8, extent / 3 / Math.max(longest, 1e-9));
  const from = scale.toScreen(x[2 * i], x[2 * i + 1]);
  const tip = ([vx, vy]) => [from[0] + vx * zoom * scale.unit, from[1] - vy * zoom * scale.unit];
  context.strokeStyle = colors.text;
  context.lineWidth = 1.5;
  context.beginPath();
  context.arc(...from, 6, 0, 7);
  context.stroke();
  const halo = colors.card;
  drawArrow(context, from, tip(attract), { color: colors.attract, halo, label: "V⁺" });
  drawArrow(context, from, tip(repel.map((v) => -v)), { color: colors.repel, halo, label: "−V⁻", dashed: true });
  drawArrow(context, from, tip(drift), { color: colors.drift, halo, label: "V" });
}

/** A cross for drawing and looking by keyboard. */
export function drawCross(context, [x, y], color) {
  context.strokeStyle = color;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x - 10, y);
  context.lineTo(x + 10, y);
  context.moveTo(x, y - 10);
  context.lineTo(x, y + 10);
  context.stroke();
}

/** The noise of the generator in a corner, in the colors of its samples. */
export function drawNoise(context, noise, width, colors) {
  const size = Math.min(110, width / 4);
  const [left, top] = [width - size - 12, 12];
  context.fillStyle = colors.card;
  context.strokeStyle = colors.line;
  context.lineWidth = 1;
  context.globalAlpha = 0.92;
  context.beginPath();
  context.roundRect(left, top, size, size, 8);
  context.fill();
  context.stroke();
  const scale = {
    toScreen: (x, y) => [left + size / 2 + (x * size) / 7, top + size / 2 - (y * size) / 7],
  };
  drawDots(context, noise, scale, 1.3, 0.9, (i) => colors.hues[hueIndex(noise, i)]);
  context.fillStyle = colors.muted;
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "top";
  context.fillText("noise ε", left + size / 2, top + size + 4);
}

/** The loss at every step, on a log axis. */
export function drawLoss({ context, width, height }, losses, every, colors) {
  const [left, right, top, bottom] = [46, width - 10, 8, height - 24];
  const shown = losses.filter((loss) => loss > 0);
  const high = Math.ceil(Math.log10(Math.max(...shown, 1e-12)));
  const low = Math.min(high - 1, Math.floor(Math.log10(Math.min(...shown, 1e12))));
  const toY = (loss) => top + ((high - Math.log10(Math.max(loss, 10 ** low))) / (high - low)) * (bottom - top);
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  if (!shown.length) {
    context.fillStyle = colors.muted;
    context.textAlign = "center";
    context.fillText("Press play.", width / 2, height / 2);
    return;
  }
  const tick = Math.ceil((high - low) / 6);
  for (let power = low; power <= high; power += tick) {
    const y = toY(10 ** power);
    context.strokeStyle = colors.line;
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(right, y);
    context.stroke();
    context.fillStyle = colors.muted;
    context.fillText(`1e${power}`.replace("-", "−"), left - 6, y);
  }
  const last = Math.max(1, losses.length - 1);
  context.strokeStyle = colors.sample;
  context.lineWidth = 2;
  context.beginPath();
  losses.forEach((loss, k) => context.lineTo(left + (k / last) * (right - left), toY(loss)));
  context.stroke();
  context.textBaseline = "bottom";
  context.textAlign = "left";
  context.fillText("0", left, height);
  context.textAlign = "right";
  context.fillText(`step ${last * every}`, right, height);
}
