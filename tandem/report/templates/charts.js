// Theme, and line and area charts as SVG, without a library.
"use strict";

const page = JSON.parse(document.getElementById("data").textContent);

function element(tag, className, parent, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function short(value) {
  return String(Number(value.toPrecision(3)));
}

function formatNumber(value) {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return short(value / 1e9) + "G";
  if (size >= 1e6) return short(value / 1e6) + "M";
  if (size >= 1e4) return short(value / 1e3) + "k";
  if (size >= 1e3) return value.toFixed(0);
  if (size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return short(value);
}

// ---- theme: the system's until the reader chooses

const root = document.documentElement;
const systemDark = window.matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;

function applyTheme() {
  const theme = chosenTheme || (systemDark.matches ? "dark" : "light");
  root.dataset.theme = theme;
  root.style.colorScheme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
}

document.getElementById("theme").addEventListener("click", () => {
  chosenTheme = root.dataset.theme === "dark" ? "light" : "dark";
  applyTheme();
});
systemDark.addEventListener("change", applyTheme);
applyTheme();

// ---- charts

const MARGIN = { left: 50, right: 10, top: 8, bottom: 20 };
const NUM_COLORS = 8;
const SMOOTHED_FROM = 25; // points; shorter curves are shown as they are
const allCharts = new Set();
let smoothing = 0;

function svgElement(tag, attributes, parent) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (parent) parent.appendChild(node);
  return node;
}

function niceStep(span, count, whole) {
  const rough = span / count;
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const units = whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10];
  const step = power * units.find((unit) => unit * power >= rough * 0.999);
  return whole ? Math.max(1, step) : step;
}

function ticks(low, high, count, whole) {
  const step = niceStep(high - low, count, whole);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) {
    found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  }
  return found;
}

// Exponential moving average without the bias towards the first value.
function smooth(values) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    sum = smoothing * sum + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return sum / weight;
  });
}

function nearestIndex(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
}

class Chart {
  constructor(parent, spec, height) {
    this.spec = spec;
    this.height = height;
    this.series = spec.series.map((entry, index) => ({
      ...entry,
      curve: page.curves[entry.metric],
      color: `var(--c${index === spec.series.length - 1 && spec.stacked ? 7 : index % NUM_COLORS})`,
    }));
    const steps = this.series.flatMap((one) => [one.curve.x[0], one.curve.x[one.curve.x.length - 1]]);
    this.firstStep = Math.min(...steps);
    this.lastStep = Math.max(...steps);
    this.card = element("article", "card chart", parent);
    const head = element("div", "chart-head", this.card);
    element("div", "chart-title", head, spec.title.replace(/[/_]/g, "$&\u200b"));
    this.reading = element("div", "chart-reading", head);
    const single = this.series.length === 1;
    const firstValue = single ? element("b", "", this.reading) : null;
    this.stepLabel = element("span", "", this.reading);
    if (spec.note) element("div", "chart-note", this.card, spec.note);
    this.legend = single ? null : element("div", "legend", this.card);
    this.values = single ? [firstValue] : this.series.map((one) => this.legendEntry(one));
    this.svg = svgElement("svg", { height, role: "img" }, this.card);
    this.svg.setAttribute("aria-label", `${spec.title} over training steps`);
    this.svg.addEventListener("pointermove", (event) => pointAt(this.stepUnder(event)));
    this.svg.addEventListener("pointerdown", (event) => pointAt(this.stepUnder(event)));
    this.svg.addEventListener("pointerleave", () => pointAt(null));
    allCharts.add(this);
    new ResizeObserver(() => this.draw()).observe(this.card);
    this.point(null);
  }

  legendEntry(one) {
    const entry = element("span", "", this.legend);
    element("i", "", entry).style.background = one.color;
    entry.append(one.label + " ");
    return element("b", "", entry);
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    this.width = width;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.replaceChildren();
    const layers = this.spec.stacked ? this.stack() : this.lines();
    this.setRange(layers);
    this.drawAxes();
    for (const layer of layers) this.drawLayer(layer);
    this.cursor = svgElement("g", {}, this.svg);
  }

