// Sparklines of the last minute, and a timeline with one column per step.

import { Drawing, pointable } from "./canvas.js";
import { setText } from "./elements.js";
import { describeStep } from "./state.js";

const SAMPLES = 120; // two per second

export class Sparkline {
  constructor(canvas, most) {
    this.drawing = new Drawing(canvas);
    this.most = most; // top of the scale; undefined: the largest value
    this.values = [];
  }

  add(value) {
    this.values.push(value);
    if (this.values.length > SAMPLES) this.values.shift();
  }

  draw() {
    const { drawing, values } = this;
    const context = drawing.begin(28);
    const most = this.most ?? Math.max(1, ...values);
    const x = (index) => drawing.width * (1 - (values.length - 1 - index) / (SAMPLES - 1));
    const y = (value) => 26 - 24 * (value / most);
    context.beginPath();
    values.forEach((value, index) => context.lineTo(x(index), y(value)));
    context.strokeStyle = drawing.color("accent");
    context.lineWidth = 1.5;
    context.stroke();
    context.lineTo(drawing.width, 28);
    context.lineTo(x(0), 28);
    context.globalAlpha = 0.12;
    context.fillStyle = drawing.color("accent");
    context.fill();
    context.globalAlpha = 1;
  }
}

const TOP = 64; // pixels for tokens
const BOTTOM = 44; // pixels for times
const COLUMN = 7;
const HINT = "Point at a step, or select one with the arrow keys.";

export class Timeline {
  constructor(canvas, detail) {
    this.drawing = new Drawing(canvas);
    this.detail = detail;
    this.shown = [];
    this.pointed = null;
    pointable(
      canvas,
      (x) => this.indexAt(x),
      (index, right) => Math.max(0, Math.min(this.shown.length - 1, (index ?? this.shown.length) + right)),
      (index) => ((this.pointed = this.shown[index] ?? null), this.draw()),
    );
  }

  set(steps) {
    const number = Math.floor(this.drawing.canvas.clientWidth / COLUMN);
    this.shown = steps.filter((step) => step.rows).slice(-Math.max(number, 1));
    if (!this.shown.includes(this.pointed)) this.pointed = null;
    this.draw();
  }

  draw() {
    const { drawing, shown } = this;
    const context = drawing.begin(TOP + BOTTOM + 2);
    const mostTokens = Math.log2(1 + Math.max(8, ...shown.map((step) => step.prompt + step.answer)));
    const longest = Math.max(1, ...shown.map((step) => Math.max(step.device, hostTime(step))));
    context.fillStyle = drawing.color("line");
    context.fillRect(0, TOP, drawing.width, 1);
    shown.forEach((step, index) => {
      const x = this.left(index);
      context.globalAlpha = this.pointed && this.pointed !== step ? 0.45 : 1;
      this.drawTokens(context, step, x, mostTokens);
      this.drawTimes(context, step, x, longest);
    });
    context.globalAlpha = 1;
    setText(this.detail, this.pointed ? describeStep(this.pointed) : HINT);
  }

  /** The height is the logarithm of the token count, divided in proportion to the kinds of tokens. */
  drawTokens(context, step, x, most) {
    const total = step.prompt + step.answer;
    const height = Math.max(3, (TOP * Math.log2(1 + total)) / most);
    const answers = step.answer && Math.max(2, (height * step.answer) / total);
    context.fillStyle = this.drawing.color("answer");
    context.fillRect(x, TOP - answers, COLUMN - 2, answers);
    context.fillStyle = this.drawing.color("accepted");
    context.fillRect(x, TOP - answers, COLUMN - 2, step.answer && (answers * step.accepted) / step.answer);
    context.fillStyle = this.drawing.color("prompt");
    context.fillRect(x, TOP - height, COLUMN - 2, height - answers);
  }

  drawTimes(context, step, x, longest) {
    context.fillStyle = this.drawing.color("device");
    context.fillRect(x, TOP + 2, COLUMN - 2, Math.max(1, (BOTTOM * step.device) / longest));
    context.fillStyle = this.drawing.color("host");
    context.fillRect(x + 1, TOP + 2, COLUMN - 4, Math.max(1, (BOTTOM * hostTime(step)) / longest));
  }

  left(index) {
    return this.drawing.width - (this.shown.length - index) * COLUMN;
  }

  indexAt(x) {
    const index = Math.floor((x - this.left(0)) / COLUMN);
    return index >= 0 && index < this.shown.length ? index : null;
  }
}

/** On a CPU the step runs inside `submit`, so that time does not count as host time. */
const hostTime = (step) => step.schedule + step.commit + (step.submit < 0.5 * step.device ? step.submit : 0);
