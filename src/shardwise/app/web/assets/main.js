// The page: theme, header, and the parts of the document's schema.
const THEMES = ["auto", "light", "dark"];
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";
function setTheme(name) {
  theme = name;
  document.documentElement.dataset.theme = name === "auto" ? (prefersDark.matches ? "dark" : "light") : name;
  redraw();
}
prefersDark.addEventListener("change", () => { if (theme === "auto") setTheme("auto"); });
window.addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; redraw(); });
window.addEventListener("afterprint", () => setTheme(theme));

function themeSwitch() {
  const choice = el("select", { id: "theme", on: { change: event => setTheme(event.target.value) } }, THEMES.map(name => el("option", { value: name }, name)));
  return el("div", { class: "row controls" }, el("label", { for: "theme" }, "theme"), choice);
}

function header(title, facts) {
  document.getElementById("top").append(
    el("div", { class: "row between" }, el("h1", {}, title), themeSwitch()),
    ...facts.map(text => el("p", { class: "soft" }, text)));
}

function questionText(plan) {
  const job = plan.job, size = plan.model.parameters === null ? [] : [`${large(plan.model.parameters)} parameters` +
    (plan.model.active_parameters !== plan.model.parameters ? `, ${large(plan.model.active_parameters)} active` : "")];
  return [...size, counted(plan.cluster.devices, "device"), `${count(job.global_batch_size)} × ${count(job.seq_len)} = ${large(job.global_batch_size * job.seq_len)} tokens a step`, job.dtype, job.optimizer].join(" · ");
}

// One part of the page for each plan; of several plans they stand side by side.
function each(plans, part) {
  if (plans.length === 1) return part(plans[0], 0);
  return [el("div", { class: "columns" }, plans.map((plan, place) => el("div", {}, el("h3", {}, nameOf(plan, place)), part(plan, place))))];
}
function nameOf(plan, place) {
  return plan.file || `plan ${"AB"[place]}: ${plan.model.name} on ${plan.cluster.name}`;
}

function report(found) {
  const plans = found.plans, isOne = plans.length === 1;
  header(isOne ? `${plans[0].model.name} on ${plans[0].cluster.name}` : plans.map(nameOf).join(" compared with "),
    isOne ? [questionText(plans[0])] : plans.map((plan, place) => `${"AB"[place]}: ${plan.model.name} on ${plan.cluster.name} · ${questionText(plan)}`));
  show(reportParts(plans), plans.map(plan => plan.plan_hash).filter(Boolean).join(" · "));
}

function reportParts(plans) {
  const isOne = plans.length === 1;
  const ends = plans.flatMap(plan => [plan.best.step_time_s, plan.measured ? plan.measured.step_time_s : 0]);
  const longest = Math.max(...ends), largest = Math.max(...plans.map(memoryEnd));
  const view = new TimeView(longest), parts = [];
  if (plans[0].measured) parts.push(section("Predicted and measured", ...measured(plans[0])));
  parts.push(section(isOne ? "The recommended plan" : "The two plans", ...each(plans, answer)));
  if (!isOne) parts.push(section("What differs", differences(plans)));
  parts.push(section("Where the time goes", ...each(plans, plan => [...waterfall(plan, longest), ...stepParts(plan, longest)])));
  parts.push(section("Where the memory goes", ...each(plans, plan => memoryBars(plan, largest))));
  parts.push(section("The pipeline", ...plans.flatMap((plan, place) => [isOne ? null : el("h3", {}, nameOf(plan, place)), ...pipelines(plan, view), ...measuredPipeline(plan, view)])));
  parts.push(section("Layout on the cluster", ...each(plans, layout)));
  parts.push(section("Time against memory", ...each(plans, frontier)));
  parts.push(section("Targets", ...each(plans, targets)));
  if (plans.some(plan => plan.runners_up.length)) parts.push(section("Alternatives", ...each(plans, alternatives)));
  parts.push(section("What is proven", ...each(plans, plan => [sentences(plan.texts.certificate)])));
  parts.push(section("Assumptions", ...each(plans, plan => [sentences(plan.texts.assumptions), strategyTable(plan)])));
  parts.push(section("Next", ...each(plans, plan => plan.texts.commands.map(text => el("code", { class: "command" }, text)))));
  return parts;
}

