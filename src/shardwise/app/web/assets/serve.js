// The page of `shardwise serve`: a form, and below it the report of the answer.
const FIELDS = [
  ["model", "model", "text", { list: "models", value: "llama-3.1-8b", required: true }],
  ["cluster", "cluster", "text", { list: "clusters", value: "2x8xH100-SXM", required: true }],
  ["seq_len", "sequence length", "number", { value: "8192", min: 1, required: true }],
  ["global_batch_size", "global batch", "number", { value: "128", min: 1, required: true }],
  ["mean_sample_len", "packed samples", "number", { placeholder: "a sequence is one sample", min: 1 }],
  ["target", "target", "select"], ["objective", "objective", "select"],
  ["dtype", "number format", "text", { placeholder: "best of the devices" }], ["optimizer", "optimizer", "select"],
  ["memory_margin", "memory to keep free", "number", { value: "0.05", min: 0, max: 0.9, step: 0.01 }],
  ["inter_node", "network card", "text", { placeholder: "default, or 200Gb/s" }],
  ["fix", "fixed fields", "text", { placeholder: "tp=8,pp=2" }],
];
const SLIDERS = [["inter_node_bandwidth", "bandwidth between nodes"], ["intra_node_bandwidth", "bandwidth within nodes"], ["memory", "memory of a device"], ["nodes", "nodes"]];
const FACTORS = [0.25, 0.5, 0.75, 1, 1.5, 2, 4];

class Asker {
  constructor(found) {
    this.found = found;
    this.config = null;
    this.last = null;
    this.kept = null;
    this.running = null;
    this.inputs = {};
    const choices = { target: found.targets, objective: found.objectives, optimizer: found.optimizers };
    const cells = FIELDS.map(([name, label, kind, more]) => {
      const id = "field-" + name;
      const input = kind === "select"
        ? el("select", { id }, choices[name].map(one => el("option", { value: one }, one || "recommended")))
        : el("input", { id, type: kind, autocomplete: "off", ...more });
      this.inputs[name] = input;
      return el("div", { class: "field" }, el("label", { for: id }, label), input);
    });
    const upload = el("input", { id: "field-config", type: "file", accept: ".json,application/json", on: { change: () => this.read(upload) } });
    cells.push(el("div", { class: "field" }, el("label", { for: "field-config" }, "or a config.json"), upload));
    this.state = el("p", { role: "status", class: "soft" }, "The answer appears below.");
    this.cancelButton = el("button", { type: "button", disabled: true, on: { click: () => this.cancel() } }, "Cancel");
    this.keepButton = el("button", { type: "button", disabled: true, on: { click: () => this.keep() } }, "Keep to compare");
    this.result = el("div", {});
    this.sliders = el("div", { class: "form" });
    this.form = el("form", { on: { submit: event => { event.preventDefault(); this.ask(this.question()); } } },
      el("div", { class: "form" }, cells),
      el("div", { class: "row controls" }, el("button", { type: "submit" }, "Ask"), this.cancelButton, this.keepButton),
      el("datalist", { id: "models" }, found.models.map(one => el("option", { value: one }))),
      el("datalist", { id: "clusters" }, found.clusters.map(one => el("option", { value: one }))));
    this.element = el("div", {}, this.form, this.state, this.sliders);
    window.addEventListener("hashchange", () => this.fromLink());
  }

  question() {
    const asked = {};
    for (const [name, , kind] of FIELDS) {
      const value = this.inputs[name].value.trim();
      if (value !== "") asked[name] = kind === "number" ? Number(value) : value;
    }
    if (this.config) { asked.config = this.config; delete asked.model; }
    return asked;
  }

  // A link to a question: its fields after the # of the address, which no server sees.
  fromLink() {
    let asked;
    try { asked = JSON.parse(decodeURIComponent(location.hash.slice(1))); } catch { return; }
    for (const [name] of FIELDS) if (asked[name] !== undefined) this.inputs[name].value = String(asked[name]);
    if (JSON.stringify(asked) !== JSON.stringify(this.last)) this.ask(asked);
  }

