// The layout as a grid of ranks on nodes, coloured by their group.
const AXES = ["tp", "cp", "dp", "pp"];
const AXIS_NAMES = { tp: "tensor parallel", cp: "context parallel", dp: "data parallel", pp: "pipeline", ep: "expert parallel", gradients: "gradient reduction" };
const REDUCTION = ["gradient_reduction", "parameter_gathering"];
const AXIS_MECHANISMS = { tp: ["tensor"], cp: ["context"], ep: ["expert"], dp: REDUCTION, gradients: REDUCTION, pp: ["pipeline"] };

// Groups of ranks by name: `of` has the number of each rank's group, -1 for none.
function groupsOf(plan) {
  const devices = plan.cluster.devices, found = {}, stages = [];
  const stage = new Int32Array(devices).fill(-1), pipeline = new Int32Array(devices).fill(-1);
  plan.best.layout.pipelines.forEach((one, number) => one.stages.forEach((each, place) => {
    const ranks = ranksOf(each.ranks);
    stages.push(ranks);
    for (const rank of ranks) { stage[rank] = place; pipeline[rank] = number; }
  }));
  const most = Math.max(...stage) + 1;
  if (most > 1) found.stage = { name: "pipeline stage", of: stage, ordered: most };
  const strategy = plan.best.strategy;
  if (!strategy) {
    if (plan.best.layout.pipelines.length > 1) found.pipeline = { name: "data-parallel pipeline", of: pipeline };
    return found;
  }
  const firsts = {};
  let stride = 1;
  for (const axis of strategy.axis_order.split("-")) {
    const size = strategy[axis], own = stride;
    firsts[axis] = rank => rank - Math.floor(rank / own) % size * own;
    if (size > 1) found[axis] = grouped(AXIS_NAMES[axis], stage, firsts[axis]);
    stride *= size;
  }
  // Context-parallel ranks hold the same weights: gradients are reduced over both.
  if (strategy.cp > 1) found.gradients = grouped(AXIS_NAMES.gradients, stage, rank => firsts.cp(firsts.dp(rank)));
  if (strategy.ep > 1) {
    const of = new Int32Array(devices).fill(-1);
    let base = 0;
    for (const ranks of stages) {
      const sorted = [...ranks].sort((a, b) => a - b), block = strategy.etp * strategy.ep;
      sorted.forEach((rank, place) => { of[rank] = base + Math.floor(place / block) * strategy.etp + place % strategy.etp; });
      base += sorted.length / strategy.ep;
    }
    found.ep = { name: AXIS_NAMES.ep, of };
  }
  return found;
}

function grouped(name, stage, first) {
  const numbers = new Map(), of = new Int32Array(stage.length).fill(-1);
  for (let rank = 0; rank < stage.length; rank++) {
    if (stage[rank] < 0) continue;
    const leader = first(rank);
    if (!numbers.has(leader)) numbers.set(leader, numbers.size);
    of[rank] = numbers.get(leader);
  }
  return { name, of };
}

// The tier that the ranks of the groups need: the innermost one with all ranks of each group below one switch.
function tierOf(plan, of) {
  const low = new Map(), high = new Map();
  of.forEach((group, rank) => { if (group >= 0) { if (!low.has(group)) low.set(group, rank); high.set(group, rank); } });
  return plan.cluster.tiers.find(tier => [...low].every(([group, rank]) => Math.floor(rank / tier.span) === Math.floor(high.get(group) / tier.span)))
    || plan.cluster.tiers.at(-1);
}

class LayoutPicture {
  constructor(plan) {
    this.plan = plan;
    this.groups = groupsOf(plan);
    this.names = Object.keys(this.groups);
    this.chosen = this.names[0];
    this.nodes = [];
    let rank = 0;
    for (const run of plan.cluster.nodes) for (let place = 0; place < run.nodes; place++) {
      this.nodes.push({ first: rank, devices: run.devices, device_class: run.device_class });
      rank += run.devices;
    }
    this.nodeOf = new Int32Array(rank);
    this.nodes.forEach((node, place) => this.nodeOf.fill(place, node.first, node.first + node.devices));
    this.shown = -1;
    this.build();
  }