  lines() {
    return this.series.map(({ curve, color }) => {
      const smoothed = smoothing > 0 && !this.spec.exact && curve.x.length >= SMOOTHED_FROM;
      return { ...curve, color, line: smoothed ? smooth(curve.y) : curve.y, smoothed };
    });
  }

  stack() {
    const steps = this.series[this.series.length - 1].curve.x;
    let base = steps.map(() => 0);
    return this.series.map(({ curve, color }) => {
      const at = new Map(curve.x.map((step, index) => [step, curve.y[index]]));
      const bottom = base;
      base = steps.map((step, index) => bottom[index] + (at.get(step) || 0));
      return { x: steps, color, bottom, top: base };
    });
  }

  setRange(layers) {
    const values = layers.flatMap((one) => [...(one.y || []), ...(one.lo || []), ...(one.hi || []), ...(one.top || [])]);
    let low = Infinity;
    let high = -Infinity;
    for (const value of values) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (this.spec.stacked) low = 0;
    if (this.spec.share && low >= 0 && high <= 1) [low, high] = [0, 1];
    else if (low >= 0 && low < 0.5 * high) low = 0;
    this.constant = low === high;
    if (this.constant) {
      const margin = Math.abs(low) * 0.1 || 1;
      [low, high] = [low - margin, high + margin];
    }
    const margin = this.spec.share && high === 1 ? 0 : 0.04 * (high - low);
    this.high = high + margin;
    this.low = low === 0 ? 0 : low - margin;
  }

  px(step) {
    const span = this.lastStep - this.firstStep || 1;
    return MARGIN.left + ((step - this.firstStep) / span) * (this.width - MARGIN.left - MARGIN.right);
  }

  py(value) {
    const inner = this.height - MARGIN.top - MARGIN.bottom;
    return MARGIN.top + (1 - (value - this.low) / (this.high - this.low)) * inner;
  }

  drawAxes() {
    const middle = (this.low + this.high) / 2;
    for (const value of this.constant ? [middle] : ticks(this.low, this.high, 4, false)) {
      const y = this.py(value);
      svgElement("line", { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y, class: "gridline" }, this.svg);
      const label = svgElement("text", { x: MARGIN.left - 7, y: y + 3.5, "text-anchor": "end" }, this.svg);
      label.textContent = formatNumber(value);
    }
    const span = Math.max(1, this.lastStep - this.firstStep);
    for (const step of ticks(this.firstStep, this.firstStep + span, Math.max(2, this.width / 90), true)) {
      if (step > this.lastStep) continue;
      const x = this.px(step);
      const anchor = x > this.width - 24 ? "end" : "middle";
      const label = svgElement("text", { x, y: this.height - 5, "text-anchor": anchor }, this.svg);
      label.textContent = formatNumber(step);
    }
  }

  path(steps, values) {
    return steps.map((step, index) => `${index ? "L" : "M"}${this.px(step).toFixed(1)},${this.py(values[index]).toFixed(1)}`).join("");
  }

  ribbon(steps, bottom, top) {
    const back = this.path([...steps].reverse(), [...bottom].reverse());
    return this.path(steps, top) + "L" + back.slice(1) + "Z";
  }

  drawLayer(layer) {
    const style = (name) => `${name}: ${layer.color}`;
    if (layer.top) {
      svgElement("path", { d: this.ribbon(layer.x, layer.bottom, layer.top), class: "area", style: style("fill") }, this.svg);
      return;
    }
    if (layer.lo) {
      svgElement("path", { d: this.ribbon(layer.x, layer.lo, layer.hi), class: "band", style: style("fill") }, this.svg);
    }
    if (layer.smoothed) {
      svgElement("path", { d: this.path(layer.x, layer.y), class: "raw", style: style("stroke") }, this.svg);
    }
    svgElement("path", { d: this.path(layer.x, layer.line), class: "line", style: style("stroke") }, this.svg);
    const dotted = (this.spec.exact && layer.x.length <= 60) || layer.x.length === 1;
    for (let index = 0; dotted && index < layer.x.length; index += 1) {
      svgElement("circle", { cx: this.px(layer.x[index]), cy: this.py(layer.y[index]), r: 3, style: style("fill") }, this.svg);
    }
  }

