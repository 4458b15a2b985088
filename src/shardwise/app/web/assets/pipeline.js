// The pipeline as a canvas: a row of actions for each rank, and below it the row's sends and collectives.
const CRITICAL = 8;
const KINDS = ["forward", "backward", "input", "weight"];
const KIND_NAMES = ["forward", "backward", "input gradient", "weight gradient"];
const AXIS_HEIGHT = 24, LEAST_SPAN = 1e-6;

// Intervals of one lane of all rows, as typed arrays; row r has those from offsets[r] to offsets[r + 1].
class Lane {
  constructor(source, names) {
    this.offsets = source.offsets;
    this.kind = unpack(source.kind);
    this.start = unpack(source.start_s);
    this.length = unpack(source.length_s);
    this.names = names;
  }

  // The first interval of a row that ends after `time`.
  first(row, time) {
    let low = this.offsets[row], high = this.offsets[row + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[middle] + this.length[middle] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  // The interval of a row at `time`, or -1.
  at(row, time, reach) {
    const found = this.first(row, time - reach);
    return found < this.offsets[row + 1] && this.start[found] <= time + reach ? found : -1;
  }

  // How many intervals of all rows are between two times.
  count(from, to) {
    let sum = 0;
    for (let row = 0; row + 1 < this.offsets.length; row++)
      sum += Math.max(0, Math.min(this.offsets[row + 1], this.first(row, to) + 1) - this.first(row, from));
    return sum;
  }
}

function rgb(text) {
  const hex = text.replace("#", "");
  return [0, 2, 4].map(place => parseInt(hex.slice(place, place + 2), 16));
}

// A part of the step that several pictures show at once.
class TimeView {
  constructor(end) {
    this.end = end;
    this.from = 0;
    this.to = end;
    this.draws = [];
    this.waiting = false;
  }

  set(from, to) {
    const span = Math.min(this.end, Math.max(to - from, this.end * LEAST_SPAN));
    this.from = Math.min(Math.max(0, from), this.end - span);
    this.to = this.from + span;
    this.schedule();
  }

  zoom(factor, around) {
    const centre = around === undefined ? (this.from + this.to) / 2 : around;
    this.set(centre - (centre - this.from) * factor, centre + (this.to - centre) * factor);
  }

  pan(share) {
    const by = share * (this.to - this.from);
    this.set(this.from + by, this.to + by);
  }

  schedule() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; for (const draw of this.draws) draw(); });
  }
}

class PipelinePicture {
  constructor(source, title, view) {
    this.source = source;
    this.view = view;
    this.rows = source.rows.length;
    this.actions = new Lane(source.actions, KIND_NAMES);
    this.sends = new Lane(source.sends, ["send forward", "send backward"]);
    this.stage = unpack(source.actions.stage);
    this.microbatch = unpack(source.actions.microbatch);
    this.chunks = new Map();
    const ofRank = source.stage_rank.map(() => 0);
    source.stage_rank.forEach((row, stage) => { this.chunks.set(stage, ofRank[row]); ofRank[row] += 1; });
    this.chunkCounts = ofRank;
    this.hasSends = this.sends.start.length + source.data_parallel.length > 0;
    this.path = this.criticalPath();
    this.shown = null;
    this.title = title;
    this.build();
  }

  // The critical actions in the order of time: their index and row.
  criticalPath() {
    const found = [];
    for (let row = 0; row < this.rows; row++)
      for (let place = this.actions.offsets[row]; place < this.actions.offsets[row + 1]; place++)
        if (this.actions.kind[place] & CRITICAL) found.push({ place, row, start: this.actions.start[place] });
    return found.sort((a, b) => a.start - b.start);
  }

  build() {
    this.canvas = el("canvas", {
      tabindex: "0", role: "img",
      "aria-label": `${this.title}: timeline of ${counted(this.rows, "rank")} with ${counted(this.actions.start.length, "action")}. ` +
        "Arrow keys move between actions, plus and minus zoom, 0 shows the whole step.",
      on: {
        pointermove: event => this.move(event), pointerleave: event => this.leave(event),
        pointerdown: event => this.press(event), pointerup: event => this.release(event), pointercancel: event => this.release(event),
        dblclick: event => this.view.zoom(0.25, this.timeAt(event.offsetX)),
        keydown: event => this.key(event),
      },
    });
    this.canvas.addEventListener("wheel", event => this.wheel(event), { passive: false });
    this.tip = el("div", { class: "tip" });
    this.status = el("div", { class: "status", role: "status" });
    this.pointers = new Map();
    const button = (text, name, act) => el("button", { type: "button", "aria-label": name, title: name, on: { click: act } }, text);
    this.element = el("div", {},
      el("div", { class: "row controls" },
        button("+", "zoom in", () => this.view.zoom(0.5)), button("−", "zoom out", () => this.view.zoom(2)),
        button("←", "earlier", () => this.view.pan(-0.4)), button("→", "later", () => this.view.pan(0.4)),
        button("whole step", "whole step", () => this.view.set(0, this.view.end)),
        button("start", "start of the step", () => this.edge(0)), button("end", "end of the step", () => this.edge(1))),
      el("div", { class: "picture" }, this.canvas, this.tip),
      this.status);
    this.view.draws.push(() => this.draw());
    onRedraw(() => this.draw());
  }

