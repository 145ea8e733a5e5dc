// How often to draw: whoever looks may share the cores with the engine, and must not slow it down.

const RESTS = 50; // times as long as a frame took: drawing gets 2% of the time
const LONGEST_REST_MS = 1000;

export class Pace {
  constructor(draw) {
    this.draw = draw;
    this.isAsked = false;
    this.earliest = 0;
    this.begin = 0; // of the last frame
    this.channel = new MessageChannel();
    this.channel.port1.onmessage = () => this.rest();
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
      this.begin = performance.now();
      this.isAsked = false;
      this.draw();
      this.channel.port2.postMessage(null);
    });
  }

  rest() {
    const now = performance.now();
    this.earliest = now + Math.min(RESTS * (now - this.begin), LONGEST_REST_MS);
  }
}
