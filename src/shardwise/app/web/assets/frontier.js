// Step time against memory: lines of points, marked points, and the capacity of a device.
function frontier(plan) {
  if (!plan.texts.frontier_command && !plan.frontier) return [el("p", {}, "Only plans of one strategy have a frontier here.")];
  if (!plan.frontier)
    return [el("p", {}, "The plan has no frontier of step time and memory. This command adds it to the report:"), el("code", { class: "command" }, plan.texts.frontier_command)];
  const fastest = plan.frontier[0].step_time_s, peak = plan.best.peak_memory_bytes;
  const dots = plan.frontier.map((point, place) => ({
    ...point, command: plan.texts.points[place].command,
    lines: [plan.texts.points[place].division, `${more(point.step_time_s / fastest - 1)} step time compared with the fastest`],
  }));
  const own = { step_time_s: plan.best.step_time_s, device_bytes: peak.device, lines: [plan.texts.division] };
  return [new FrontierPicture([{ name: "frontier", knee: null, dots }], [{ name: "the plan", dot: own }], peak.capacity, "capacity of a device").element];
}

class FrontierPicture {
  constructor(lines, marks, limit, limitName, texts = []) {
    Object.assign(this, { lines, marks, limit, texts });
    this.points = [...lines.flatMap((line, number) => line.dots.map((dot, place) => ({ ...dot, number, name: line.name, isKnee: place === line.knee }))),
      ...marks.map(mark => ({ ...mark.dot, number: -1, name: mark.name }))];
    this.holder = el("div", { class: "picture" });
    this.tip = el("div", { class: "tip" });
    this.detail = el("div", { role: "status" }, el("p", { class: "hint" }, "Choose a point, by a click or with arrow keys, to see its plan."));
    this.legend = el("div", {});
    this.limitName = limitName;
    this.element = el("div", {}, this.holder, this.legend, this.detail);
    this.chosen = -1;
    onRedraw(() => this.draw());
  }

  colourOf(number) {
    if (number < 0) return colour("comm");
    return this.lines.length === 1 ? colour("forward") : hue(number, this.lines.length, document.documentElement.dataset.theme === "dark" ? 62 : 48);
  }

