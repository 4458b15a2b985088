// Helpers of all parts. Texts of the data become text nodes only, never markup.
const data = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;

function el(name, attributes, ...children) {
  const own = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") own.className = value;
    else if (key === "on") for (const [event, act] of Object.entries(value)) own.addEventListener(event, act);
    else if (key === "css") for (const [property, text] of Object.entries(value)) own.style.setProperty(property, text);
    else own.setAttribute(key, value === true ? "" : value);
  }
  own.append(...children.flat().filter(child => child !== null && child !== undefined));
  return own;
}

function svg(name, attributes, ...children) {
  const own = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes || {})) own.setAttribute(key, value);
  own.append(...children.flat());
  return own;
}

// Numbers as texts, in the units of the card.
function digits(value, number) {
  return Number(value.toPrecision(number)).toString();
}
function fixed(value, places) {
  return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}
function seconds(value) {
  if (value >= 1) return value < 100 ? fixed(value, 3) + " s" : fixed(value, 1) + " s";
  return digits(Math.abs(value) >= 1e-12 ? value * 1e3 : 0, 4) + " ms";
}
// Uncertain amounts: three digits, whole GiB.
function roundedSeconds(value) {
  const shown = value >= 1 ? value : value * 1e3;
  return (shown >= 100 ? count(Math.round(shown)) : shown.toPrecision(3)) + (value >= 1 ? " s" : " ms");
}
function roundedGib(bytes) {
  const amount = bytes / GIB;
  return fixed(amount, amount >= 10 ? 0 : amount >= 1 ? 1 : 2);
}
function memory(bytes, largest = 0) {
  if (Math.max(bytes, largest) >= GIB) return fixed(bytes / GIB, 1) + " GiB";
  return fixed(bytes / 2 ** 20, bytes >= 100 * 2 ** 20 ? 0 : 1) + " MiB";
}
function percent(share, places = 1) {
  return fixed(share * 100, places) + " %";
}
function more(share, places = 1) {
  return (share >= 0 ? "+" : "−") + percent(Math.abs(share), places);
}
function count(value) {
  return value.toLocaleString("en-US");
}
function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}
function rate(value) {
  for (const [unit, scale] of [["TB/s", 1e12], ["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]])
    if (value >= scale) return digits(value / scale, 4) + " " + unit;
  return digits(value, 4) + " B/s";
}
function large(value) {
  for (const [unit, scale] of [[" trillion", 1e12], [" billion", 1e9], [" million", 1e6]])
    if (value >= scale) return digits(value / scale, 3) + unit;
  return count(value);
}

// Packed columns: little-endian numbers in base64; with `values` they are indices in it.
function unpack(column) {
  const text = atob(column.data), bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
  const numbers = new { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, f32: Float32Array }[column.type](bytes.buffer);
  return column.values ? Float64Array.from(numbers, each => column.values[each]) : numbers;
}

// Numbers of ranks: "0-7,16-23".
function ranksOf(text) {
  const found = [];
  for (const part of text.split(",")) {
    if (!part) continue;
    const [first, last] = part.split("-").map(Number);
    for (let rank = first; rank <= (last === undefined ? first : last); rank++) found.push(rank);
  }
  return found;
}

// Pictures draw themselves again where the theme or the width changes.
const pictures = [];
function redraw() {
  for (const draw of pictures) draw();
}
function onRedraw(draw) {
  pictures.push(draw);
}
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// A canvas in device pixels: returns its context, scaled so that one unit is one pixel of the page.
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

// A tip next to a place in a picture, within the picture.
function showTip(tip, x, y, lines) {
  tip.replaceChildren(...lines.map((line, place) => el(place ? "div" : "b", {}, line)));
  tip.classList.add("shown");
  const frame = tip.parentElement.getBoundingClientRect();
  const right = x + 14 + tip.offsetWidth > frame.width;
  tip.style.left = Math.max(0, right ? x - 14 - tip.offsetWidth : x + 14) + "px";
  const below = y + 16 + tip.offsetHeight > frame.height && y - 12 - tip.offsetHeight > 0;
  tip.style.top = (below ? y - 12 - tip.offsetHeight : y + 16) + "px";
}
function hideTip(tip) {
  tip.classList.remove("shown");
}

let sections = 0;
function section(title, ...parts) {
  sections += 1;
  const id = title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  return el("section", { id, "aria-labelledby": id + "-title" }, el("h2", { id: id + "-title" }, title), ...parts);
}

// A table; a cell is a text, or {text, number}.
function table(headings, rows, chosen = -1) {
  const cell = (name, one) =>
    typeof one === "object" && one !== null && !(one instanceof Node)
      ? el(name, { class: one.number ? "number" : null }, one.text)
      : el(name, {}, one === null || one === undefined ? "" : one);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": headings.map(one => one.text || one).join(", ") },
    el("table", {},
      el("thead", {}, el("tr", {}, headings.map(one => { const own = cell("th", one); own.scope = "col"; return own; }))),
      el("tbody", {}, rows.map((row, place) => el("tr", { class: place === chosen ? "chosen" : null }, row.map(one => cell("td", one)))))));
}
function number(text) {
  return { text, number: true };
}
function legend(entries) {
  return el("ul", { class: "legend" }, entries.map(([name, text, kind]) =>
    el("li", {}, el("i", { class: kind, css: { background: `var(--${name})` } }), text)));
}
