// The guided tour: the paper's argument in five pictures.

/** Each stop sets up a run. probe is a place whose nearest point shows its arrows. */
export const TOUR = [
  {
    title: "Two distributions",
    text:
      "Orange points are data, from p. Blue points are samples, from q. A generator must make q equal to p. " +
      "Diffusion moves samples while it samples, in many network calls. Drifting moves q while it trains.",
    settings: { target: "bimodal", start: "between" },
  },
  {
    title: "A pull and a push",
    text:
      "The arrows belong to one sample. V⁺ pulls it toward nearby data. −V⁻ pushes it away from other samples. " +
      "Their sum V is the drift. Move the pointer over other samples to see theirs.",
    settings: { target: "bimodal", start: "between" },
    probe: [0.4, 0.1],
  },
  {
    title: "Equilibrium",
    text:
      "All samples start in one mode. The push spreads them, the pull brings them to the data. Swapping p and q " +
      "flips the sign of V: where q equals p, the forces cancel, and the loss ‖V‖² falls by orders of magnitude.",
    settings: { target: "bimodal", start: "collapsed" },
    play: true,
  },
  {
    title: "Break the symmetry",
    text:
      "Here repulsion is off, so V no longer changes sign when p and q are swapped. Samples pile up inside the " +
      "modes and lose their spread: the loss reaches zero, but q is not p. Try other factors.",
    settings: { target: "eight-gaussians", start: "between", repulsion: 0 },
    play: true,
  },
  {
    title: "One network call",
    text:
      "Now q is the output of a small network that is trained in this page: f(ε) follows f(ε) + V. Each sample " +
      "has the color of its noise, top right. After training, one network call turns noise into a sample.",
    settings: { target: "two-moons", start: "between", mover: "generator" },
    play: true,
  },
];
