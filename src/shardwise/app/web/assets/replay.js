// Tokens over time of several policies, above the number of nodes.
const POLICY_COLOURS = { static: "end", robust: "comm", expected: "weight", adaptive: "forward", oracle: "ink" };
const POLICY_DASHES = { static: "2 3", robust: "8 4", expected: "6 3 2 3", oracle: "10 4" };

class ReplayPicture {
  constructor(found) {
    this.found = found;
    this.holder = el("div", { class: "picture" });
    this.tip = el("div", { class: "tip" });
    this.status = el("div", { class: "status", role: "status" });
    this.time = null;
    this.element = el("div", {}, this.holder, el("ul", { class: "legend" }, found.curves.map(curve =>
      el("li", {}, el("i", { class: "mark", css: { background: `var(--${POLICY_COLOURS[curve.name] || "m4"})` } }), `${curve.name}: ${large(curve.tokens.at(-1))} tokens, ${curve.figures}`)),
      el("li", {}, "▲ change of the adaptive policy")), this.status);
    onRedraw(() => this.draw());
  }

  draw() {
    const width = this.holder.clientWidth, height = 420, left = 66, right = 12, split = 300, foot = 392;
    if (!width) return;
    const found = this.found, most = Math.max(...found.curves.flatMap(curve => curve.tokens), 1), nodes = Math.max(...found.nodes, 1);
    const x = time => left + time / found.end_s * (width - left - right), y = tokens => split - 6 - tokens / most * (split - 24), below = count => foot - count / (nodes * 1.15) * (foot - split - 20);
    this.x = x;
    const own = svg("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "img", "aria-label": `tokens of ${counted(found.curves.length, "policie")} over time; arrow keys move in time`.replace("policie ", "policy ") });
    for (const tick of evenTicks(most, 4)) own.append(svg("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: "grid" }), svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end", class: "soft" }, short(tick)));
    for (const tick of evenTicks(found.end_s / 3600, Math.max(2, width / 140))) own.append(svg("text", { x: x(tick * 3600), y: height - 12, "text-anchor": "middle", class: "soft" }, `${digits(tick, 4)} h`));
    for (const tick of [0, nodes]) own.append(svg("text", { x: left - 6, y: below(tick) + 4, "text-anchor": "end", class: "soft" }, count(tick)));
    own.append(svg("text", { x: left + 4, y: split + 12, class: "soft" }, "available nodes"), svg("text", { x: left + 4, y: 12, class: "soft" }, "tokens"));
    const steps = found.nodes.map((one, place) => `${place ? "V" : `M${x(found.times_s[0])} `}${below(one)}H${x(place + 1 < found.times_s.length ? found.times_s[place + 1] : found.end_s)}`).join("");
    own.append(svg("path", { d: `${steps}V${below(0)}H${x(found.times_s[0])}Z`, fill: colour("end"), opacity: 0.35 }));
    for (const curve of found.curves)
      own.append(svg("path", { d: curve.times_s.map((time, place) => `${place ? "L" : "M"}${x(time)} ${y(curve.tokens[place])}`).join(""), fill: "none",
        stroke: colour(POLICY_COLOURS[curve.name] || "m4"), "stroke-width": curve.name === "adaptive" ? 2.4 : 1.5, "stroke-dasharray": POLICY_DASHES[curve.name] || "none" }));
    const adaptive = found.curves.find(curve => curve.name === "adaptive");
    for (const times of Object.values(adaptive ? adaptive.changes_s : {})) for (const time of times)
      own.append(svg("path", { d: `M${x(time)} ${split - 12}l4 8h-8Z`, fill: colour("forward") }));
    this.cursor = svg("line", { x1: 0, x2: 0, y1: 14, y2: foot, stroke: colour("ink"), visibility: "hidden" });
    own.append(this.cursor);
    own.addEventListener("pointermove", event => { const box = own.getBoundingClientRect(); this.at((event.clientX - box.left - left) / (width - left - right) * found.end_s, false); });
    own.addEventListener("pointerleave", () => this.at(null));
    own.addEventListener("keydown", event => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") this.at(null);
      if (!by) return;
      event.preventDefault();
      this.at(this.time === null ? 0 : this.time + by * found.end_s / 50, true);
    });
    const hadFocus = this.svg !== undefined && document.activeElement === this.svg;
    this.svg = own;
    this.holder.replaceChildren(own, this.tip);
    if (hadFocus) own.focus();
  }

  at(time, isSpoken) {
    const found = this.found;
    if (time === null) { this.time = null; this.cursor.setAttribute("visibility", "hidden"); hideTip(this.tip); return; }
    this.time = Math.min(found.end_s, Math.max(0, time));
    const px = this.x(this.time), epoch = found.times_s.filter(each => each <= this.time).length - 1;
    for (const [name, value] of [["x1", px], ["x2", px], ["visibility", "visible"]]) this.cursor.setAttribute(name, value);
    const lines = [`${digits(this.time / 3600, 3)} h: ${counted(found.nodes[Math.max(0, epoch)], "node")}`, ...found.curves.map(curve => `${curve.name} ${short(between(curve, this.time))}`)];
    showTip(this.tip, px, 40, lines);
    if (isSpoken) this.status.textContent = lines.join("; ");
  }
}

function between(curve, time) {
  const place = Math.max(1, curve.times_s.findIndex(each => each >= time)), from = curve.times_s[place - 1], to = curve.times_s[place];
  return to === undefined ? curve.tokens.at(-1) : curve.tokens[place - 1] + (curve.tokens[place] - curve.tokens[place - 1]) * Math.max(0, time - from) / (to - from || 1);
}
function short(value) {
  for (const [unit, scale] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) if (value >= scale) return digits(value / scale, 3) + unit;
  return digits(value, 3);
}
function evenTicks(high, many) {
  const rough = high / many, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough), found = [];
  for (let tick = 0; tick <= high * (1 + 1e-9); tick += step) found.push(tick);
  return found;
}

function replayPage(found) {
  header(found.title, [found.subtitle]);
  show([
    section("Tokens over time", new ReplayPicture(found).element),
    section("Policies", table(["policy", number("tokens"), number("of oracle"), number("goodput"), number("changes")], found.policies.map(([name, ...rest]) => [name, ...rest.map(number)]))),
    section("Decisions", el("details", {}, el("summary", {}, `${counted(found.decisions.length, "decision")} of the adaptive policy`),
      table(["at", "decision", "available nodes", "plan", "step", "transition"], found.decisions))),
  ], "");
}
