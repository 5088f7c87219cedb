// A closed walk through the noises of the images: from each to the next, from the last to the first.

/** The two noises around a place of the walk, the way between them from 0 to 1, and the nearer one. */
export function around(place, count) {
  const left = Math.floor(place) % count;
  const right = (left + 1) % count;
  const way = place - Math.floor(place);
  return { left, right, way, nearer: way < 0.5 ? left : right };
}

/**
 * Spherical interpolation: sin((1 - t) w) / sin(w) a + sin(t w) / sin(w) b, where w is the angle of a and b.
 * A mean of two noises would be shorter than either, and the network has never seen such noise.
 */
export function slerp(a, b, t) {
  let [ab, aa, bb] = [0, 0, 0];
  for (let i = 0; i < a.length; i++) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  const angle = Math.acos(Math.max(-1, Math.min(1, ab / Math.sqrt(aa * bb))));
  const sine = Math.sin(angle);
  // Almost parallel noises: the limit of both factors.
  const [p, q] = sine < 1e-6 ? [1 - t, t] : [Math.sin((1 - t) * angle) / sine, Math.sin(t * angle) / sine];
  return a.map((value, i) => p * value + q * b[i]);
}

/** The noise of one sample between two. Integers, such as style indices, are those of the nearer one. */
export function between(from, to, t) {
  const noise = {};
  for (const name of Object.keys(from)) {
    const [a, b] = [from[name].data, to[name].data];
    const data = a instanceof Float32Array ? slerp(a, b, t) : t < 0.5 ? a : b;
    noise[name] = { data, dims: from[name].dims };
  }
  return noise;
}
