// The form of settings, the shares of the modes and the dialog with a link.
import { RANGES, toHash } from "./settings.mjs";
import { TOYS } from "./toys.mjs";

export const element = (id) => document.getElementById(id);

const LIVE = ["kernel", "normalization"];
const CHOSEN = ["mover", "target", "start"];

const isLog = (input) => "log" in input.dataset;

function show(value) {
  return value === 0 || value >= 0.1 ? value.toFixed(2) : value.toPrecision(2);
}

/** Wire the form. onChange(name, value) is called with every change. */
export function listenToControls(onChange) {
  for (const name of CHOSEN) {
    for (const input of document.querySelectorAll(`input[name=${name}]`)) {
      input.addEventListener("change", () => onChange(name, input.value));
    }
  }
  for (const name of LIVE) element(name).addEventListener("change", () => onChange(name, element(name).value));
  element("fresh").addEventListener("change", () => onChange("fresh", element("fresh").checked));
  for (const [name, range] of Object.entries(RANGES)) {
    const input = element(name);
    const [low, high] = isLog(input) ? range.map(Math.log10) : range;
    Object.assign(input, { min: low, max: high, step: isLog(input) ? (high - low) / 200 : 0.05 });
    input.addEventListener("input", () => {
      const value = isLog(input) ? 10 ** input.valueAsNumber : input.valueAsNumber;
      onChange(name, Number(value.toPrecision(3)));
    });
  }
  element("controls").addEventListener("submit", (event) => event.preventDefault());
}

/** Show settings in the form. */
export function showSettings(settings) {
  for (const name of CHOSEN) {
    document.querySelector(`input[name=${name}][value="${settings[name]}"]`).checked = true;
  }
  for (const name of LIVE) element(name).value = settings[name];
  element("fresh").checked = settings.fresh;
  for (const name of Object.keys(RANGES)) {
    const input = element(name);
    const value = String(isLog(input) ? Math.log10(settings[name]) : settings[name]);
    if (document.activeElement !== input) input.value = value;
    input.setAttribute("aria-valuetext", show(settings[name]));
    element(`${name}-now`).textContent = show(settings[name]);
  }
  document.body.classList.toggle("generator", settings.mover === "generator");
  const balanced = settings.attraction === settings.repulsion;
  element("symmetry").classList.toggle("broken", !balanced);
  element("symmetry").textContent = balanced
    ? "Balanced: V is anti-symmetric, so p\u00a0=\u00a0q is an equilibrium."
    : "Out of balance: V is not anti-symmetric, so p\u00a0=\u00a0q is no equilibrium.";
}

/** Names of the modes of a target. Each stroke of a drawing is one. */
export function modeNames(settings) {
  return TOYS[settings.target]?.modes ?? settings.strokes.map((_, k) => `stroke ${k + 1}`);
}

/** Show the share of each mode as a bar; the mark in the middle is 1, its due. */
export function showShares(names, shares) {
  const list = element("shares");
  if (list.children.length !== names.length || list.dataset.names !== names.join()) {
    list.dataset.names = names.join();
    list.replaceChildren(
      ...names.map((name) => {
        const row = document.createElement("li");
        const [label, track, figure] = ["span", "div", "output"].map((tag) => document.createElement(tag));
        label.textContent = name;
        track.className = "track";
        track.append(document.createElement("i"));
        row.append(label, track, figure);
        return row;
      }),
    );
  }
  names.forEach((_, k) => {
    const [, track, figure] = list.children[k].children;
    const share = Number.isFinite(shares[k]) ? shares[k] : 0;
    track.firstChild.style.width = `${Math.min(100, 50 * share)}%`;
    figure.textContent = share.toFixed(2);
  });
}

/** Put the settings into the address, show the link and copy it if the browser allows. */
export async function shareSettings(settings) {
  location.hash = toHash(settings);
  const link = element("share-link");
  link.value = location.href;
  element("share-note").textContent = "The link holds all settings and drawings.";
  element("share-dialog").showModal();
  link.select();
  try {
    await navigator.clipboard.writeText(location.href);
    element("share-note").textContent = "Copied. The link holds all settings and drawings.";
  } catch {
    // The link is selected: copying by hand works everywhere.
  }
}