  // The warm-up or the end of the pipeline: about two micro-batches of each rank.
  edge(side) {
    const typical = this.source.makespan_s / Math.max(1, this.source.microbatches);
    const span = Math.min(this.view.end, typical * (2 * this.rows + 4));
    this.view.set(side ? this.view.end - span : 0, side ? this.view.end : span);
  }

  get gutter() {
    return this.width < 480 ? 40 : 64;
  }
  timeAt(x) {
    return this.view.from + (x - this.gutter) / (this.width - this.gutter) * (this.view.to - this.view.from);
  }
  xAt(time) {
    return this.gutter + (time - this.view.from) / (this.view.to - this.view.from) * (this.width - this.gutter);
  }

  draw() {
    this.width = this.canvas.clientWidth;
    if (!this.width) return;
    this.rowHeight = Math.max(this.hasSends ? 14 : 11, Math.min(34, Math.floor(440 / this.rows)));
    this.laneHeight = this.hasSends ? Math.max(8, Math.floor(this.rowHeight * 0.62)) : this.rowHeight - 2;
    this.height = this.rows * this.rowHeight + AXIS_HEIGHT;
    const context = this.context = sized(this.canvas, this.width, this.height);
    this.palette = Object.fromEntries(["forward", "backward", "input", "weight", "comm", "end", "path", "panel", "ink", "soft", "line", "back"].map(name => [name, colour(name)]));
    context.fillStyle = this.palette.back;
    context.fillRect(0, 0, this.width, this.height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    this.drawn = 0;
    this.drawAxis(context);
    const plot = this.width - this.gutter;
    const isDense = this.actions.count(this.view.from, this.view.to) / this.rows > plot / 3;
    for (let row = 0; row < this.rows; row++) {
      const top = row * this.rowHeight + 1;
      context.fillStyle = this.palette.panel;
      context.fillRect(this.gutter, top, plot, this.laneHeight);
      this.drawLane(context, this.actions, row, top, this.laneHeight, KINDS.map(name => this.palette[name]), isDense);
      if (this.hasSends) {
        const below = top + this.laneHeight + 1, height = Math.max(3, this.rowHeight - this.laneHeight - 4);
        this.drawLane(context, this.sends, row, below, height, [this.palette.comm, this.palette.comm], isDense);
        for (const one of this.source.data_parallel) if (one.row === row) this.drawBox(context, one.start_s, one.length_s, below, height, this.palette.comm);
      }
      this.drawBox(context, this.source.makespan_s, this.source.end_s, top, this.laneHeight, this.palette.end);
      context.fillStyle = this.palette.soft;
      context.textAlign = "right";
      context.fillText(this.source.rows[row].name, this.gutter - 6, top + this.laneHeight / 2, this.gutter - 8);
    }
    this.drawPath(context);
    this.drawSelection(context);
    Object.assign(this.canvas.dataset, { from: this.view.from, to: this.view.to, drawn: this.drawn, dense: isDense });
  }

  drawBox(context, start, length, top, height, fill) {
    const x = Math.max(this.gutter, this.xAt(start)), end = Math.min(this.width, this.xAt(start + length));
    if (end <= this.gutter || x >= this.width || length <= 0) return;
    context.fillStyle = fill;
    context.fillRect(x, top, Math.max(end - x, 0.75), height);
    this.drawn += 1;
  }

  // Single intervals where they are wide enough, else the mean colour of each column of pixels.
  drawLane(context, lane, row, top, height, fills, isDense) {
    const last = lane.offsets[row + 1], { from, to } = this.view;
    if (isDense) return this.drawDense(context, lane, row, top, height, fills);
    context.textAlign = "center";
    for (let place = lane.first(row, from); place < last && lane.start[place] < to; place++) {
      const x = Math.max(this.gutter, this.xAt(lane.start[place])), end = Math.min(this.width, this.xAt(lane.start[place] + lane.length[place]));
      const wide = end - x, gap = wide > 5 ? 1 : wide > 2 ? 0.4 : 0;
      context.fillStyle = fills[lane.kind[place] & 7];
      context.fillRect(x, top, Math.max(wide - gap, 0.5), height);
      this.drawn += 1;
      if (lane.kind[place] & CRITICAL) {
        context.fillStyle = this.palette.path;
        context.fillRect(x, top + height - 2.5, Math.max(wide - gap, 0.5), 2.5);
      }
      if (lane === this.actions && wide > 20 && height > 9) {
        context.fillStyle = "#ffffff";
        context.fillText(String(this.microbatch[place]), (x + end) / 2, top + height / 2, wide - 4);
      }
    }
    return undefined;
  }

  drawDense(context, lane, row, top, height, fills) {
    const ratio = window.devicePixelRatio || 1, columns = Math.max(1, Math.round((this.width - this.gutter) * ratio));
    const { from, to } = this.view, scale = columns / (to - from), last = lane.offsets[row + 1];
    if (!this.sums || this.sums.length !== 5 * columns) this.sums = new Float32Array(5 * columns);
    const sums = this.sums.fill(0), parts = fills.map(rgb);
    for (let place = lane.first(row, from); place < last && lane.start[place] < to; place++) {
      const x = Math.max(0, (lane.start[place] - from) * scale), end = Math.min(columns, x + lane.length[place] * scale);
      const mark = parts[lane.kind[place] & 7], critical = lane.kind[place] & CRITICAL;
      for (let column = x | 0; column < end; column++) {
        const covered = Math.min(end, column + 1) - Math.max(x, column), own = 5 * column;
        sums[own] += covered * mark[0]; sums[own + 1] += covered * mark[1]; sums[own + 2] += covered * mark[2];
        sums[own + 3] += covered;
        if (critical) sums[own + 4] += covered;
      }
      this.drawn += 1;
    }
    const strip = this.strip || (this.strip = document.createElement("canvas"));
    if (strip.width !== columns || strip.height !== 2) { strip.width = columns; strip.height = 2; }
    const own = strip.getContext("2d"), image = own.createImageData(columns, 2), pixels = image.data, path = rgb(this.palette.path);
    for (let column = 0; column < columns; column++) {
      const covered = sums[5 * column + 3], pixel = 4 * column, below = 4 * (columns + column);
      if (covered > 0) {
        for (let part = 0; part < 3; part++) pixels[pixel + part] = sums[5 * column + part] / covered;
        pixels[pixel + 3] = 255 * Math.min(1, covered);
      }
      for (let part = 0; part < 3; part++) pixels[below + part] = path[part];
      pixels[below + 3] = 255 * Math.min(1, sums[5 * column + 4]);
    }
    own.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    const plot = this.width - this.gutter;
    context.drawImage(strip, 0, 0, columns, 1, this.gutter, top, plot, height);
    if (lane === this.actions) context.drawImage(strip, 0, 1, columns, 1, this.gutter, top + height - 2.5, plot, 2.5);
  }

  // Lines between ranks where the critical path changes the rank; only while they can be told apart.
  drawPath(context) {
    const { from, to } = this.view, shown = this.path.filter(one => one.start < to && one.start + this.actions.length[one.place] > from);
    if (shown.length > 400) return;
    context.strokeStyle = this.palette.path;
    context.lineWidth = 1.5;
    context.beginPath();
    shown.forEach((one, place) => {
      const next = shown[place + 1];
      if (!next || next.row === one.row) return;
      const y = row => row * this.rowHeight + this.laneHeight - 1;
      context.moveTo(Math.max(this.gutter, this.xAt(one.start + this.actions.length[one.place])), y(one.row));
      context.lineTo(Math.max(this.gutter, this.xAt(next.start)), y(next.row));
    });
    context.stroke();
  }

  drawSelection(context) {
    const found = this.shown;
    if (!found || found.lane === null) return;
    const x = Math.max(this.gutter, this.xAt(found.start)), end = Math.min(this.width, this.xAt(found.start + found.length));
    if (end < this.gutter || x > this.width) return;
    context.strokeStyle = this.palette.ink;
    context.lineWidth = 2;
    context.strokeRect(x, found.row * this.rowHeight + 1, Math.max(end - x, 2), this.rowHeight - 2);
  }

  drawAxis(context) {
    const { from, to } = this.view, plot = this.width - this.gutter, rough = (to - from) / Math.max(2, plot / 110);
    const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough);
    const base = this.rows * this.rowHeight;
    context.textAlign = "center";
    for (let time = Math.ceil(from / step) * step; time <= to * (1 + 1e-9); time += step) {
      const x = this.xAt(time);
      context.fillStyle = this.palette.line;
      context.fillRect(x, 0, 1, base + 4);
      context.fillStyle = this.palette.soft;
      const isSeconds = this.view.end >= 1, places = Math.max(0, -Math.floor(Math.log10(step * (isSeconds ? 1 : 1e3)) + 1e-9));
      const text = fixed(isSeconds ? time : time * 1e3, Math.min(9, places)) + (isSeconds ? " s" : " ms");
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(x, half + 1), this.width - half - 1), base + 14);
    }
  }

  // What is at a place of the canvas.
  find(x, y) {
    const row = Math.floor(y / this.rowHeight);
    if (x < this.gutter || row < 0 || row >= this.rows) return null;
    const time = this.timeAt(x), reach = 1.5 * (this.view.to - this.view.from) / (this.width - this.gutter);
    if (this.hasSends && y - row * this.rowHeight > this.laneHeight + 1) {
      const one = this.source.data_parallel.find(each => each.row === row && each.start_s <= time + reach && each.start_s + each.length_s >= time - reach);
      if (one) return { lane: null, row, start: one.start_s, length: one.length_s, name: `${one.name.replace(/^(\w+) (\d+)$/, "$1 of stage $2")}, data parallel`, critical: one.critical };
      const send = this.sends.at(row, time, reach);
      if (send >= 0) return this.interval(this.sends, row, send);
    }
    const place = this.actions.at(row, time, 0);
    if (place >= 0) return this.interval(this.actions, row, place);
    if (time >= this.source.makespan_s && time <= this.source.makespan_s + this.source.end_s)
      return { lane: null, row, start: this.source.makespan_s, length: this.source.end_s, name: "gradient norm, optimizer and host", critical: true };
    return null;
  }

  interval(lane, row, place) {
    const kind = lane.kind[place], isAction = lane === this.actions;
    return {
      lane, row, place, start: lane.start[place], length: lane.length[place], critical: (kind & CRITICAL) !== 0,
      name: lane.names[kind & 7] + (isAction ? ` of micro-batch ${this.microbatch[place]}` : ""),
    };
  }

  describe(found) {
    const lines = [found.name], about = this.source.rows[found.row];
    if (found.lane === this.actions) {
      const stage = this.stage[found.place], many = this.chunkCounts[this.source.stage_rank[stage]];
      lines.push(`stage ${stage}` + (many > 1 ? `, chunk ${this.chunks.get(stage) + 1} of ${many}` : ""));
    }
    if (about.ranks) lines.push(`${about.name}: devices ${about.ranks.length > 40 ? about.ranks.slice(0, 38) + "…" : about.ranks}`);
    lines.push(`${seconds(found.length)}, from ${seconds(found.start)} to ${seconds(found.start + found.length)}`);
    if (found.critical) lines.push("on the critical path");
    return lines;
  }

  show(found, x, y, isSpoken) {
    const changed = (found && found.start) !== (this.shown && this.shown.start) || (found && found.row) !== (this.shown && this.shown.row);
    this.shown = found;
    if (changed) this.view.schedule();
    if (!found) { hideTip(this.tip); return; }
    const lines = this.describe(found);
    if (isSpoken) this.status.textContent = lines.join("; ");
    showTip(this.tip, x, y, lines);
  }

  move(event) {
    if (this.pointers.has(event.pointerId)) {
      const before = this.pointers.get(event.pointerId);
      this.pointers.set(event.pointerId, event.offsetX);
      if (this.pointers.size === 1) {
        this.view.pan((before - event.offsetX) / (this.width - this.gutter));
      } else {
        const [a, b] = [...this.pointers.values()], other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
        const distance = Math.max(20, Math.abs(before - other)), now = Math.max(20, Math.abs(a - b));
        this.view.zoom(distance / now, this.timeAt((a + b) / 2));
      }
      return;
    }
    this.show(this.find(event.offsetX, event.offsetY), event.offsetX, event.offsetY, false);
  }

  press(event) {
    this.pointers.set(event.pointerId, event.offsetX);
    this.show(this.find(event.offsetX, event.offsetY), event.offsetX, event.offsetY, true);
    if (event.pointerType === "mouse") this.canvas.setPointerCapture(event.pointerId);
  }
  release(event) {
    this.pointers.delete(event.pointerId);
  }
  leave(event) {
    this.pointers.delete(event.pointerId);
    this.show(null);
  }

  wheel(event) {
    if (!(event.ctrlKey || event.metaKey || event.shiftKey)) return;
    event.preventDefault();
    if (event.shiftKey) this.view.pan((event.deltaX || event.deltaY) / (this.width - this.gutter));
    else this.view.zoom(Math.exp(event.deltaY * 0.004), this.timeAt(event.offsetX));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = {
      "+": () => this.view.zoom(0.5), "=": () => this.view.zoom(0.5), "-": () => this.view.zoom(2),
      "0": () => this.view.set(0, this.view.end),
      ArrowRight: () => (event.shiftKey ? this.view.pan(0.3) : this.step(1)), ArrowLeft: () => (event.shiftKey ? this.view.pan(-0.3) : this.step(-1)),
      ArrowDown: () => this.changeRow(1), ArrowUp: () => this.changeRow(-1),
      Home: () => this.select(this.row, this.actions.offsets[this.row]), End: () => this.select(this.row, this.actions.offsets[this.row + 1] - 1),
      Escape: () => this.show(null),
    };
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  get row() {
    return this.shown ? this.shown.row : 0;
  }
  select(row, place) {
    const found = this.interval(this.actions, row, place), span = this.view.to - this.view.from;
    if (found.start < this.view.from || found.start + found.length > this.view.to)
      this.view.set(found.start - 0.1 * span, found.start + 0.9 * span);
    this.show(found, Math.max(this.gutter, this.xAt(found.start)), (row + 0.5) * this.rowHeight, true);
  }
  step(by) {
    const found = this.shown, row = this.row, low = this.actions.offsets[row], high = this.actions.offsets[row + 1] - 1;
    const from = found && found.lane === this.actions ? found.place + by : this.actions.first(row, this.view.from);
    this.select(row, Math.min(Math.max(from, low), high));
  }
  changeRow(by) {
    const row = this.shown ? Math.min(Math.max(this.row + by, 0), this.rows - 1) : 0;
    const time = this.shown ? this.shown.start : this.view.from;
    this.select(row, Math.min(this.actions.first(row, time), this.actions.offsets[row + 1] - 1));
  }
}