  async read(input) {
    this.config = null;
    if (!input.files.length) return;
    try {
      this.config = JSON.parse(await input.files[0].text());
      this.say(`The model is that of ${input.files[0].name}.`);
    } catch (error) { this.say(`${input.files[0].name} is not JSON: ${error.message}`, "bad"); }
  }

  say(text, kind = "soft") {
    this.state.className = kind;
    this.state.textContent = text;
  }

  cancel() {
    if (this.running) this.running.abort();
  }

  async ask(question) {
    this.cancel();
    const own = this.running = new AbortController();
    this.cancelButton.disabled = false;
    this.say("Asking…");
    try {
      const answered = await fetch("questions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question), signal: own.signal });
      if (!answered.ok) throw new Error((await answered.json()).error.message);
      await this.lines(answered.body.getReader(), record => this.take(record, question));
    } catch (error) {
      this.say(own.signal.aborted ? "Cancelled." : error.message, own.signal.aborted ? "soft" : "bad");
    }
    if (this.running === own) { this.running = null; this.cancelButton.disabled = true; }
  }

  async lines(reader, act) {
    const decoder = new TextDecoder();
    let left = "";
    for (;;) {
      const { value, done } = await reader.read();
      left += decoder.decode(value || new Uint8Array(), { stream: !done });
      const parts = left.split("\n");
      left = parts.pop();
      for (const part of parts) if (part) act(JSON.parse(part));
      if (done) return;
    }
  }

  take(record, question) {
    if (record.progress) this.say(record.progress);
    if (record.error) this.say([record.error.key, record.error.message, record.error.found && `found ${record.error.found}`, record.error.allowed && `allowed: ${record.error.allowed}`].filter(Boolean).join("; "), "bad");
    if (!record.report) return;
    if (!question.changes) {
      this.last = question;
      const { config, ...shared } = question;
      if (!config) history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(shared)));
    }
    this.say(question.config ? "Answered." : "Answered. The address of this page is a link to the question.", "good");
    this.show(record.report.plans);
  }

  show(plans) {
    this.plans = plans;
    this.keepButton.disabled = false;
    pictures.length = 0;
    this.result.replaceChildren(...reportParts(this.kept && plans.length === 1 ? [this.kept, plans[0]] : plans));
    this.drawSliders();
    redraw();
  }

  keep() {
    this.kept = this.plans.at(-1);
    this.kept.file = this.kept.file || `kept: ${this.kept.model.name} on ${this.kept.cluster.name}`;
    this.say("Kept: the next answer stands next to it.");
  }

  drawSliders() {
    if (!this.last || this.sliders.childElementCount) return;
    this.sliders.append(...SLIDERS.map(([name, label]) => {
      const shown = el("output", {}, "1 ×"), slider = el("input", { id: "what-" + name, type: "range", min: 0, max: FACTORS.length - 1, step: 1, value: 3,
        on: { input: () => { shown.textContent = `${FACTORS[slider.value]} ×`; }, change: () => this.whatIf() } });
      slider.name = name;
      return el("div", { class: "field" }, el("label", { for: "what-" + name }, `what if: ${label} `, shown), slider);
    }));
  }

  whatIf() {
    const changed = [...this.sliders.querySelectorAll("input")].filter(one => FACTORS[one.value] !== 1).map(one => `${one.name}=${FACTORS[one.value]}x`);
    const question = { ...this.last };
    if (changed.length) question.changes = changed.join(",");
    this.ask(question);
  }
}

function servePage(found) {
  header("shardwise", ["Ask for the best way to train a model on a cluster."]);
  const asker = new Asker(found);
  document.getElementById("main").append(section("The question", asker.element), asker.result);
  document.body.append(el("footer", {}, "shardwise"));
  asker.fromLink();
}
