// The plan that is recommended, and how sure it is.
function meter(low, high, value, limit) {
  const end = Math.max(high, limit || 0) * 1.05;
  const at = place => (100 * place / end).toFixed(2) + "%";
  return el("div", { class: "meter", "aria-hidden": "true" },
    el("i", { css: { left: at(low), width: at(high - low) } }),
    el("b", { css: { left: at(value) } }),
    limit ? el("b", { css: { left: at(limit), background: "var(--bad)" } }) : null);
}

function fact(name, value, note, extra) {
  return el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, el("div", { class: "value" }, value),
    note ? el("div", { class: "note" }, note) : null, extra || null));
}

function facts(plan) {
  const best = plan.best, peak = best.peak_memory_bytes;
  const [low, high] = best.band_s, [least, most] = best.memory_band_bytes;
  const shown = [
    fact("step time", seconds(best.step_time_s), `80 % band ${roundedSeconds(low)} to ${roundedSeconds(high)}`, meter(low, high, best.step_time_s)),
    fact("peak memory", `${memory(peak.device, peak.capacity).replace(" GiB", "")} of ${memory(peak.capacity)}`,
      `80 % band ${roundedGib(least)} to ${roundedGib(most)} GiB; ${best.fits_probability.toFixed(2)} likely to fit`,
      meter(least, most, peak.device, peak.capacity)),
  ];
  if (best.tokens_per_s_per_device !== null)
    shown.push(fact("throughput", `${count(Math.round(best.tokens_per_s_per_device))} tokens/s`,
      `per device; ${count(Math.round(best.tokens_per_s_per_device * plan.cluster.devices))} in all`));
  if (best.mfu !== null)
    shown.push(fact("model FLOPs utilisation", percent(best.mfu), `${percent(best.mfu_full_attention)} counting attention in full`));
  if (best.usd_per_billion_tokens !== null)
    shown.push(fact("cost", `$${fixed(best.usd_per_billion_tokens, 2)}`, "per billion tokens"));
  return el("dl", { class: "facts" }, shown);
}

function answer(plan) {
  const texts = plan.texts, details = texts.details.join(" · ");
  const software = plan.target === "any" ? "for any software" : `for ${plan.target}`;
  const options = Object.entries(plan.best.strategy && plan.best.strategy.options || {}).map(([name, value]) => `${name} ${value}`);
  return [
    el("p", { class: "headline" }, texts.division),
    el("p", { class: "soft" }, [software, details, ...options].filter(Boolean).join(" · ")),
    facts(plan),
    texts.settings.length ? el("details", {}, el("summary", {}, `The same in the words of ${plan.target}`), el("code", { class: "command" }, texts.settings.join("\n"))) : null,
    ...plan.model.notes.map(note => el("p", { class: "warn" }, note)),
    plan.idle.devices ? el("p", { class: "warn" }, `${counted(plan.idle.devices, "device")} of the cluster stay idle (ranks ${plan.idle.ranks}).`) : null,
    texts.recommended ? el("p", {}, texts.recommended) : null,
    el("h3", {}, "How sure is this?"),
    el("ul", {}, texts.sure.map(text => el("li", {}, text))),
  ];
}