  build() {
    this.canvas = el("canvas", {
      tabindex: "0", role: "img",
      "aria-label": `layout of ${counted(this.plan.cluster.devices, "rank")} on ${counted(this.nodes.length, "node")}; arrow keys move between ranks`,
      on: {
        pointermove: event => this.show(this.rankAt(event.offsetX, event.offsetY), false),
        pointerdown: event => this.show(this.rankAt(event.offsetX, event.offsetY), true),
        pointerleave: () => this.show(-1), keydown: event => this.key(event),
      },
    });
    this.tip = el("div", { class: "tip" });
    this.status = el("div", { class: "status", role: "status" });
    this.buttons = this.names.map(name => el("button", { type: "button", "aria-pressed": String(name === this.chosen), on: { click: () => this.choose(name) } }, this.groups[name].name));
    this.element = el("div", {},
      this.names.length ? el("div", { class: "row controls", role: "group", "aria-label": "colour by" }, el("span", { class: "soft" }, "colour by"), this.buttons) : null,
      el("div", { class: "picture" }, this.canvas, this.tip), this.status);
    onRedraw(() => this.draw());
  }

  choose(name) {
    this.chosen = name;
    this.names.forEach((each, place) => this.buttons[place].setAttribute("aria-pressed", String(each === name)));
    this.draw();
  }

  // The size of cells at which all nodes fit into the width and a screen.
  place() {
    const devices = Math.max(...this.nodes.map(node => node.devices));
    this.columns = devices <= 4 ? devices : Math.ceil(Math.sqrt(devices * 2));
    this.lines = Math.ceil(devices / this.columns);
    for (this.cell = 22; this.cell > 3; this.cell--) {
      this.gap = this.cell > 12 ? 10 : this.cell > 7 ? 6 : 3;
      this.head = this.cell > 12 ? 14 : 0;
      this.pitch = this.columns * this.cell + this.gap;
      this.perLine = Math.max(1, Math.floor((this.width + this.gap) / this.pitch));
      this.step = this.lines * this.cell + this.gap + this.head;
      this.height = Math.ceil(this.nodes.length / this.perLine) * this.step;
      if (this.height <= 520 && this.pitch <= this.width + this.gap) break;
    }
  }

  corner(rank) {
    const place = this.nodeOf[rank], own = rank - this.nodes[place].first;
    return [place % this.perLine * this.pitch + own % this.columns * this.cell,
      Math.floor(place / this.perLine) * this.step + this.head + Math.floor(own / this.columns) * this.cell];
  }

