// The pointer over the plane: it looks at samples, draws the target, or drops the start of q. Also by keyboard.
import { createScale } from "./drawing.mjs";

const SPACING = 0.06; // distance of the points of a stroke
const MOST_POINTS = 60; // of a stroke, so that links stay short
const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };

/**
 * Listen to a canvas. handlers: pen() names the pen ("look", "strokes" or "drops"), view() the part of the plane,
 * draw(pen, stroke, isNew) takes a stroke that grows, done(pen) comes after it, look(place or null) asks for arrows.
 */
export function listenToPlane(canvas, handlers) {
  let stroke = null;
  let cross = null;

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const scale = createScale(handlers.view(), box.width, box.height);
    return scale.toPlane(event.clientX - box.left, event.clientY - box.top);
  };

  canvas.addEventListener("pointerdown", (event) => {
    const point = place(event);
    cross = null;
    if (handlers.pen() === "look") {
      handlers.look(point);
      return;
    }
    event.preventDefault();
    canvas.focus({ preventScroll: true });
    canvas.setPointerCapture(event.pointerId);
    stroke = [...point];
    handlers.draw(handlers.pen(), stroke, true);
  });
  canvas.addEventListener("pointermove", (event) => {
    const point = place(event);
    if (!stroke) {
      cross = null;
      handlers.look(handlers.pen() === "look" ? point : null);
      return;
    }
    const gap = Math.hypot(point[0] - stroke.at(-2), point[1] - stroke.at(-1));
    if (gap < SPACING * (stroke.length > MOST_POINTS ? 4 : 1)) return;
    stroke.push(...point);
    handlers.draw(handlers.pen(), stroke, false);
  });
  const finish = () => {
    if (stroke) handlers.done(handlers.pen());
    stroke = null;
  };
  canvas.addEventListener("pointerup", finish);
  canvas.addEventListener("pointercancel", finish);
  canvas.addEventListener("pointerleave", () => {
    if (!stroke && !cross) handlers.look(null);
  });

  canvas.addEventListener("keydown", (event) => {
    const view = handlers.view();
    if (event.key in KEYS) {
      cross ??= [view.x, view.y];
      const size = view.half * (event.shiftKey ? 0.1 : 0.03);
      cross = cross.map((value, axis) => value + size * KEYS[event.key][axis]);
      handlers.look(handlers.pen() === "look" ? cross : null);
      handlers.moved();
    } else if (event.key === "Enter" && cross) {
      if (handlers.pen() === "look") {
        handlers.look(cross);
      } else {
        handlers.draw(handlers.pen(), [...cross], true);
        handlers.done(handlers.pen());
      }
    } else if (event.key === "Escape") {
      cross = null;
      handlers.look(null);
    } else {
      return;
    }
    event.preventDefault();
  });
  canvas.addEventListener("blur", () => {
    cross = null;
    handlers.moved();
  });
  return { cross: () => cross };
}
