"""Checks that run inside a page: contrast, names of controls; and sizes of windows."""

SIZES = {"desktop": (1360, 860), "phone": (390, 844)}
# Contrast of each text with the nearest opaque background, by WCAG's formula.
CONTRASTS = """() => {
  const parse = (color) => (color.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.matches("script, option, :disabled")) continue;
    let behind = node;
    const color = (element) => parse(getComputedStyle(element).backgroundColor);
    while (behind.parentElement && (color(behind)[3] ?? 1) === 0) behind = behind.parentElement;
    const back = color(behind);
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(back)].sort((p, q) => q - p);
    found.push([node.textContent.trim().slice(0, 30), (a + 0.05) / (b + 0.05)]);
  }
  return found;
}"""
# Controls that a screen reader could not name.
UNNAMED = """() => [...document.querySelectorAll('button, input, select, canvas')]
  .filter((node) => node.checkVisibility())
  .filter((node) => !(node.innerText || node.ariaLabel || node.labels?.length))
  .map((node) => node.outerHTML)"""