function pipelineLegend(timeline) {
  const kinds = new Set();
  for (const one of timeline.pipelines) for (const kind of unpack(one.actions.kind)) kinds.add(kind & 7);
  const entries = [["forward", "forward"]];
  if (kinds.has(1)) entries.push(["backward", "backward"]);
  if (kinds.has(2)) entries.push(["input", "input gradient"]);
  if (kinds.has(3)) entries.push(["weight", "weight gradient"]);
  if (timeline.pipelines.some(one => one.data_parallel.length || one.sends.offsets.at(-1))) entries.push(["comm", "sends, data-parallel collectives"]);
  return legend([...entries, ["end", "gradient norm, optimizer, host"], ["path", "critical path", "mark"]]);
}

const MOST_PIPELINES = 4;
function pipelines(plan, view) {
  const timeline = plan.timeline;
  if (!timeline) return [el("p", { class: "warn" }, "The schedule has too many actions for a timeline.")];
  const shown = timeline.pipelines.slice(0, MOST_PIPELINES);
  const parts = shown.map(one => {
    const many = one.numbers.length, busy = one.rows.map(row => row.busy_s / plan.best.step_time_s);
    const title = `${many > 1 ? `${many} pipelines` : timeline.pipelines.length > 1 ? `pipeline ${one.numbers[0]}` : "pipeline"}`;
    const facts = [`${timeline.schedule}`, counted(one.rows.length, "rank"), `${count(one.microbatches)} micro-batches`,
      `ranks compute ${percent(Math.min(...busy), 0)} to ${percent(Math.max(...busy), 0)} of the step`];
    return [el("p", { class: "soft" }, (timeline.pipelines.length > 1 ? title + ": " : "") + facts.join(" · ")), new PipelinePicture(one, title, view).element];
  });
  return [
    el("p", { class: "hint" }, "Drag to move, Ctrl and the wheel or the buttons to zoom; with the keyboard, arrow keys, + and −. The number in a box is its micro-batch."),
    pipelineLegend(timeline), ...parts.flat(),
    timeline.pipelines.length > shown.length ? el("p", { class: "soft" }, `${timeline.pipelines.length - shown.length} more kinds of pipelines`) : null,
  ];
}
