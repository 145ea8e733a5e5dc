// A canvas that fits its element, is sharp on any screen, and takes its colors from the style sheet.

export class Drawing {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.style = getComputedStyle(canvas);
  }

  /** Clear the canvas at the element's width and the given height; return the context. */
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

/** Report the place selected by the pointer or the arrow keys; null if there is none. */
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
