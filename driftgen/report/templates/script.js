(() => {
  "use strict";
  const root = document.documentElement;
  root.classList.add("js");

  // The slider over training steps.
  for (const timeline of document.querySelectorAll(".timeline")) {
    const slider = timeline.querySelector("input");
    if (!slider) continue;
    const frames = [...timeline.querySelectorAll(".frames img")];
    const button = timeline.querySelector("button"), output = timeline.querySelector("output");
    let timer = 0;
    const show = (index) => {
      frames.forEach((frame, i) => { frame.hidden = i !== index; });
      const text = "step " + frames[index].dataset.step;
      slider.value = String(index);
      slider.setAttribute("aria-valuetext", text);
      output.value = text;
    };
    const stop = () => {
      clearInterval(timer);
      timer = 0;
      button.textContent = "▶";
      button.setAttribute("aria-label", "Play the training");
    };
    slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
    button.addEventListener("click", () => {
      if (timer) return stop();
      let index = Number(slider.value);
      if (index === frames.length - 1) show(index = 0);
      button.textContent = "❚❚";
      button.setAttribute("aria-label", "Pause");
      timer = setInterval(() => {
        index += 1;
        show(index);
        if (index === frames.length - 1) stop();
      }, 450);
    });
    // Paper has no slider: it shows a few stages instead.
    const film = document.createElement("div");
    film.className = "film";
    film.setAttribute("aria-hidden", "true");
    const count = Math.min(6, frames.length);
    for (let i = 0; i < count; i++) {
      const frame = frames[Math.round(i * (frames.length - 1) / Math.max(count - 1, 1))];
      const figure = document.createElement("figure"), copy = frame.cloneNode();
      copy.hidden = false;
      figure.append(copy, "step " + frame.dataset.step);
      film.append(figure);
    }
    timeline.append(film);
  }

  // The cursor of a chart: values of all curves at a step, by pointer or by arrow keys.
  for (const chart of document.querySelectorAll(".chart")) {
    const svg = chart.querySelector("svg"), cursor = svg.querySelector(".cursor");
    const at = chart.querySelector(".at"), values = [...chart.querySelectorAll("b[data-last]")];
    const n = Object.fromEntries(Object.entries(svg.dataset).map(([key, value]) => [key, Number(value)]));
    const curves = [...svg.querySelectorAll(".curve")].map((curve) =>
      curve.getAttribute("d").slice(1).split("L").map((point) => point.split(" ").map(Number)));
    const xs = [...new Set(curves.flat().map((point) => point[0]))].sort((a, b) => a - b);
    const nearest = (x) => xs.reduce((best, other, i) => Math.abs(other - x) < Math.abs(xs[best] - x) ? i : best, 0);
    let index = xs.length - 1;
    const move = (to) => {
      index = Math.max(0, Math.min(xs.length - 1, to));
      const x = xs[index];
      cursor.setAttribute("d", `M${x} ${n.top}V${n.bottom}`);
      const step = n.x0 + (x - n.left) / (n.right - n.left) * (n.x1 - n.x0);
      at.textContent = "at step " + Math.round(step).toLocaleString("en");
      curves.forEach((points, i) => {
        const y = points.reduce((best, p) => Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best)[1];
        const value = n.y0 + (n.bottom - y) / (n.bottom - n.top) * (n.y1 - n.y0);
        values[i].textContent = Number((n.log ? 10 ** value : value).toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
      });
    };
    const leave = () => {
      cursor.setAttribute("d", "");
      at.textContent = "";
      index = xs.length - 1;
      for (const value of values) value.textContent = value.dataset.last;
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      move(nearest((event.clientX - box.left) * svg.viewBox.baseVal.width / box.width));
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10, Home: -1e9, End: 1e9 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      move(index + by);
    });
  }

  // Folded parts belong on paper, too.
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
