// Targets, alternatives, the certificate and the assumptions.
function targets(plan) {
  if (!plan.targets.length) return [el("p", {}, "The plan was not compared with those of other targets.")];
  const least = Math.min(...plan.targets.filter(one => one.step_time_s !== undefined && one.step_time_s !== null).map(one => one.step_time_s));
  const rows = plan.targets.map(one => (one.step_time_s === undefined || one.step_time_s === null
    ? [one.target, number("–"), number("–"), one.reason || ""]
    : [one.target, number(seconds(one.step_time_s)), number(more(one.step_time_s / least - 1)), plan.texts.targets[one.target] || "stages that differ"]));
  const chosen = plan.targets.findIndex(one => one.target === plan.target);
  return [
    el("p", { class: "soft" }, "The fastest plan that each target can run, and what it gives up compared with the fastest of all."),
    table(["target", number("step time"), number("gives up"), "fastest plan"], rows, chosen),
  ];
}

function alternatives(plan) {
  if (!plan.runners_up.length) return null;
  const best = plan.best.step_time_s;
  return [table(["alternative", number("step time"), number("to the plan"), number("memory"), "differs in"],
    plan.runners_up.map((one, place) => [plan.texts.runners_up[place] ? plan.texts.runners_up[place].degrees : "", number(seconds(one.step_time_s)), number(more(one.step_time_s / best - 1)),
      number(memory(one.device_bytes)), plan.texts.runners_up[place] ? plan.texts.runners_up[place].differs.join(" · ") : ""]))];
}

function strategyTable(plan) {
  if (!plan.best.strategy) return null;
  return el("details", {}, el("summary", {}, "All fields of the strategy"),
    table(["field", "value"], Object.entries(plan.best.strategy).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value) || "none"])));
}

function sentences(texts) {
  return el("ul", {}, texts.map(text => el("li", {}, text)));
}