  draw() {
    const width = this.holder.clientWidth, height = Math.min(420, Math.max(250, width * 0.5));
    if (!width) return;
    const left = 66, bottom = 42, right = 14, top = 14;
    const padded = (low, high) => (high > low * 1.001 ? [low / (high / low) ** 0.07, high * (high / low) ** 0.07] : [low / 1.5, high * 1.5]);
    const times = this.points.map(one => one.step_time_s), sizes = this.points.map(one => one.device_bytes / GIB).concat(this.limit ? [this.limit / GIB] : []);
    const [t0, t1] = padded(Math.min(...times), Math.max(...times)), [m0, m1] = padded(Math.min(...sizes), Math.max(...sizes));
    const x = time => left + Math.log(time / t0) / Math.log(t1 / t0) * (width - left - right);
    const y = bytes => height - bottom - Math.log(bytes / GIB / m0) / Math.log(m1 / m0) * (height - top - bottom);
    const own = svg("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "img",
      "aria-label": `step time and memory of ${counted(this.points.length, "point")}; arrow keys move between them` });
    this.drawAxes(own, { width, height, left, right, top, bottom, t0, t1, m0, m1, x, y });
    if (this.limit) own.append(svg("line", { x1: left, x2: width - right, y1: y(this.limit), y2: y(this.limit), stroke: colour("ink"), "stroke-dasharray": "6 4" }));
    this.lines.forEach((line, number) => {
      const path = line.dots.map((one, place) => (place ? `H${x(one.step_time_s)}V${y(one.device_bytes)}` : `M${x(one.step_time_s)} ${y(one.device_bytes)}`)).join("");
      own.append(svg("path", { d: path, fill: "none", stroke: this.colourOf(number), "stroke-width": 1.5, opacity: 0.7 }));
    });
    this.places = this.points.map(one => [x(one.step_time_s), y(one.device_bytes)]);
    this.points.forEach((one, place) => {
      const [px, py] = this.places[place], isChosen = place === this.chosen, size = one.number < 0 || one.isKnee ? 8 : 0;
      const look = { fill: this.colourOf(one.number), class: "point", stroke: colour(isChosen ? "ink" : "back"), "stroke-width": isChosen ? 2.5 : 1 };
      own.append(size ? svg("path", { d: diamond(px, py, isChosen ? 10 : size), ...look }) : svg("circle", { cx: px, cy: py, r: isChosen ? 7 : 4, ...look }));
    });
    this.drawNames(own, width, height);
    own.addEventListener("click", event => { const place = this.nearest(event); if (place >= 0) this.choose(place); });
    own.addEventListener("keydown", event => this.key(event));
    own.addEventListener("pointermove", event => this.hover(event));
    own.addEventListener("pointerleave", () => hideTip(this.tip));
    const hadFocus = this.svg !== undefined && document.activeElement === this.svg;
    this.svg = own;
    this.holder.replaceChildren(own, this.tip);
    if (hadFocus) own.focus();
    this.drawLegend();
  }

  drawAxes(own, { width, height, left, right, top, bottom, t0, t1, m0, m1, x, y }) {
    const memoryTicks = logTicks(m0, m1, 2), timeTicks = logTicks(t0, t1, 10), isShort = t1 < 1;
    const places = step => Math.max(3, Math.ceil(Math.log10(1 / Math.max(step, 1e-9))) + 1);
    const spread = ticks => (ticks.length > 1 ? Math.min(...ticks.slice(1).map((tick, place) => (tick - ticks[place]) / tick)) : 1);
    for (const tick of memoryTicks) own.append(svg("line", { x1: left, x2: width - right, y1: y(tick * GIB), y2: y(tick * GIB), class: "grid" }),
      svg("text", { x: left - 6, y: y(tick * GIB) + 4, "text-anchor": "end", class: "soft" }, `${digits(tick, places(spread(memoryTicks)))} GiB`));
    let end = -Infinity;
    for (const tick of timeTicks) {
      own.append(svg("line", { x1: x(tick), x2: x(tick), y1: top, y2: height - bottom, class: "grid" }));
      const text = isShort ? `${digits(tick * 1e3, places(spread(timeTicks)))} ms` : `${digits(tick, places(spread(timeTicks)))} s`;
      const half = 3.6 * text.length;
      if (x(tick) - half < end + 6 || x(tick) + half > width) continue;
      own.append(svg("text", { x: x(tick), y: height - bottom + 17, "text-anchor": "middle", class: "soft" }, text));
      end = x(tick) + half;
    }
    own.append(svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle", class: "soft" }, "step time (logarithmic)"));
  }

  // Names of marks where they overlap neither each other nor the edge.
  drawNames(own, width, height) {
    const taken = [], names = new Map();
    this.points.forEach((one, place) => { if (one.number < 0) { const key = this.places[place].join(); names.set(key, { at: this.places[place], text: names.has(key) ? `${names.get(key).text} · ${one.name}` : one.name }); } });
    for (const { at: [px, py], text } of names.values()) {
      const wide = 6.6 * text.length, tries = [[12, -10], [12, 18], [-12 - wide, -10], [-12 - wide, 18], [-wide / 2, -18], [-wide / 2, 30], [12, -30], [-12 - wide, 40], [12, 44]];
      const box = ([dx, dy]) => [px + dx, py + dy - 11, px + dx + wide, py + dy + 4];
      const cost = each => { const [a, b, c, d] = box(each); return taken.filter(([e, f, g, h]) => a < g && c > e && b < h && d > f).length + (a < 66 || c > width || b < 0 || d > height - 42 ? 5 : 0) + this.places.filter(([ex, ey]) => ex > a && ex < c && ey > b && ey < d).length * 0.2; };
      const best = tries.reduce((one, other) => (cost(other) < cost(one) ? other : one));
      taken.push(box(best));
      own.append(svg("text", { x: px + best[0], y: py + best[1], "font-weight": "600", stroke: colour("back"), "stroke-width": 3, "paint-order": "stroke" }, text));
    }
  }

  drawLegend() {
    const entries = this.lines.map((line, number) => el("li", {}, el("i", { css: { background: this.colourOf(number) } }), line.name));
    if (this.marks.length) entries.push(el("li", {}, el("i", { css: { background: "var(--comm)" } }), "marked points"));
    if (this.lines.some(line => line.knee !== null)) entries.push(el("li", {}, "◆ knee"));
    if (this.limit) entries.push(el("li", {}, el("i", { class: "mark", css: { background: "var(--ink)" } }), `${this.limitName} ${memory(this.limit)}`));
    this.legend.replaceChildren(el("ul", { class: "legend" }, entries));
  }

  nearest(event) {
    const box = this.svg.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    let best = -1, least = 22 ** 2;
    this.places.forEach(([x, y], place) => { const distance = (x - px) ** 2 + (y - py) ** 2; if (distance <= least) { best = place; least = distance; } });
    return best;
  }

  texts_(one) {
    return [`${one.name}: ${seconds(one.step_time_s)}, ${memory(one.device_bytes)}`, ...one.lines];
  }

  hover(event) {
    const place = this.nearest(event);
    if (place < 0) hideTip(this.tip); else showTip(this.tip, ...this.places[place], this.texts_(this.points[place]));
  }

  choose(place) {
    this.chosen = place;
    this.draw();
    const one = this.points[place], [head, ...rest] = this.texts_(one);
    this.detail.replaceChildren(el("p", {}, el("b", {}, head), " · ", rest.join(" · ")),
      ...(one.command ? [el("code", { class: "command" }, one.command)] : []),
      ...(one.more && one.more.length ? [el("pre", {}, one.more.map(each => this.texts[each]).join("\n"))] : []));
  }

  key(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const many = this.points.length;
    this.choose(this.chosen < 0 ? (by > 0 ? 0 : many - 1) : (this.chosen + by + many) % many);
  }
}

