// A canvas that fits its element, is sharp on any screen, and takes its colors from the style sheet.

export class Drawing {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.style = getComputedStyle(canvas);
  }

  /** Resize the canvas to the element's width and the given height, clear it, and return the context. */
  begin(height) {
    const { canvas, context } = this;
    const ratio = window.devicePixelRatio || 1;
    this.colors = {};
    this.width = canvas.clientWidth;
    this.height = height;
    const [width, tall] = [Math.round(this.width * ratio), Math.round(height * ratio)];
    if (canvas.width !== width || canvas.height !== tall) {
      Object.assign(canvas, { width, height: tall });
      canvas.style.height = `${height}px`;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, height);
    return context;
  }

  color(name) {
    return (this.colors[name] ??= this.style.getPropertyValue(`--${name}`));
  }
}

/**
 * Call `show` with the place that the pointer or the arrow keys select, or with null if none is selected.
 * `placeAt(x, y)` returns the place at a point, `move(place, right, down)` the next place in a direction.
 */
export function pointable(canvas, placeAt, move, show) {
  let place = null;
  const set = (next) => show((place = next));
  canvas.addEventListener("pointermove", (event) => set(placeAt(event.offsetX, event.offsetY)));
  canvas.addEventListener("pointerdown", (event) => set(placeAt(event.offsetX, event.offsetY)));
  canvas.addEventListener("pointerleave", () => set(null));
  canvas.addEventListener("blur", () => set(null));
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!steps) return;
    event.preventDefault();
    set(move(place, ...steps));
  });
}
