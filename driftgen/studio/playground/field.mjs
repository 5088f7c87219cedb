// The drifting field V in the plane (Algorithm 2 of the paper): the numbers of driftgen.drift_field.
// Points are flat arrays [x0, y0, x1, y1, ...].

// exp(−u) for u ≥ 0 from a table and a short series: relative error 1e-8, several times as fast as Math.exp.
const CELLS = 256; // table entries per unit of u
const LARGEST = 320; // exp(−320) is 1e-139, far below SMALLEST_SUM
const DECAY = Float64Array.from({ length: CELLS * LARGEST + 1 }, (_, cell) => Math.exp(-cell / CELLS));

function decay(u) {
  if (!(u < LARGEST)) return 0;
  const cell = (u * CELLS) | 0;
  const r = cell * (1 / CELLS) - u;
  return DECAY[cell] * (1 + r + r * r * 0.5);
}

// Each kernel turns squared distances, a row of them in place, into k or into log k.
export const KERNELS = {
  laplace: {
    values(row, temperature) {
      const scale = 1 / temperature;
      for (let j = 0; j < row.length; j++) row[j] = decay(Math.sqrt(row[j]) * scale);
    },
    logs(row, temperature) {
      for (let j = 0; j < row.length; j++) row[j] = -Math.sqrt(row[j]) / temperature;
    },
  },
  gaussian: {
    values(row, temperature) {
      const scale = 0.5 / temperature ** 2;
      for (let j = 0; j < row.length; j++) row[j] = decay(row[j] * scale);
    },
    logs(row, temperature) {
      for (let j = 0; j < row.length; j++) row[j] *= -0.5 / temperature ** 2;
    },
  },
  inverse_multiquadric: {
    values(row, temperature) {
      const scale = 1 / temperature ** 2;
      for (let j = 0; j < row.length; j++) row[j] = 1 / Math.sqrt(1 + row[j] * scale);
    },
    logs(row, temperature) {
      for (let j = 0; j < row.length; j++) row[j] = -0.5 * Math.log1p(row[j] / temperature ** 2);
    },
  },
};

export const NORMALIZATIONS = ["both", "y", "none", "sinkhorn"];

const SINKHORN_STEPS = 50;
const SINKHORN_TOLERANCE = 1e-3;
// Sums of k below this are computed again from log k: far points at a low temperature underflow.
const SMALLEST_SUM = 1e-120;

/** Computes V and keeps its buffers between calls of equal size. */
export class DriftField {
  /**
   * Return the two parts of V = attraction · V⁺ − repulsion · V⁻ at every x, and V.
   * The negatives are x itself; each point ignores itself.
   */
  compute(x, positives, options) {
    const n = x.length / 2;
    this.#resize(n, n + positives.length / 2);
    for (let i = 0; i < n; i++) [this.yx[i], this.yy[i]] = [x[2 * i], x[2 * i + 1]];
    for (let j = 0; j < positives.length / 2; j++) {
      this.yx[n + j] = positives[2 * j];
      this.yy[n + j] = positives[2 * j + 1];
    }
    const kernel = KERNELS[options.kernel];
    this.#fill(x, kernel.values, options.temperature, 0);
    if (this.#underflows()) {
      this.#fill(x, kernel.logs, options.temperature, -Infinity);
      normalizeLogs(this.rows, options.normalization);
      this.rowFactor.fill(1);
      this.columnFactor.fill(1);
    } else {
      this.#normalize(options.normalization);
    }
    return this.#combine(x, options.attraction, options.repulsion);
  }

