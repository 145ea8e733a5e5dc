// The KV cache as a map: one cell for each block, in the colours of the sequences that hold it.

import { Drawing, pointable } from "./canvas.js";
import { setText } from "./elements.js";
import { describeBlock, filled, holders, hue } from "./state.js";

const MAX_HEIGHT = 240;
const HINT = "Point at a block, or choose one with the arrow keys.";

export class BlockMap {
  constructor(canvas, detail) {
    this.drawing = new Drawing(canvas);
    this.detail = detail;
    this.pointed = null;
    this.chosen = null; // the sequence whose blocks stand out
    pointable(
      canvas,
      (x, y) => this.blockAt(x, y),
      (block, right, down) => this.within((block ?? -1) + right + down * this.grid.columns),
      (block) => ((this.pointed = block), this.state && this.draw(this.state)),
    );
  }

  layout(numBlocks) {
    const width = this.drawing.canvas.clientWidth;
    const size = Math.max(3, Math.min(18, Math.floor(Math.sqrt((width * MAX_HEIGHT) / numBlocks))));
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(numBlocks / columns);
    this.grid = { size, columns, rows, width: width / columns, gap: size > 8 ? 2 : size > 4 ? 1 : 0.5 };
  }

  draw(state, held = holders(state)) {
    this.state = state;
    this.layout(state.numBlocks);
    const { rows, size } = this.grid;
    const context = this.drawing.begin(rows * size);
    const colors = {
      free: this.drawing.color("free"),
      cached: this.drawing.color("cached"),
      light: this.drawing.color("cell-light"),
      chroma: this.drawing.color("cell-chroma"),
      mark: this.drawing.color("mark"),
    };
    for (let block = 0; block < state.numBlocks; block += 1) {
      this.drawCell(context, block, held.get(block), colors);
    }
    if (this.pointed !== null) this.drawPointer(context, colors.mark);
    setText(this.detail, this.pointed === null ? HINT : describeBlock(state, this.pointed, held));
  }

  drawCell(context, block, owners, colors) {
    const { size, gap } = this.grid;
    const [x, y, wide] = this.box(block);
    const side = size - gap;
    if (!owners) {
      context.fillStyle = this.state.cached.has(block) ? colors.cached : colors.free;
      context.globalAlpha = this.chosen === null ? 1 : 0.4;
      context.fillRect(x, y, wide, side);
      context.globalAlpha = 1;
      return;
    }
    const isFaded = this.chosen !== null && owners.every(([sequence]) => sequence.id !== this.chosen);
    const width = wide / Math.min(owners.length, 3);
    owners.slice(0, 3).forEach((owner, index) => {
      const height = side * filled(this.state, owner);
      context.fillStyle = `oklch(${colors.light} ${colors.chroma} ${hue(owner[0].id)})`;
      context.globalAlpha = isFaded ? 0.1 : 0.3;
      context.fillRect(x + index * width, y, width, side);
      context.globalAlpha = isFaded ? 0.25 : 1;
      context.fillRect(x + index * width, y + side - height, width, height);
    });
    context.globalAlpha = 1;
    if (owners.length > 1 && size > 8 && !isFaded) this.drawDot(context, x + wide / 2, y + side / 2, colors.mark);
  }

  drawDot(context, x, y, color) {
    context.fillStyle = color;
    context.beginPath();
    context.arc(x, y, this.grid.size / 7, 0, 7);
    context.fill();
  }

  drawPointer(context, color) {
    const { size, gap } = this.grid;
    const [x, y, wide] = this.box(this.pointed);
    context.strokeStyle = color;
    context.lineWidth = 2;
    context.strokeRect(x, y, wide, size - gap);
  }

  /** Left, top and width, on whole pixels; together the columns fill the map. */
  box(block) {
    const { size, columns, width, gap } = this.grid;
    const left = Math.round((block % columns) * width);
    const right = Math.round(((block % columns) + 1) * width);
    return [left, Math.floor(block / columns) * size, right - left - gap];
  }

  blockAt(x, y) {
    if (!this.state) return null;
    const { size, columns, width } = this.grid;
    const column = Math.floor(x / width);
    const block = Math.floor(y / size) * columns + column;
    return column < columns && block >= 0 && block < this.state.numBlocks ? block : null;
  }

  within(block) {
    return this.state ? Math.max(0, Math.min(this.state.numBlocks - 1, block)) : null;
  }
}