  draw() {
    this.width = this.canvas.clientWidth;
    if (!this.width) return;
    this.place();
    const context = sized(this.canvas, this.width, this.height), group = this.groups[this.chosen];
    const isDark = document.documentElement.dataset.theme === "dark", light = isDark ? 62 : 52;
    const ink = colour("ink"), soft = colour("soft"), line = colour("line");
    context.clearRect(0, 0, this.width, this.height);
    context.font = "11px system-ui, sans-serif";
    const own = group && this.shown >= 0 ? group.of[this.shown] : -1;
    for (let rank = 0; rank < this.nodeOf.length; rank++) {
      const [x, y] = this.corner(rank), number = group ? group.of[rank] : 0, size = this.cell > 5 ? this.cell - 1.5 : this.cell - 0.5;
      context.globalAlpha = own >= 0 && number !== own ? 0.35 : 1;
      context.fillStyle = number < 0 ? line : hue(number, group && group.ordered, light);
      context.fillRect(x, y, size, size);
      if (own >= 0 && number === own && this.cell > 5) { context.strokeStyle = ink; context.lineWidth = rank === this.shown ? 3 : 1; context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1); }
    }
    context.globalAlpha = 1;
    if (this.head) {
      context.fillStyle = soft;
      this.nodes.forEach((node, place) => context.fillText(`n${place}`, place % this.perLine * this.pitch, Math.floor(place / this.perLine) * this.step + 10));
    }
    Object.assign(this.canvas.dataset, { group: this.chosen || "", cell: this.cell, shown: this.shown });
  }

  rankAt(x, y) {
    const column = Math.floor(x / this.pitch), place = Math.floor(y / this.step) * this.perLine + column, node = this.nodes[place];
    if (!node || column >= this.perLine) return -1;
    const across = Math.floor((x - column * this.pitch) / this.cell), down = Math.floor((y % this.step - this.head) / this.cell);
    const own = down * this.columns + across;
    return across < this.columns && down >= 0 && own >= 0 && own < node.devices ? node.first + own : -1;
  }

  describe(rank) {
    const node = this.nodeOf[rank], lines = [`rank ${rank}`, `node ${node}, device ${rank - this.nodes[node].first} (${this.nodes[node].device_class})`];
    for (const name of this.names) {
      const group = this.groups[name], number = group.of[rank];
      if (number < 0) { lines.push("idle"); break; }
      if (group.ordered) { lines.push(`stage ${number} of ${group.ordered}`); continue; }
      const members = [];
      group.of.forEach((other, place) => { if (other === number) members.push(place); });
      const shown = members.length > 6 ? `${members.slice(0, 4).join(", ")}, … ${members.at(-1)}` : members.join(", ");
      lines.push(`${group.name} group ${number}: ${members.length} ranks (${shown})`);
    }
    return lines;
  }

  show(rank, isSpoken) {
    if (rank !== this.shown) { this.shown = rank; this.draw(); }
    if (rank < 0) { hideTip(this.tip); return; }
    const [x, y] = this.corner(rank), lines = this.describe(rank);
    showTip(this.tip, x + this.cell, y, lines);
    if (isSpoken) this.status.textContent = lines.join("; ");
  }

  key(event) {
    const last = this.nodeOf.length - 1, line = this.perLine * Math.max(...this.nodes.map(node => node.devices));
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: line, ArrowUp: -line }[event.key];
    if (event.key === "Escape") this.show(-1);
    if (by === undefined) return;
    event.preventDefault();
    this.show(this.shown < 0 ? 0 : Math.min(last, Math.max(0, this.shown + by)), true);
  }
}

function hue(number, ordered, light) {
  if (ordered) return `hsl(${265 - 225 * (ordered > 1 ? number / (ordered - 1) : 0)} 58% ${light}%)`;
  return `hsl(${(number * 137.508 + 210) % 360} ${45 + 12 * (number % 3)}% ${light + 8 * (number % 2)}%)`;
}

function links(plan) {
  const groups = groupsOf(plan), rows = [];
  for (const [name, group] of Object.entries(groups)) {
    if (name === "stage" || name === "pipeline") continue;
    const many = Math.max(...group.of) + 1, size = group.of.filter(one => one >= 0).length / many, tier = tierOf(plan, group.of);
    const mechanisms = name === "dp" && groups.gradients ? [] : AXIS_MECHANISMS[name], own = mechanisms.map(each => plan.step_parts.communication[each]).filter(Boolean);
    const total = own.reduce((sum, each) => sum + each.total_s, 0), hidden = own.reduce((sum, each) => sum + each.hidden_s, 0);
    rows.push([group.name, number(count(size)), number(count(many)), tier.name, number(rate(tier.bytes_per_s)),
      number(seconds(total)), number(percent(total / plan.best.step_time_s)), number(seconds(total - hidden))]);
  }
  if (!rows.length) return null;
  return table(["group", number("ranks each"), number("groups"), "over", number("bandwidth"), number("communication of a rank"), number("of the step"), number("not overlapped")], rows);
}

function layout(plan) {
  const counts = plan.cluster.nodes.map(run => `${count(run.nodes)} × ${run.devices} ${run.device_class}`).join(" + ");
  return [el("p", { class: "soft" }, `${counts}. Each box is a node, each cell a rank.`), new LayoutPicture(plan).element, links(plan)];
}
