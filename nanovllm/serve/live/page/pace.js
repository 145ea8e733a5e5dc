// Frame pacing: the browser may share the cores with the engine, and must not slow it down.

const RESTS = 50; // pause after a frame, in multiples of its duration: drawing gets 2% of the time
const LONGEST_REST_MS = 1000;

export class Pace {
  constructor(draw) {
    this.draw = draw;
    this.isAsked = false;
    this.earliest = 0;
    this.begin = 0; // start time of the last frame
    this.channel = new MessageChannel();
    this.channel.port1.onmessage = () => this.rest();
  }

  /** Draw when the pause after the last frame is over. */
  ask() {
    if (this.isAsked) return;
    this.isAsked = true;
    this.timer = setTimeout(() => this.frame(), this.earliest - performance.now());
  }

  /** Draw in the next animation frame, without the pause, as when the user points at something. */
  askNow() {
    clearTimeout(this.timer);
    cancelAnimationFrame(this.request);
    this.isAsked = true;
    this.frame();
  }

  /** The browser does layout and paint after `draw`; the message arrives when they are done. */
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
