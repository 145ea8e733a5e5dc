// The KV cache as a map: one cell per block, in the colors of the sequences that hold it.

import { Drawing, pointable } from "./canvas.js";
import { setText } from "./elements.js";
import { describeBlock, filled, holders, hue } from "./state.js";

const MAX_HEIGHT = 240;
const ZOOM_SIZES = [12, 8, 5, 3]; // cell sizes in pixels, tried in this order if showing all blocks needs cells below 8
const HINT = "Point at a block, or select one with the arrow keys.";

export class BlockMap {
  constructor(canvas, detail) {
    this.drawing = new Drawing(canvas);
    this.detail = detail;
    this.pointed = null;
    this.chosen = null; // id of the sequence whose blocks are highlighted
    this.marked = null; // list of highlighted blocks; takes precedence over `chosen`
    pointable(
      canvas,
      (x, y) => this.blockAt(x, y),
      (block, right, down) => this.move(block, right, down),
      (block) => ((this.pointed = block), this.state && this.draw(this.state)),
    );
  }

  /** Choose a cell size and the rows to show: all rows or, if they do not fit, those with held, then cached blocks. */
  layout({ numBlocks, cached }, held) {
    const width = this.drawing.canvas.clientWidth;
    const wholeSize = Math.min(18, Math.floor(Math.sqrt((width * MAX_HEIGHT) / numBlocks)));
    for (const size of wholeSize < 8 ? ZOOM_SIZES : [wholeSize]) {
      const columns = Math.max(1, Math.floor(width / size));
      const numRows = Math.ceil(numBlocks / columns);
      const room = wholeSize < 8 ? Math.min(numRows, Math.floor(MAX_HEIGHT / size)) : numRows;
      const rows = new Set();
      for (const block of held.keys()) rows.add(Math.floor(block / columns));
      if (rows.size > room && size !== ZOOM_SIZES.at(-1)) continue;
      for (let block = numBlocks - 1; block >= 0 && rows.size < room; block -= 1) if (cached[block]) rows.add(Math.floor(block / columns));
      for (let row = 0; rows.size < room; row += 1) rows.add(row);
      this.setGrid(size, columns, [...rows].slice(0, room).sort((one, other) => one - other));
      return;
    }
  }

  setGrid(size, columns, rows) {
    const width = this.drawing.canvas.clientWidth / columns;
    const tops = new Map(rows.map((row, index) => [row, index * size]));
    this.grid = { size, columns, rows, tops, width, gap: size > 8 ? 2 : size > 4 ? 1 : 0.5 };
  }

  draw(state, held = holders(state)) {
    this.state = state;
    this.layout(state, held);
    const { rows, columns, size } = this.grid;
    const context = this.drawing.begin(rows.length * size);
    const colors = {
      free: this.drawing.color("free"),
      cached: this.drawing.color("cached"),
      light: this.drawing.color("cell-light"),
      chroma: this.drawing.color("cell-chroma"),
      mark: this.drawing.color("mark"),
    };
    this.numShown = 0;
    for (const row of rows) {
      const end = Math.min((row + 1) * columns, state.numBlocks);
      for (let block = row * columns; block < end; block += 1) this.drawCell(context, block, held.get(block), colors);
      this.numShown += end - row * columns;
    }
    if (this.pointed !== null) this.drawPointer(context, colors.mark);
    setText(this.detail, this.pointed === null ? HINT : describeBlock(state, this.pointed, held));
  }

  drawCell(context, block, owners, colors) {
    const { size, gap } = this.grid;
    const [x, y, wide] = this.box(block);
    const side = size - gap;
    const isFaded = this.marked ? !this.marked.includes(block) : this.isOther(owners);
    if (!owners) {
      context.fillStyle = this.state.cached[block] ? colors.cached : colors.free;
      context.globalAlpha = isFaded ? 0.4 : 1;
      context.fillRect(x, y, wide, side);
      context.globalAlpha = 1;
      this.drawSnapshot(context, block, colors.mark);
      return;
    }
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
    this.drawSnapshot(context, block, colors.mark);
  }

  /** Mark the right edge of a block if there is a snapshot of the recurrent state after its last token. */
  drawSnapshot(context, block, color) {
    if (!this.state.snapshots?.has(block)) return;
    const [x, y, wide] = this.box(block);
    context.fillStyle = color;
    context.fillRect(x + wide - Math.max(1, wide / 6), y, Math.max(1, wide / 6), this.grid.size - this.grid.gap);
  }

  /** Return whether a sequence is highlighted and does not hold the block. */
  isOther(owners) {
    return this.chosen !== null && !owners?.some(([sequence]) => sequence.id === this.chosen);
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
    if (y === undefined) return; // the map has zoomed to other blocks
    context.strokeStyle = color;
    context.lineWidth = 2;
    context.strokeRect(x, y, wide, size - gap);
  }

  /** Return a cell's left, top and width; columns start at whole pixels, and together fill the map. */
  box(block) {
    const { columns, tops, width, gap } = this.grid;
    const left = Math.round((block % columns) * width);
    const right = Math.round(((block % columns) + 1) * width);
    return [left, tops.get(Math.floor(block / columns)), right - left - gap];
  }

  blockAt(x, y) {
    if (!this.state) return null;
    const { size, columns, rows, width } = this.grid;
    const column = Math.floor(x / width);
    const block = rows[Math.floor(y / size)] * columns + column;
    return column < columns && block < this.state.numBlocks ? block : null;
  }

  move(block, right, down) {
    if (!this.state) return null;
    const { columns, rows } = this.grid;
    const cell = block === null ? -1 : rows.indexOf(Math.floor(block / columns)) * columns + (block % columns);
    const next = Math.max(0, Math.min(rows.length * columns - 1, cell + right + down * columns));
    return Math.min(this.state.numBlocks - 1, rows[Math.floor(next / columns)] * columns + (next % columns));
  }
}