  stepUnder(event) {
    const box = this.svg.getBoundingClientRect();
    const inner = this.width - MARGIN.left - MARGIN.right;
    const share = Math.min(1, Math.max(0, (event.clientX - box.left - MARGIN.left) / inner));
    return this.firstStep + share * (this.lastStep - this.firstStep);
  }

  // Show the values at a step, or the last ones.
  point(step) {
    const inside = step !== null && step >= this.firstStep && step <= this.lastStep;
    let shown = this.lastStep;
    this.series.forEach(({ curve }, index) => {
      const at = inside ? nearestIndex(curve.x, step) : curve.x.length - 1;
      shown = curve.x[at];
      this.values[index].textContent = formatNumber(curve.y[at]) + this.spec.unit;
    });
    this.stepLabel.textContent = `step ${shown}`;
    this.reading.classList.toggle("pointed", inside);
    if (!this.cursor) return;
    this.cursor.replaceChildren();
    if (!inside) return;
    const x = this.px(shown);
    const ends = { y1: MARGIN.top, y2: this.height - MARGIN.bottom };
    svgElement("line", { x1: x, x2: x, ...ends, class: "cursor" }, this.cursor);
  }
}

function pointAt(step) {
  for (const chart of allCharts) chart.point(step);
}

function addChart(parent, spec, height) {
  return new Chart(parent, spec, height);
}

function specOf(chart) {
  const series = Object.entries(chart.metrics).map(([metric, label]) => ({ metric, label }));
  return { ...chart, series };
}

const sections = new Map();
for (const chart of page.charts) {
  if (!sections.has(chart.section)) sections.set(chart.section, []);
  sections.get(chart.section).push(specOf(chart));
}
for (const [name, specs] of sections) {
  const parent = document.getElementById("chart-sections");
  element("h2", "", parent, name);
  const numLeading = name === "Learning" ? 2 : 0;
  if (numLeading) {
    const lead = element("div", "grid lead", parent);
    for (const spec of specs.slice(0, numLeading)) addChart(lead, spec, 230);
  }
  const grid = element("div", "grid", parent);
  for (const spec of specs.slice(numLeading)) addChart(grid, spec, 160);
}

const slider = document.getElementById("smoothing");
function applySmoothing() {
  smoothing = Number(slider.value);
  document.getElementById("smoothing-value").textContent = smoothing.toFixed(2);
  for (const chart of allCharts) chart.draw();
}
slider.addEventListener("input", applySmoothing);
applySmoothing();

// ---- all metrics, drawn when their section is opened

const metricList = document.getElementById("metric-list");
const metricSearch = document.getElementById("metric-search");
const listed = [];

function listMetrics() {
  const wanted = metricSearch.value.trim().toLowerCase();
  for (const chart of listed.splice(0)) allCharts.delete(chart);
  metricList.replaceChildren();
  for (const metric of Object.keys(page.curves)) {
    if (!metric.toLowerCase().includes(wanted) || page.curves[metric].x.length === 0) continue;
    const spec = { title: metric, note: "", unit: "", series: [{ metric, label: metric }] };
    listed.push(addChart(metricList, spec, 110));
  }
}

document.getElementById("all-metrics").addEventListener("toggle", (event) => {
  if (event.target.open) listMetrics();
});
metricSearch.addEventListener("input", listMetrics);

const configSearch = document.getElementById("config-search");
if (configSearch) {
  configSearch.addEventListener("input", () => {
    const wanted = configSearch.value.trim().toLowerCase();
    for (const row of document.querySelectorAll("#configuration tr")) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
    }
  });
}