const MEASURED_PARTS = ["forward", "backward", "waiting", "after"];
function measured(plan) {
  const found = plan.measured, rows = found.stages.flatMap(stage => MEASURED_PARTS.map((part, place) => {
    const a = stage.predicted[part + "_s"], b = stage.measured[part + "_s"];
    return [place ? "" : stage.name, part, number(seconds(a)), number(seconds(b)), number(b > 0 ? fixed(a / b, 2) : "–")];
  }));
  return [
    el("p", {}, `Predicted ${seconds(plan.best.step_time_s)}, measured ${seconds(found.step_time_s)} (${more(found.error)} error of the prediction; ${found.file}).`),
    el("p", { class: found.disorder ? "bad" : "soft" }, found.disorder || "Every rank ran its actions as planned."),
    table(["stage", "part", number("predicted"), number("measured"), number("ratio")], rows),
  ];
}
function measuredPipeline(plan, view) {
  if (!plan.measured) return [];
  return [el("h3", {}, `measured: ${plan.measured.file}`), new PipelinePicture(plan.measured.pipeline, "measured step", view).element];
}

function differences(plans) {
  const [before, after] = plans.map(plan => plan.best), rows = [];
  const row = (name, a, b, text) => rows.push([name, number(text(a)), number(text(b)), number((b >= a ? "+" : "−") + text(Math.abs(b - a))), number(a ? more(b / a - 1) : "")]);
  row("step time", before.step_time_s, after.step_time_s, seconds);
  row("peak memory", before.peak_memory_bytes.device, after.peak_memory_bytes.device, memory);
  if (before.tokens_per_s_per_device !== null && after.tokens_per_s_per_device !== null)
    row("tokens/s per device", before.tokens_per_s_per_device, after.tokens_per_s_per_device, value => count(Math.round(value)));
  if (before.usd_per_billion_tokens !== null && after.usd_per_billion_tokens !== null)
    row("dollars per billion tokens", before.usd_per_billion_tokens, after.usd_per_billion_tokens, value => fixed(value, 2));
  for (const name of new Set([...Object.keys(before.breakdown), ...Object.keys(after.breakdown)])) {
    const a = before.breakdown[name] || 0, b = after.breakdown[name] || 0;
    if (Math.max(Math.abs(a), Math.abs(b)) >= 1e-3 * before.step_time_s) row(plans[0].texts.terms[name] || plans[1].texts.terms[name] || name, a, b, seconds);
  }
  const flat = best => (best.strategy ? { ...best.strategy, ...best.strategy.options, options: "" } : {}), [first, second] = [flat(before), flat(after)];
  const fields = [...new Set([...Object.keys(first), ...Object.keys(second)])].filter(name => first[name] !== second[name]);
  return el("div", {}, table(["", number("A"), number("B"), number("difference"), number("")], rows),
    fields.length ? table(["field", "A", "B"], fields.map(name => [name, shown_(first[name]), shown_(second[name])])) : null);
}

function shown_(value) {
  return value === undefined ? "–" : value === "" ? "none" : String(value);
}

function show(parts, mark) {
  const nav = el("nav", { "aria-label": "parts of the page" }, parts.map(part => el("a", { href: "#" + part.id }, part.querySelector("h2").textContent)));
  document.getElementById("top").append(nav);
  document.getElementById("main").append(...parts);
  document.body.append(el("footer", {}, `shardwise${mark ? " · " + mark : ""}`));
}

function timelinePage(found) {
  header(found.title, [found.subtitle]);
  show([section("The pipeline", ...pipelines(found, new TimeView(found.best.step_time_s)))], found.plan_hash);
}

const PAGES = {
  "shardwise.report": report, "shardwise.timeline-page": timelinePage,
  "shardwise.frontier-page": frontierPage, "shardwise.replay-page": replayPage,
  "shardwise.serve-page": typeof servePage === "function" ? servePage : null,
};
PAGES[data.schema](data);
setTheme("auto");
new ResizeObserver(redraw).observe(document.getElementById("main"));