  #resize(n, total) {
    if (this.rowSum?.length === n && this.columnSum?.length === total) return;
    const matrix = new Float64Array(n * total);
    this.rows = Array.from({ length: n }, (_, i) => matrix.subarray(i * total, (i + 1) * total));
    this.yx = new Float64Array(total);
    this.yy = new Float64Array(total);
    this.rowSum = new Float64Array(n);
    this.rowFactor = new Float64Array(n);
    this.columnSum = new Float64Array(total);
    this.columnFactor = new Float64Array(total);
  }

  /** Fill the matrix with k or log k of all pairs, row by row, and sum it. A point does not see itself. */
  #fill(x, kernel, temperature, masked) {
    const { rows, rowSum, columnSum, yx, yy } = this;
    columnSum.fill(0);
    for (let i = 0; i < rows.length; i++) {
      const row = rows[i];
      squaredDistances(row, yx, yy, x[2 * i], x[2 * i + 1]);
      kernel(row, temperature);
      row[i] = masked;
      rowSum[i] = addTo(columnSum, row);
    }
  }

  #underflows() {
    const tooSmall = (sum) => !(sum > SMALLEST_SUM);
    return this.rowSum.some(tooSmall) || this.columnSum.some(tooSmall);
  }

  /** Every normalization is A_ij = rowFactor_i · k_ij · columnFactor_j. */
  #normalize(normalization) {
    const { rowSum, columnSum, rowFactor, columnFactor } = this;
    if (normalization === "sinkhorn") {
      this.#sinkhorn();
    } else if (normalization === "both") {
      for (let i = 0; i < rowSum.length; i++) rowFactor[i] = 1 / Math.sqrt(rowSum[i]);
      for (let j = 0; j < columnSum.length; j++) columnFactor[j] = 1 / Math.sqrt(columnSum[j]);
    } else {
      for (let i = 0; i < rowSum.length; i++) rowFactor[i] = normalization === "y" ? 1 / rowSum[i] : 1;
      columnFactor.fill(1);
    }
  }

  /** Alternate until the column sums agree, as driftgen does: factors of rows come last. */
  #sinkhorn() {
    const { rows, rowFactor, columnFactor } = this;
    const share = rows.length / columnFactor.length;
    const next = new Float64Array(columnFactor.length);
    columnFactor.fill(1);
    for (let step = 0; ; step++) {
      next.fill(0);
      for (let i = 0; i < rows.length; i++) {
        const row = rows[i];
        let sum = 0;
        for (let j = 0; j < row.length; j++) sum += row[j] * columnFactor[j];
        const factor = 1 / sum;
        for (let j = 0; j < row.length; j++) next[j] += row[j] * factor;
        rowFactor[i] = factor;
      }
      if (step === SINKHORN_STEPS) return;
      let change = 0;
      for (let j = 0; j < next.length; j++) {
        next[j] = share / next[j];
        change = Math.max(change, Math.abs(Math.log(next[j] / columnFactor[j])));
      }
      if (change < SINKHORN_TOLERANCE) return;
      columnFactor.set(next);
    }
  }

  /** V_i = attraction · ΣA⁻ · Σ A⁺ (y⁺ − x) − repulsion · ΣA⁺ · Σ A⁻ (y⁻ − x). */
  #combine(x, attraction, repulsion) {
    const { rows, rowFactor, columnFactor, yx, yy } = this;
    const [attract, repel, drift] = [0, 1, 2].map(() => new Float64Array(x.length));
    const negative = new Float64Array(3);
    const positive = new Float64Array(3);
    for (let i = 0; i < rows.length; i++) {
      const p = [x[2 * i], x[2 * i + 1]];
      moments(rows[i], columnFactor, yx, yy, 0, rows.length, p, negative);
      moments(rows[i], columnFactor, yx, yy, rows.length, columnFactor.length, p, positive);
      const scale = rowFactor[i] ** 2;
      for (let axis = 0; axis < 2; axis++) {
        const at = 2 * i + axis;
        attract[at] = attraction * scale * negative[0] * positive[1 + axis];
        repel[at] = repulsion * scale * positive[0] * negative[1 + axis];
        drift[at] = attract[at] - repel[at];
      }
    }
    return { attract, repel, drift };
  }
}

function squaredDistances(row, yx, yy, px, py) {
  for (let j = 0; j < row.length; j++) {
    const dx = yx[j] - px;
    const dy = yy[j] - py;
    row[j] = dx * dx + dy * dy;
  }
}

/** Add a row to the sums over columns and return its own sum. */
function addTo(columnSum, row) {
  let sum = 0;
  for (let j = 0; j < row.length; j++) {
    sum += row[j];
    columnSum[j] += row[j];
  }
  return sum;
}

/** Σ a and Σ a (y − p) over the columns from ... to, with a = row · factor. */
function moments(row, factor, yx, yy, from, to, [px, py], out) {
  let sum = 0;
  let sumX = 0;
  let sumY = 0;
  for (let j = from; j < to; j++) {
    const a = row[j] * factor[j];
    sum += a;
    sumX += a * (yx[j] - px);
    sumY += a * (yy[j] - py);
  }
  out[0] = sum;
  out[1] = sumX;
  out[2] = sumY;
}

/** Mean squared drift, the value of the plain loss ‖x − sg(x + V)‖² per coordinate. */
export function meanSquare(drift) {
  let sum = 0;
  for (let k = 0; k < drift.length; k++) sum += drift[k] * drift[k];
  return sum / Math.max(1, drift.length);
}

/** Turn log k into A, in place, without underflow between the two. */
function normalizeLogs(rows, normalization) {
  const n = rows.length;
  const total = rows[0].length;
  let overY = new Float64Array(n);
  let overX = new Float64Array(total);
  if (normalization !== "none") overY = logSumsOverY(rows, overX);
  if (normalization === "both") {
    overX = logSumsOverX(rows, new Float64Array(n)).map((sum) => sum / 2);
    overY = overY.map((sum) => sum / 2);
  }
  for (let step = 0; normalization === "sinkhorn" && step < SINKHORN_STEPS; step++) {
    const next = logSumsOverX(rows, overY).map((sum) => sum - Math.log(n / total));
    if (next.every((sum, j) => Math.abs(sum - overX[j]) < SINKHORN_TOLERANCE)) break;
    overX = next;
    overY = logSumsOverY(rows, overX);
  }
  rows.forEach((row, i) => {
    for (let j = 0; j < total; j++) row[j] = Math.exp(row[j] - overY[i] - overX[j]);
  });
}

/** log Σ_j exp(logits_ij − shift_j). */
function logSumsOverY(rows, shift) {
  return Float64Array.from(rows, (row) => {
    let largest = -Infinity;
    for (let j = 0; j < row.length; j++) largest = Math.max(largest, row[j] - shift[j]);
    let sum = 0;
    for (let j = 0; j < row.length; j++) sum += Math.exp(row[j] - shift[j] - largest);
    return largest + Math.log(sum);
  });
}

/** log Σ_i exp(logits_ij − shift_i); 0 for the column of a single point, which sees no other. */
function logSumsOverX(rows, shift) {
  const largest = new Float64Array(rows[0].length).fill(-Infinity);
  const sums = new Float64Array(rows[0].length);
  rows.forEach((row, i) => {
    for (let j = 0; j < row.length; j++) largest[j] = Math.max(largest[j], row[j] - shift[i]);
  });
  rows.forEach((row, i) => {
    for (let j = 0; j < row.length; j++) sums[j] += Math.exp(row[j] - shift[i] - largest[j]);
  });
  return largest.map((most, j) => (most > -Infinity ? most + Math.log(sums[j]) : 0));
}
