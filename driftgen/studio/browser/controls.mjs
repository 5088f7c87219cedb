// The form: classes and guidance of a model, and the seed.

export const element = (id) => document.getElementById(id);

const MOST_CHIPS = 24; // beyond, classes are a list
const EVERY = "every";

/** Show the classes and the guidance range. onChoice(k) is called with a class, or null for each in turn. */
export function showModel(model, onChoice) {
  const options = [[EVERY, "Every class"], ...model.classes.map((name, k) => [String(k), name])];
  const choose = (value) => onChoice(value === EVERY ? null : Number(value));
  const few = model.classes.length <= MOST_CHIPS;
  element("classes").hidden = !few || model.classes.length === 1;
  element("many-classes").hidden = few;
  if (few) {
    for (const [value, text] of options) {
      const [label, input, span] = ["label", "input", "span"].map((tag) => document.createElement(tag));
      Object.assign(input, { type: "radio", name: "class", value });
      input.addEventListener("change", () => choose(value));
      span.textContent = text;
      label.append(input, span);
      element("classes").append(label);
    }
  } else {
    element("class-list").append(...options.map(([value, text]) => new Option(text, value)));
    element("class-list").addEventListener("change", (event) => choose(event.target.value));
  }
  const { low, high, preset, takes } = model.guidance;
  element("guidance-part").hidden = !takes;
  Object.assign(element("guidance"), { min: low, max: high, step: "any", value: preset });
}

/** Show which class is chosen. */
export function showClasses(chosen) {
  const value = chosen === null ? EVERY : String(chosen);
  for (const input of element("classes").querySelectorAll("input")) input.checked = input.value === value;
  element("class-list").value = value;
}

/** The seed in the box; null, with a sentence below the box, if it is none. */
export function readSeed(box) {
  const seed = /^\s*\d+\s*$/.test(box.value) ? Number(box.value) : NaN;
  const valid = Number.isSafeInteger(seed);
  box.ariaInvalid = String(!valid);
  element("seed-note").classList.toggle("broken", !valid);
  element("seed-note").textContent = valid
    ? "The same seed gives the same noise on every machine, in Python too."
    : `A seed is an integer from 0 to ${Number.MAX_SAFE_INTEGER}.`;
  return valid ? seed : null;
}