function diamond(x, y, size) {
  return `M${x} ${y - size}L${x + size} ${y}L${x} ${y + size}L${x - size} ${y}Z`;
}

// Ticks of a logarithmic axis: multiples of powers of the base, or even steps where the axis is short.
function logTicks(low, high, base) {
  for (const multiples of base === 2 ? [[1], [1, 1.5]] : [[1], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]]) {
    const found = [];
    for (let power = Math.floor(Math.log(low) / Math.log(base)) - 1; power <= Math.ceil(Math.log(high) / Math.log(base)); power++)
      for (const each of multiples) { const tick = each * base ** power; if (tick >= low && tick <= high) found.push(tick); }
    if (found.length >= 4) return found.length > 9 ? found.filter((_, place) => place % 2 === 0) : found;
  }
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 2.5, 5, 10].map(each => each * power).find(each => each >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) found.push(tick);
  return found;
}

function frontierPage(found) {
  header(found.title, [found.subtitle]);
  const points = [...found.lines.flatMap(line => line.dots.map(dot => [line.name, dot])), ...found.marks.map(mark => [mark.name, mark.dot])];
  show([
    section("Time against memory", new FrontierPicture(found.lines, found.marks, found.limit_bytes, "limit", found.texts).element),
    section("All points", el("details", {}, el("summary", {}, counted(points.length, "point")),
      table(["curve or mark", number("step time"), number("memory"), "layout"], points.map(([name, dot]) => [name, number(seconds(dot.step_time_s)), number(memory(dot.device_bytes)), dot.lines.join(" · ")])))),
  ], "");
}
