// The waterfall of the step, and memory as stacked bars.
const TERM_COLOURS = [
  [/communication|gather|reduc|gradients|shard/, "comm"],
  [/bubble|idle|waiting|host|overhead/, "end"],
  [/optimizer|norm|end_of_step/, "weight"],
];
function termColour(name) {
  const found = TERM_COLOURS.find(([pattern]) => pattern.test(name));
  return found ? found[1] : "forward";
}

// A row of a bar chart: its name, the pieces of its bar, and the amount.
function bar(name, pieces, amount, isStrong) {
  const weight = isStrong ? "b" : "div";
  return el("div", { class: "bar" }, el(weight, { class: "name" }, name), el("div", { class: "track", "aria-hidden": "true" }, pieces), el(weight, { class: "amount" }, amount));
}

function share(part, whole) {
  return (100 * part / whole).toFixed(3) + "%";
}

function waterfall(plan, longest) {
  const terms = Object.entries(plan.best.breakdown), whole = plan.best.step_time_s;
  const order = { forward: 0, weight: 1, comm: 2, end: 3 };
  const shown = terms.filter(([, value]) => Math.abs(value) >= 1e-4 * whole)
    .sort((a, b) => order[termColour(a[0])] - order[termColour(b[0])] || b[1] - a[1]);
  const left = terms.filter(([, value]) => Math.abs(value) < 1e-4 * whole).reduce((sum, [, value]) => sum + value, 0);
  let at = 0;
  const rows = shown.map(([name, value]) => {
    const from = value < 0 ? at + value : at;
    at += value;
    const css = { left: share(from, longest), width: share(Math.abs(value), longest), background: `var(--${termColour(name)})` };
    return bar(plan.texts.terms[name] || name, [el("i", { class: value < 0 ? "over" : null, css })], `${seconds(value)} · ${percent(value / whole)}`);
  });
  if (Math.abs(left) > 0)
    rows.push(bar("other terms", [], seconds(left)));
  rows.push(bar("step", [el("i", { css: { left: "0", width: share(whole, longest), background: "var(--ink)" } })], seconds(whole), true));
  return [el("div", { class: "bars", role: "group", "aria-label": "waterfall of the step" }, rows),
    legend([["forward", "computation"], ["weight", "optimizer"], ["comm", "communication"], ["end", "waiting and host"]])];
}

// Parts of memory in one order with one colour each.
const PARTS = ["parameters", "gradients", "optimizer", "activations", "temporaries", "gathered", "buffers", "fragmentation", "communicators", "context"];
function partColour(name) {
  const place = PARTS.indexOf(name);
  return "m" + (place >= 0 ? place : name === "allocated" ? 0 : 9);
}

function memoryBars(plan, largest) {
  const names = [], capacities = [...new Set(plan.memory_by_stage.map(stage => stage.capacity_bytes))];
  const end = largest * 1.02;
  const rows = plan.memory_by_stage.map(stage => {
    let at = 0;
    const shown = Object.entries(stage.parts).filter(([, value]) => value > 0)
      .sort((a, b) => PARTS.indexOf(a[0]) - PARTS.indexOf(b[0]));
    const pieces = shown.map(([name, value]) => {
      if (!names.includes(name)) names.push(name);
      at += value;
      return el("i", { title: `${plan.texts.terms[name] || name}: ${memory(value)}`,
        css: { left: share(at - value, end), width: share(value, end), background: `var(--${partColour(name)})` } });
    });
    const [low, high] = stage.band_bytes;
    const fits = stage.fits_probability;
    pieces.push(el("s", { css: { left: share(low, end), width: share(high - low, end) } }),
      el("u", { class: "usable", css: { left: share(stage.capacity_bytes * plan.usable_share, end) } }), el("u", { css: { left: share(stage.capacity_bytes, end) } }));
    return bar(stage.name, pieces, `${memory(stage.device_bytes)} · ${fits.toFixed(2)} fits`);
  });
  const order = PARTS.filter(name => names.includes(name)).concat(names.filter(name => !PARTS.includes(name)));
  const parts = order.map(name => [partColour(name), plan.texts.terms[name] || name]);
  return [
    el("div", { class: "bars", role: "group", "aria-label": "memory of a rank of each stage" }, rows),
    legend([...parts, ["ink", "80 % band of the peak", "mark"], ["ink", `capacity ${capacities.map(each => memory(each)).join(" or ")}`, "upright"],
      ["soft", `usable ${capacities.map(each => memory(each * plan.usable_share)).join(" or ")}`, "dotted"]]),
    el("details", {}, el("summary", {}, "Memory as a table"),
      table(["part", ...plan.memory_by_stage.map(stage => number(stage.name))],
        [...order.map(name => [plan.texts.terms[name] || name, ...plan.memory_by_stage.map(stage => number(memory(stage.parts[name] || 0, stage.capacity_bytes)))]),
          ["in all", ...plan.memory_by_stage.map(stage => number(memory(stage.device_bytes)))]])),
  ];
}
function memoryEnd(plan) {
  return Math.max(...plan.memory_by_stage.flatMap(stage => [stage.capacity_bytes, stage.band_bytes[1]]));
}

const LAYER_MECHANISMS = new Set(["tensor", "context", "expert", "pipeline"]);

// Computation, communication, overlap and idle time of the rank that works longest.
function stepParts(plan, longest) {
  const found = plan.step_parts, step = plan.best.step_time_s, rows = [];
  const piece = (from, length, name, isPale) => el("i", { class: isPale ? "over" : null, css: { left: share(from, longest), width: share(length, longest), background: `var(--${name})` } });
  rows.push(bar("computation", [piece(0, found.computation_s, "forward")], `${seconds(found.computation_s)} · ${percent(found.computation_s / step)}`));
  let at = found.computation_s;
  for (const [name, one] of Object.entries(found.communication).filter(([, each]) => each.total_s > 1e-5 * step)) {
    rows.push(bar(name.replace(/_/g, " ") + (LAYER_MECHANISMS.has(name) ? " communication" : ""), [piece(Math.max(0, at - one.hidden_s), one.hidden_s, "comm", true), piece(at, one.exposed_s, "comm")],
      one.hidden_s > 0 ? `${seconds(one.total_s)}, ${percent(one.hidden_s / one.total_s, 0)} overlapped` : `${seconds(one.total_s)}, not overlapped`));
    at += one.exposed_s;
  }
  if (found.host_s > 1e-5 * step) { rows.push(bar("waiting for the host", [piece(at, found.host_s, "end")], `${seconds(found.host_s)} · ${percent(found.host_s / step)}`)); at += found.host_s; }
  rows.push(bar("pipeline bubble", [piece(at, found.bubble_s, "end")], `${seconds(found.bubble_s)} · ${percent(found.bubble_s / step)}`));
  return [
    el("h3", {}, "Computation, communication and their overlap"),
    el("p", { class: "soft" }, `The rank that works longest: rank ${found.rank}${plan.best.layout.pipelines.length > 1 ? `, pipeline ${found.pipeline}` : ""}, stage ${found.stage}. ` +
      `Computation ${seconds(found.computation_s)} + communication ${seconds(found.communication_s)} − overlap ${seconds(found.overlap_s)} + idle ${seconds(found.idle_s)} = ${seconds(step)}.`),
    el("div", { class: "bars", role: "group", "aria-label": "computation, communication and overlap" }, rows),
    legend([["forward", "computation"], ["comm", "communication (pale: overlapped with computation)"], ["end", "idle"]]),
  ];
}
