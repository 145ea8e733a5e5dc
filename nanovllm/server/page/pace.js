// How often to draw: whoever looks may share the cores with the engine, and must not slow it down.

const RESTS = 50; // times as long as a frame took: drawing gets 2% of the time
const LONGEST_REST_MS = 1000;

export class Pace {
  constructor(draw) {
    this.draw = draw;
    this.isAsked = false;
    this.earliest = 0;
  }

  /** Draw when the rest after the last frame is over. */
  ask() {
    if (this.isAsked) return;
    this.isAsked = true;
    this.timer = setTimeout(() => this.frame(), this.earliest - performance.now());
  }

  /** Draw at the next frame: somebody has pointed at something. */
  askNow() {
    clearTimeout(this.timer);
    cancelAnimationFrame(this.request);
    this.isAsked = true;
    this.frame();
  }

  /** The browser lays out and paints after `draw`; what it then does next tells when it is done. */
  frame() {
    this.request = requestAnimationFrame(() => {
      const begin = performance.now();
      this.isAsked = false;
      this.draw();
      const channel = new MessageChannel();
      channel.port1.onmessage = () => this.rest(performance.now() - begin);
      channel.port2.postMessage(null);
    });
  }

  rest(taken) {
    this.earliest = performance.now() + Math.min(RESTS * taken, LONGEST_REST_MS);
  }
}
