// The page of lockstep ui, and of the file of lockstep report, which has its data inside.
"use strict";

const POLL_EVERY = 2000;
// Seconds of training that are left from which the page says when it ends.
const LONG = 600;
const MOST_POINTS = 2000;
const MOST_ROWS = 200;
// Pixels of a chart for one mean where points fill an area.
const MEAN_PIXELS = 3;
const MOST_BARS = 100;
const SHOWN_WORKERS = 8;
const COLORS = 8;
/** Seconds between the marks of an axis of time. */
const TIME_TICKS = [10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
/** The largest number of points of a line that are shown as dots. */
const MOST_DOTS = 60;
/** The colors of the series of a metric by their role. */
const ROLES = { train: "train", epoch: "series-0", validation: "series-1" };

// ------------------------------------------------------------------------------------------------ elements

const byId = (id) => document.getElementById(id);

/** Returns an element. Children that are strings become text, never markup. */
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Fills a table. A column is [title, text of a row, its class]: `number`, `long` for text of any length, or none.
 * On a narrow page, a row is a block, whose cells need their titles, and the roles that blocks do not have.
 */
function fillTable(table, columns, rows, empty, classOf = () => "") {
  const head = make("tr", { role: "row" }, ...columns.map(([title, , kind]) => make("th", { scope: "col", role: "columnheader", class: kind }, title)));
  const body = rows.map((row) => make("tr", { role: "row", class: classOf(row) || null },
    ...columns.map(([title, text, kind]) => make("td", { role: "cell", class: kind, "data-title": title.dataset?.key ?? title }, text(row)))));
  table.setAttribute("role", "table");
  if (rows.length) table.replaceChildren(make("thead", { role: "rowgroup" }, head), make("tbody", { role: "rowgroup" }, ...body));
  else table.replaceChildren(make("tbody", {}, make("tr", {}, make("td", { class: "muted empty" }, empty))));
}

function fillSelect(select, options) {
  const before = select.value;
  const present = [...select.options].map((option) => option.value + "\n" + option.text).join("\n\n");
  if (present === options.map(([value, text]) => value + "\n" + text).join("\n\n")) return;
  select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  if (options.some(([value]) => String(value) === before)) select.value = before;
}

// ------------------------------------------------------------------------------------------------- numbers

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function figures(value, digits = 3) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e");
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, size >= 1000 ? 6 : 1) });
}

function duration(seconds) {
  if (!isNumber(seconds)) return "";
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.9995e-3) return `${figures(seconds * 1e6)} µs`;
  if (size < 0.9995) return `${figures(seconds * 1e3)} ms`;
  if (size < 59.95) return `${figures(seconds)} s`;
  const sign = seconds < 0 ? "−" : "";
  const [whole, minutes, hours] = [1, 60, 3600].map((unit) => Math.round(size / unit));
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (minutes < 1440) return `${sign}${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${sign}${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function bytes(value) {
  if (!isNumber(value)) return "";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= size) return `${figures(value / size)} ${unit}`;
  }
  return `${figures(value)} B`;
}

function clock(seconds) {
  const sign = seconds < 0 ? "−" : "", size = Math.abs(seconds);
  if (size < 59.95) return `${sign}${figures(size)} s`;
  const whole = Math.round(size), two = (value) => String(value).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  return `${sign}${hours ? `${hours}:${two(Math.floor((whole % 3600) / 60))}` : Math.floor(whole / 60)}:${two(whole % 60)}`;
}

function count(value) {
  return isNumber(value) ? value.toLocaleString("en") : "";
}

const date = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "");

/** Returns a date without what is that of today. */
function shortDate(seconds) {
  if (!seconds) return "";
  const then = new Date(seconds * 1000), now = new Date();
  const day = then.toDateString() === now.toDateString() ? {} : { month: "short", day: "numeric" };
  const year = then.getFullYear() === now.getFullYear() ? {} : { year: "numeric" };
  return then.toLocaleString([], { ...year, ...day, hour: "numeric", minute: "2-digit" });
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** Returns a value in the unit of a chart. */
function inUnit(value, unit) {
  if (!isNumber(value)) return "not finite";
  if (unit === "s") return duration(value);
  if (unit === "B") return bytes(value);
  return figures(value, 4) + (unit ? ` ${unit}` : "");
}

/** Returns a place on an axis. A point between two steps stands for both; there is no half of a step. */
const onAxis = (value, axis) => (axis === "step" ? count(Math.round(value)) : clock(value));

const percent = (share) => `${Math.round(100 * share)} %`;

// ------------------------------------------------------------------------------------------------- sources

/** Asks the server of lockstep ui. */
function serverSource() {
  async function get(path, query = {}) {
    const parameters = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
    const answer = await fetch(`api/${path}?${new URLSearchParams(parameters)}`, { credentials: "same-origin" });
    const value = answer.status === 403 ? { error: "this page is no longer valid; run lockstep ui again" } : await answer.json();
    if (!answer.ok) throw new Error(value.error);
    return value;
  }
  return {
    live: true,
    runs: (have) => get("runs", { have }),
    run: (run, digests) => get("run", { run, have: Object.entries(digests).map((pair) => pair.join(":")).join(",") }),
    chart: (run, chart, window) => get("chart", { run, chart, ...window }),
    logs: (run) => get("logs", { run }),
    log: (run, worker, place) => get("log", { run, worker, ...place }),
    search: (run, worker, text, matchCase, start) => get("search", { run, worker, text, case: matchCase ? 1 : 0, start }),
    compare: (run, other) => get("compare", { run, other }),
  };
}

/** Answers from the data in the file of a report. */
function reportSource(data) {
  const lines = (worker) => {
    const log = data.logs[worker];
    return { ...log, stop: log.size };
  };
  return {
    live: false,
    runs: async () => ({ digest: "", runs: [{ id: data.name, ...data.parts.summary }] }),
    run: async (run, digests) => (Object.keys(digests).length ? { parts: {}, digests: {} }
      : { parts: data.parts, digests: Object.fromEntries(Object.keys(data.parts).map((name) => [name, "1"])) }),
    chart: async (run, chart, window) => (data.charts[chart] ?? {})[window.axis] ?? [],
    logs: async () => Object.entries(data.logs).map(([worker, log]) => [Number(worker), log.size]),
    log: async (run, worker) => lines(worker),
    search: async (run, worker, text, matchCase) => {
      const fold = (line) => (matchCase ? line : line.toLowerCase());
      const matching = data.logs[worker].text.split("\n").filter((line) => fold(line).includes(fold(text)));
      return { found: matching.slice(0, 100).map((line) => ({ start: null, text: line })), resume: null };
    },
    compare: async () => [],
  };
}

const embedded = byId("report-data");
const source = embedded ? reportSource(JSON.parse(embedded.textContent)) : serverSource();

// -------------------------------------------------------------------------------------------------- colors

let palette = {};

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  palette = { read, text: read("text"), muted: read("muted"), grid: read("grid"), line: read("line"), bad: read("bad"), raised: read("raised") };
  palette.series = Array.from({ length: COLORS }, (_, at) => read(`series-${at}`));
}

// -------------------------------------------------------------------------------------------------- charts

/** The part of an axis that several charts show; null for all of it. */
class Span {
  constructor(axis) {
    this.axis = axis;
    this.start = null;
    this.stop = null;
    this.cursor = null;
    this.charts = new Set();
  }

  extent() {
    let first = Infinity, last = -Infinity;
    for (const chart of this.charts) {
      const [low, high] = chart.extent();
      first = Math.min(first, low);
      last = Math.max(last, high);
    }
    if (first > last) return [0, 1];
    return first < last ? [first, last] : [first - 0.5, last + 0.5];
  }

  range() {
    const [first, last] = this.extent();
    return [this.start ?? first, this.stop ?? last];
  }

  /** Shows a range, within what there is. */
  show(start, stop) {
    const [first, last] = this.extent();
    const least = (last - first) * 1e-6, width = Math.min(Math.max(stop - start, least), last - first);
    if (width >= (last - first) * 0.999) {
      this.start = this.stop = null;
    } else {
      this.start = Math.min(Math.max(start, first), last - width);
      this.stop = this.start + width;
    }
    for (const chart of this.charts) {
      chart.redraw();
      chart.loadSoon();
    }
  }

  zoom(factor, at) {
    const [start, stop] = this.range();
    const centre = at ?? (start + stop) / 2;
    this.show(centre - (centre - start) * factor, centre + (stop - centre) * factor);
  }

  pan(share) {
    const [start, stop] = this.range();
    this.show(start + share * (stop - start), stop + share * (stop - start));
  }

  point(x) {
    this.cursor = x;
    for (const chart of this.charts) chart.redraw();
  }
}

const onScreen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.get(entry.target.dataset.chart);
    if (chart) chart.show(entry.isIntersecting);
  }
}, { rootMargin: "300px" });

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) charts.get(entry.target.closest("figure").dataset.chart)?.redraw();
});

/** A chart with its legend, buttons and table. */
class Chart {
  constructor(spec, span) {
    this.spec = spec;
    this.span = span;
    this.runSeries = [];
    this.loaded = "";
    this.loading = false;
    this.shown = false;
    this.drawing = false;
    this.margin = 62;
    this.whole = false;
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.readout = make("div", { class: "readout", "aria-live": "polite" });
    this.plot = make("div", { class: "plot", tabindex: "0", role: "application", "aria-roledescription": "chart",
      "aria-label": spec.title, "aria-describedby": "keys" }, this.canvas, this.readout);
    this.beyond = make("button", { type: "button", class: "beyond", hidden: true, onclick: () => {
      this.whole = !this.whole;
      this.redraw();
    } });
    this.legend = make("ul", { class: "legend" });
    this.table = make("table");
    this.details = make("details", { ontoggle: () => this.fillTable() }, make("summary", {}, `Data of ${spec.title}`),
      make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Data of ${spec.title}` }, this.table));
    const tool = (text, label, act) => make("button", { type: "button", "aria-label": `${label}: ${spec.title}`, title: label, onclick: act }, text);
    this.figure = make("figure", { "data-chart": spec.id }, make("figcaption", {}, make("span", {}, spec.title, ["", "s", "B"].includes(spec.unit) ? null : make("small", {}, ` ${spec.unit}`)),
      make("span", { class: "tools" }, tool("−", "Zoom out", () => span.zoom(2)), tool("+", "Zoom in", () => span.zoom(0.5)),
        tool("↔", "Show everything", () => span.show(-Infinity, Infinity)))), this.plot, this.beyond, this.legend, this.details);
    this.listen();
    span.charts.add(this);
    charts.set(spec.id, this);
    onScreen.observe(this.figure);
    resized.observe(this.plot);
  }

  remove() {
    this.span.charts.delete(this);
    charts.delete(this.spec.id);
    onScreen.unobserve(this.figure);
    resized.unobserve(this.plot);
    this.figure.remove();
  }

  listen() {
    let dragged = null;
    const place = (event) => this.xAt(event.clientX - this.plot.getBoundingClientRect().left);
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button === 0) {
        dragged = event.clientX;
        this.plot.setPointerCapture(event.pointerId);
      }
    });
    this.plot.addEventListener("pointermove", (event) => {
      if (dragged !== null) {
        this.span.pan((dragged - event.clientX) / Math.max(1, this.inner().width));
        dragged = event.clientX;
      }
      this.span.point(place(event));
    });
    for (const name of ["pointerup", "pointercancel"]) this.plot.addEventListener(name, () => { dragged = null; });
    this.plot.addEventListener("pointerleave", () => { if (dragged === null) this.span.point(null); });
    this.plot.addEventListener("blur", () => this.span.point(null));
    this.plot.addEventListener("dblclick", () => this.span.show(-Infinity, Infinity));
    this.plot.addEventListener("wheel", (event) => {
      const across = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
      if (Math.abs(across) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
        event.preventDefault();
        this.span.pan(across / 1000);
      } else if (event.ctrlKey || document.activeElement === this.plot) {
        event.preventDefault();
        this.span.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 400))), place(event));
      }
    }, { passive: false });
    this.plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (side && event.shiftKey) this.step(side);
      else if (side) this.span.pan(side / 8);
      else if (event.key === "+" || event.key === "=") this.span.zoom(1 / 1.5, this.span.cursor);
      else if (event.key === "-") this.span.zoom(1.5, this.span.cursor);
      else if (event.key === "0" || event.key === "Home") this.span.show(-Infinity, Infinity);
      else if (event.key === "Escape") this.span.point(null);
      else return;
      event.preventDefault();
    });
  }

  /** Moves the cursor by a fiftieth of what is shown. */
  step(side) {
    const [start, stop] = this.span.range();
    const at = this.span.cursor ?? (side > 0 ? start : stop);
    this.span.point(Math.min(Math.max(at + (side * (stop - start)) / 50, start), stop));
  }

  show(visible) {
    this.shown = visible;
    if (visible) {
      this.load();
      this.redraw();
    }
  }

  extent() {
    const all = this.runSeries.flatMap(({ series }) => series).filter((line) => line.extent);
    return all.length ? [Math.min(...all.map((line) => line.extent[0])), Math.max(...all.map((line) => line.extent[1]))] : [Infinity, -Infinity];
  }

  loadSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(), 120);
  }

  /** Asks for what is shown and a margin around it, unless that has been asked for. */
  async load() {
    if (!this.shown || this.loading) return;
    const runs = chartRuns(this.spec).filter((run) => versionOf(run, this.spec.id) !== null);
    const [start, stop] = [this.span.start, this.span.stop];
    const margin = start === null ? 0 : (stop - start) / 2;
    const window = { axis: this.span.axis, start: start === null ? null : start - margin, stop: stop === null ? null : stop + margin,
      points: Math.min(MOST_POINTS, Math.round((start === null ? 1 : 2) * Math.max(300, this.inner().width))),
      smoothing: (this.spec.section === "metrics" ? smoothing() : 0) / (start === null ? 1 : 2) };
    const request = JSON.stringify([shownRuns().length > 1, runs.map((run) => [run, versionOf(run, this.spec.id)]), window]);
    if (request === this.loaded) return;
    this.loading = true;
    try {
      this.runSeries = await Promise.all(runs.map(async (run) => ({ run, series: await source.chart(run, this.spec.id, window) })));
      this.loaded = request;
    } catch (error) {
      say(`A chart cannot be loaded: ${error.message}`);
      return;
    } finally {
      this.loading = false;
    }
    this.fillLegend();
    this.fillTable();
    for (const chart of this.span.charts) chart.redraw();
    this.load();
  }

  /** The lines of the chart: its series with their runs and colors. */
  lines() {
    const several = this.runSeries.length > 1, named = shownRuns().length > 1;
    return this.runSeries.flatMap(({ run, series }, at) => series.map((line, index) => {
      let color = palette.series[index % COLORS];
      if (this.spec.kind === "stack") color = palette.read(`part-${line.label}`);
      else if (line.role) color = several ? palette.series[at % COLORS] : palette.read(ROLES[line.role]);
      else if (several && series.length === 1) color = palette.series[at % COLORS];
      const dashed = line.role === "validation" || (!line.role && several && series.length > 1 && at % 2 === 1);
      return { ...line, run, color, dashed, name: named ? `${line.label} (${run})` : line.label };
    }));
  }

  fillLegend() {
    this.legend.replaceChildren(...this.lines().map((line) => {
      const swatch = make("span", { class: this.spec.kind === "stack" ? "swatch area" : "swatch" });
      if (this.spec.kind === "stack") swatch.style.background = line.color;
      else swatch.style.borderTopColor = line.color;
      if (line.dashed) swatch.style.borderTopStyle = "dashed";
      const lost = !line.missing ? "" : line.missing === 1 ? `; not finite at ${onAxis(line.first_missing, this.span.axis)}`
        : `; ${count(line.missing)} values are not finite, the first one at ${onAxis(line.first_missing, this.span.axis)}`;
      return make("li", {}, swatch, make("span", {}, line.name + lost));
    }));
    this.legend.hidden = this.spec.section === "throughput" && this.lines().length === 1 && !this.lines()[0].missing;
    const text = this.lines().map((line) => `${line.name} ${inUnit(line.mean.at(-1), this.spec.unit)}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.spec.title}; last values: ${text || "none"}`);
  }

  fillTable() {
    if (!this.details.open) return;
    const axis = this.span.axis, unit = this.spec.unit, rows = [];
    const lines = this.lines(), all = lines.reduce((sum, line) => sum + line.x.length, 0);
    const every = Math.max(1, Math.ceil(all / MOST_ROWS));
    for (const line of lines) {
      for (let at = 0; at < line.x.length; at += every) rows.push([line.name, line.x[at], line.mean[at], line.low[at], line.high[at]]);
    }
    fillTable(this.table, [["Series", (row) => row[0]], [axis === "step" ? "Step" : "Time", (row) => onAxis(row[1], axis), "number"],
      ["Mean", (row) => inUnit(row[2], unit), "number"], ["Lowest", (row) => inUnit(row[3], unit), "number"],
      ["Highest", (row) => inUnit(row[4], unit), "number"]], rows, "No data");
    if (every > 1) this.table.prepend(make("caption", {}, `${count(rows.length)} of ${count(all)} points; zoom in for others`));
  }

  redraw() {
    if (this.drawing || !this.shown) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.draw();
    });
  }

  inner() {
    return { left: this.margin, top: 12, width: Math.max(10, this.plot.clientWidth - this.margin - 12), height: Math.max(10, this.plot.clientHeight - 36) };
  }

  xAt(pixel) {
    const [start, stop] = this.span.range(), { left, width } = this.inner();
    return start + ((pixel - left) / width) * (stop - start);
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    const scale = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    const [start, stop] = this.span.range();
    this.measure(context, start, stop);
    const box = this.inner();
    const toX = (x) => box.left + ((x - start) / (stop - start)) * box.width;
    this.drawAxis(context, box, start, stop, toX);
    this.drawContent(context, box, start, stop, toX);
    this.drawCursor(context, box, start, stop, toX);
  }

  drawAxis(context, box, start, stop, toX) {
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillStyle = palette.line;
    context.fillRect(box.left, box.top + box.height, box.width, 1);
    let free = -Infinity;
    for (const tick of ticks(start, stop, Math.max(2, box.width / 90), this.span.axis === "time")) {
      if (this.span.axis === "step" && !Number.isInteger(tick)) continue;
      const x = toX(tick), text = onAxis(tick, this.span.axis), width = context.measureText(text).width;
      const left = Math.min(Math.max(x - width / 2, 0), this.plot.clientWidth - width);
      context.fillStyle = palette.line;
      context.fillRect(Math.round(x), box.top + box.height, 1, 4);
      if (left < free) continue;
      context.fillStyle = palette.muted;
      context.fillText(text, left, box.top + box.height + 7);
      free = left + width + 6;
    }
  }

  /** Computes the axis of values, with room for its marks. */
  measure(context, start, stop) {
    const lines = this.lines(), stacked = this.spec.kind === "stack";
    const areas = stacked ? stack(lines) : [];
    const logarithmic = !stacked && this.spec.section === "metrics" && byId("log-axis").checked;
    const lows = [], highs = [];
    for (const line of stacked ? areas.slice(-1) : lines) {
      const [first, last] = within(line.x, start, stop);
      for (let at = first; at < last; at += 1) {
        const [low, high] = stacked ? [0, line.upper[at]] : [line.low[at], line.high[at]];
        if (high === null) continue;
        if (!logarithmic || low > 0) lows.push(low);
        if (!logarithmic || high > 0) highs.push(high);
      }
    }
    let low = lows.reduce((least, value) => Math.min(least, value), stacked ? 0 : Infinity);
    let high = highs.reduce((most, value) => Math.max(most, value), -Infinity);
    const limit = logarithmic ? null : spikeLimit(highs, low, this.spec.unit === "s" ? 3 : 10);
    this.tellBeyond(highs, high, limit);
    const clips = limit !== null && !this.whole;
    if (clips) high = limit;
    if (!(low <= high)) [low, high] = logarithmic ? [0.1, 1] : [0, 1];
    if (logarithmic) [low, high] = [Math.log10(low), Math.log10(high)];
    if (low === high) [low, high] = [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
    if (!stacked) low -= (high - low) * 0.05;
    high += (high - low) * 0.05;
    const marks = logarithmic ? decades(low, high) : ticks(low, high, Math.max(2, this.inner().height / 40));
    const texts = marksOf(logarithmic ? marks.map((tick) => 10 ** tick) : marks, this.spec.unit);
    this.margin = Math.ceil(Math.max(28, ...texts.map((text) => context.measureText(text).width))) + 10;
    this.scale = { lines, areas, logarithmic, low, high, marks, texts, limit: clips ? limit : null };
  }

  /** Says which values are above the axis, on a button that shows them. */
  tellBeyond(highs, high, limit) {
    this.beyond.hidden = limit === null;
    if (limit === null) return;
    const above = highs.filter((value) => value > limit).length;
    const text = `${above === 1 ? "one point" : `${count(above)} points`} above ${inUnit(limit, this.spec.unit)}, up to ${inUnit(high, this.spec.unit)}`;
    setText(this.beyond, this.whole ? `Cut off ${text}` : `▲ ${text}: show`);
  }

  drawContent(context, box, start, stop, toX) {
    const { lines, areas, logarithmic, low, high, marks, texts, limit } = this.scale;
    const place = (value) => box.top + box.height - ((value - low) / (high - low)) * box.height;
    const toY = logarithmic ? (value) => (value > 0 ? place(Math.log10(value)) : box.top + box.height + 1e4) : place;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const [at, tick] of marks.entries()) {
      const y = place(tick);
      context.fillStyle = palette.grid;
      context.fillRect(box.left, Math.round(y), box.width, 1);
      context.fillStyle = palette.muted;
      context.fillText(texts[at], box.left - 8, y);
    }
    context.save();
    context.beginPath();
    // Points at the edges are whole.
    context.rect(box.left - 6, box.top - 2, box.width + 12, box.height + 4);
    context.clip();
    context.lineJoin = "round";
    for (const area of areas) drawArea(context, area, toX, toY, start, stop);
    if (!areas.length) {
      const smooth = this.spec.section === "metrics" && smoothing() > 0;
      const crowded = lines.some((line) => !line.role && line.x.length > MOST_DOTS);
      for (const line of lines) drawLine(context, line, toX, toY, start, stop, smooth, !crowded);
    }
    context.restore();
    if (limit === null) return;
    for (const line of areas.length ? areas.slice(-1) : lines) {
      const values = line.upper ?? line.high, [first, last] = within(line.x, start, stop);
      context.fillStyle = areas.length ? palette.text : line.color;
      let free = -Infinity;
      for (let at = first; at < last; at += 1) {
        const x = toX(line.x[at]);
        if (!(values[at] > limit) || x < Math.max(free, box.left) || x > box.left + box.width) continue;
        context.beginPath();
        context.moveTo(x - 5, box.top);
        context.lineTo(x, box.top - 8);
        context.lineTo(x + 5, box.top);
        context.fill();
        free = x + 8;
      }
    }
  }

  drawCursor(context, box, start, stop, toX) {
    const at = this.span.cursor;
    const shown = at !== null && at >= start && at <= stop && (document.activeElement === this.plot || this.plot.matches(":hover"));
    if (at !== null && at >= start && at <= stop) {
      context.fillStyle = palette.muted;
      context.fillRect(Math.round(toX(at)), box.top, 1, box.height);
    }
    this.readout.style.display = shown ? "block" : "none";
    if (!shown) return;
    setText(this.readout, this.read(at));
    const left = toX(at) < box.left + box.width / 2;
    this.readout.style.left = left ? `${toX(at) + 8}px` : "auto";
    this.readout.style.right = left ? "auto" : `${this.plot.clientWidth - toX(at) + 8}px`;
  }

  read(at) {
    const rows = this.lines().slice(0, 12).filter((line) => line.x.length).map((line) => {
      const near = nearest(line.x, at);
      const extremes = line.low[near] !== line.high[near] ? ` (${inUnit(line.low[near], this.spec.unit)} to ${inUnit(line.high[near], this.spec.unit)})` : "";
      return `${line.name}: ${inUnit(line.mean[near], this.spec.unit)}${extremes}`;
    });
    return [`${this.span.axis === "step" ? "step " : ""}${onAxis(at, this.span.axis)}`, ...rows].join("\n");
  }
}

/** The workers of a run over its time, with its views and pauses. */
class Timeline extends Chart {
  constructor(span) {
    super({ id: "membership", title: "Workers over time", unit: "", kind: "bars", section: "membership" }, span);
    this.details.remove();
    this.beyond.remove();
    this.plot.setAttribute("aria-label", "Workers over time; the tables below have the same data");
  }

  rows() {
    return (partsOf(state.run).workers ?? []).slice(-MOST_BARS);
  }

  end() {
    const { summary, workers, views, events } = partsOf(state.run);
    if (!summary) return 1;
    const times = [...(workers ?? []).flatMap((worker) => [worker.began, worker.ended]), ...(views ?? []).map((view) => view.time),
      ...(events ?? []).slice(-1).map((event) => event.time), summary.seconds].filter(isNumber);
    const now = summary.state === "running" ? Date.now() / 1000 - summary.began : 0;
    return Math.max(1e-3, now, ...times);
  }

  extent() {
    return partsOf(state.run).summary ? [0, this.end()] : [Infinity, -Infinity];
  }

  load() {
    const rows = this.rows();
    this.plot.style.height = `${rows.length * 22 + 64}px`;
    this.legend.replaceChildren(...[["in the job", "series-0"], ["lost or failed", "bad"], ["left or finished", "good"], ["new view, with its pause", "muted"]]
      .map(([text, color]) => {
        const swatch = make("span", { class: "swatch area" });
        swatch.style.background = palette.read(color);
        return make("li", {}, swatch, make("span", {}, text));
      }));
    this.redraw();
  }

  /** The color of the end of a worker; null while it is in the job. */
  color(row) {
    if (["lost", "failed"].includes(row.phase) || row.status) return palette.bad;
    return row.ended === null ? null : palette.read("good");
  }

  measure(context) {
    const widths = this.rows().map((row) => context.measureText(`worker ${row.worker}`).width);
    this.margin = Math.ceil(Math.max(28, ...widths)) + 10;
  }

  drawContent(context, box, start, stop, toX) {
    const rows = this.rows(), views = partsOf(state.run).views ?? [], end = this.end();
    const shown = views.map((view) => [view, toX(view.time)]).filter(([, x]) => x >= box.left && x <= box.left + box.width);
    context.fillStyle = palette.muted;
    for (const [, x] of shown) context.fillRect(Math.round(x), box.top, 1, box.height);
    context.textBaseline = "middle";
    rows.forEach((row, at) => {
      const y = box.top + 14 + at * 22;
      context.textAlign = "right";
      context.fillStyle = palette.muted;
      context.fillText(`worker ${row.worker}`, box.left - 8, y);
      const from = Math.max(toX(row.began ?? 0), box.left), to = Math.min(toX(row.ended ?? end), box.left + box.width);
      if (to <= box.left || from >= box.left + box.width) return;
      const bar = (left, color) => {
        context.fillStyle = color;
        context.beginPath();
        context.roundRect(left, y - 5, Math.max(4, to - left), 10, 3);
        context.fill();
      };
      bar(from, palette.read("series-0"));
      if (this.color(row) && toX(row.ended) <= box.left + box.width) bar(Math.max(from, to - 12), this.color(row));
    });
    context.textAlign = "left";
    let free = -Infinity;
    for (const [view, x] of shown) {
      const text = `view ${view.number}` + (view.pause === null ? "" : `, pause ${duration(view.pause)}`);
      const room = context.measureText(text).width + 8;
      const left = Math.min(x + 4, box.left + box.width - room);
      if (left < free) continue;
      context.fillStyle = palette.raised;
      context.fillRect(left, box.top + box.height - 16, room - 4, 16);
      context.fillStyle = palette.text;
      context.fillText(text, left + 2, box.top + box.height - 8);
      free = left + room;
    }
  }

  read(at) {
    const living = this.rows().filter((row) => (row.began ?? 0) <= at && (row.ended ?? Infinity) >= at).map((row) => row.worker);
    return `${clock(at)}\nworkers: ${living.slice(0, 20).join(", ") || "none"}`;
  }
}

/** Returns a limit of values above which a few are so high that they flatten the others; null if there are none. */
function spikeLimit(values, low, ratio) {
  const most = Math.min(Math.floor(values.length / 4), Math.max(2, Math.ceil(values.length / 10)));
  if (!most) return null;
  const sorted = [...values].sort((first, second) => second - first);
  return sorted[most] > low && sorted[0] - low > ratio * (sorted[most] - low) ? sorted[most] : null;
}

/** Returns round numbers between two values; of seconds, whole minutes, hours and days where they fit. */
function ticks(low, high, most, seconds = false) {
  const rough = (high - low) / most;
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const power = 10 ** Math.floor(Math.log10(rough));
  const sizes = seconds && rough > 5 && rough <= 86400 ? TIME_TICKS : [1, 2, 5, 10].map((step) => step * power);
  const size = sizes.find((step) => step >= rough) ?? 10 * power;
  const marks = [];
  for (let at = Math.ceil(low / size); at * size <= high; at += 1) marks.push(Number((at * size).toPrecision(12)));
  return marks;
}

/** Returns the logarithms at which a logarithmic axis has marks. */
function decades(low, high) {
  const whole = ticks(Math.floor(low), Math.ceil(high), Math.max(2, Math.min(6, high - low))).filter((mark) => Number.isInteger(mark) && mark >= low && mark <= high);
  if (whole.length > 1) return whole;
  return [...ticks(10 ** low, 10 ** high, 4)].filter((mark) => mark > 0).map(Math.log10);
}

function mark(value, unit) {
  if (unit === "s") return duration(value);
  if (unit === "B") return bytes(value);
  if (Math.abs(value) >= 1e6) return value.toExponential(1).replace("e+", "e");
  if (Math.abs(value) >= 1e4) return `${figures(value / 1000)}k`;
  return figures(value);
}

/** Returns the texts of the marks of an axis: with more digits where marks would look the same. */
function marksOf(values, unit) {
  let texts = values.map((value) => mark(value, unit));
  for (let digits = 4; new Set(texts).size < texts.length && digits <= 12; digits += 1) {
    texts = values.map((value) => `${Number(value.toPrecision(digits))}${unit ? ` ${unit}` : ""}`);
  }
  return texts;
}

/** Returns the index of the first number that is not below a value. */
function lowerBound(numbers, value) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Returns the indices of the points in a range, with a neighbor on each side. */
function within(numbers, start, stop) {
  return [Math.max(0, lowerBound(numbers, start) - 1), Math.min(numbers.length, lowerBound(numbers, stop) + 2)];
}

function nearest(numbers, value) {
  const at = lowerBound(numbers, value);
  if (at === 0) return 0;
  if (at === numbers.length) return at - 1;
  return numbers[at] - value < value - numbers[at - 1] ? at : at - 1;
}

function drawLine(context, line, toX, toY, start, stop, smooth, dots) {
  const [first, last] = within(line.x, start, stop);
  context.strokeStyle = context.fillStyle = line.color;
  context.setLineDash(line.dashed ? [6, 4] : []);
  context.lineWidth = { train: 1, epoch: 2.5 }[line.role] ?? 1.75;
  // A point for every other pixel fills an area, in which a line of means shows the course.
  const width = Math.abs(toX(stop) - toX(start)), fills = !smooth && !line.role && last - first > width / 2;
  context.globalAlpha = smooth || fills ? 0.3 : 1;
  // Each point goes from its lowest to its highest value, so that a spike shows at every zoom.
  context.beginPath();
  let pen = false;
  for (let at = first; at < last; at += 1) {
    const low = line.low[at], high = line.high[at];
    if (low === null) {
      pen = false;
      continue;
    }
    const x = toX(line.x[at]);
    if (pen) context.lineTo(x, toY(low));
    else context.moveTo(x, toY(low));
    if (high !== low) context.lineTo(x, toY(high));
    pen = true;
  }
  context.stroke();
  context.globalAlpha = 1;
  if (smooth || fills) {
    const size = fills ? Math.ceil((MEAN_PIXELS * (last - first)) / width) : 1;
    context.lineWidth = 2;
    context.beginPath();
    pen = false;
    for (let at = first; at < last; at += size) {
      const values = line.mean.slice(at, Math.min(at + size, last)).filter((value) => value !== null);
      if (!values.length) {
        pen = false;
        continue;
      }
      const x = toX(line.x[Math.min(at + (size >> 1), last - 1)]), y = toY(values.reduce((sum, value) => sum + value, 0) / values.length);
      if (pen) context.lineTo(x, y);
      else context.moveTo(x, y);
      pen = true;
    }
    context.stroke();
  }
  context.setLineDash([]);
  if (dots && last - first <= MOST_DOTS) {
    for (let at = first; at < last; at += 1) {
      if (line.low[at] === null) continue;
      // A ring around a dot: training and validation show both, even if they are equal.
      const ring = line.role === "validation";
      context.beginPath();
      context.arc(toX(line.x[at]), toY(smooth ? line.mean[at] : line.low[at]), ring ? 4.5 : line.role === "train" ? 1.5 : 2.5, 0, 2 * Math.PI);
      if (ring) context.stroke();
      else context.fill();
    }
  }
}

/** Returns the areas of lines that are added up, the lowest first. */
function stack(lines) {
  let lower = null;
  return lines.map((line) => {
    const below = lower ?? line.x.map(() => 0);
    const upper = line.mean.map((value, at) => (below[at] ?? 0) + (value ?? 0));
    lower = upper;
    return { x: line.x, lower: below, upper, color: line.color };
  });
}

/** Draws an area of steps: a point is a mean over the time since the one before. */
function drawArea(context, area, toX, toY, start, stop) {
  const [first, last] = within(area.x, start, stop);
  if (last <= first) return;
  const gaps = Array.from({ length: last - first - 1 }, (_, at) => area.x[first + at + 1] - area.x[first + at]).sort((left, right) => left - right);
  const widest = gaps.length ? 3 * gaps[gaps.length >> 1] : 0;
  context.fillStyle = area.color;
  for (let at = first; at < last; at += 1) {
    const before = at > 0 ? Math.max(area.x[at - 1], area.x[at] - widest) : area.x[at] - widest / 3;
    const [left, right] = [toX(before), toX(area.x[at])];
    const [top, bottom] = [toY(area.upper[at]), toY(area.lower[at])];
    // A little wider, so that no line of the background shows between two of them.
    if (bottom > top) context.fillRect(left - 0.3, top, Math.max(2, right - left) + 0.6, bottom - top);
  }
}

// --------------------------------------------------------------------------------------------------- state

const charts = new Map();
const metricSpan = new Span("step");
const timeSpan = new Span("time");
const state = { runs: [], runsDigest: "", run: null, others: new Set(), known: new Map(), drawn: {}, said: "", failing: false,
  order: { column: "", down: false },
  log: { worker: null, start: 0, stop: 0, size: 0, last: true, search: null } };

const partsOf = (run) => state.known.get(run)?.parts ?? {};
const shownRuns = () => (state.run === null ? [] : [state.run, ...state.others]);
const smoothing = () => Number(byId("smoothing").value) / 100;

/** Returns the version of a chart of a run; null if the run has no such chart. */
function versionOf(run, chart) {
  return (partsOf(run).charts ?? []).find((spec) => spec.id === chart)?.version ?? null;
}

/** Says a change of state, also to screen readers. */
function say(text) {
  setText(byId("status"), text);
}

function readAddress() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  if (parameters.has("run")) {
    state.run = parameters.get("run");
    state.others = new Set(parameters.getAll("with"));
  }
}

function writeAddress() {
  if (!source.live) return;
  const parameters = new URLSearchParams([["run", state.run], ...[...state.others].map((run) => ["with", run])]);
  history.replaceState(null, "", `#${parameters}`);
}

function choose(run) {
  state.run = run;
  state.others.delete(run);
  state.drawn = {};
  state.said = "";
  state.log = { worker: null, start: 0, stop: 0, size: 0, last: true, search: null };
  byId("log-results").replaceChildren();
  setText(byId("log-found"), "");
  byId("log-more").hidden = true;
  for (const span of [metricSpan, timeSpan]) span.start = span.stop = span.cursor = null;
  writeAddress();
  drawRuns();
  say(`Reading ${run} …`);
  poll();
}

function overlay(run, chosen) {
  if (chosen) state.others.add(run);
  else state.others.delete(run);
  writeAddress();
  poll();
}

// ----------------------------------------------------------------------------------------------- rendering

function drawRuns() {
  const wanted = byId("runs-filter").value.toLowerCase();
  const rows = state.runs.filter((run) => `${run.id} ${run.script} ${run.state}`.toLowerCase().includes(wanted));
  setText(byId("runs-count"), `${count(rows.length)} of ${count(state.runs.length)}`);
  const list = byId("runs-list"), focused = document.activeElement?.dataset?.key;
  const facts = (run) => [run.state, run.steps ? `${count(run.steps)} steps` : "", shortDate(run.began)].filter(Boolean).join(" · ");
  list.replaceChildren(...rows.map((run) => make("li", {},
    make("button", { type: "button", "aria-current": run.id === state.run ? "true" : null, "data-key": `run ${run.id}`, onclick: () => choose(run.id) },
      make("span", { class: "name" }, make("span", { class: `dot ${moodOf(run.state, run.troubled)}`, "aria-hidden": "true" }), run.id), make("small", {}, facts(run))),
    run.id === state.run ? null : make("label", {}, make("input", { type: "checkbox", checked: state.others.has(run.id), "data-key": `with ${run.id}`,
      "aria-label": `Overlay ${run.id}`, onchange: (event) => overlay(run.id, event.target.checked) }), " overlay"))));
  if (focused) [...list.querySelectorAll("[data-key]")].find((node) => node.dataset.key === focused)?.focus();
}

/** Returns how a run goes: busy, good, warn if it has problems, or bad. */
function moodOf(runState, troubled) {
  if (!["running", "finished"].includes(runState)) return "bad";
  if (troubled) return "warn";
  return runState === "running" ? "busy" : "good";
}

const some = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

function drawSummary(summary) {
  const mood = moodOf(summary.state, summary.troubles.length > 0);
  setText(byId("title"), state.run);
  byId("state").hidden = false;
  byId("state").className = `state ${mood}`;
  setText(byId("state"), summary.state);
  byId("tags").replaceChildren(...summary.tags.map((tag) => make("li", {}, tag)));
  setText(byId("about"), [summary.script, summary.backend, some(summary.wanted ?? 0, "worker"), date(summary.began),
    summary.before ? `resumed after step ${count(summary.before)}${summary.resumed_from && ` from ${summary.resumed_from}`}` : ""].filter(Boolean).join(" · "));
  drawOutcome(summary, mood);
  drawCosts(summary);
  byId("tiles").replaceChildren(...summary.metrics.map((metric) => {
    const text = (value) => (value === null ? "not finite" : figures(value, 4));
    return make("div", {}, make("dt", {}, metric.name), make("dd", {},
      metric.recorded ? make("div", { class: metric.value === null ? "value bad" : "value" }, text(metric.value)) : null,
      metric.validated ? make("div", { class: metric.recorded ? "validation" : "value" }, `${metric.recorded ? "validation " : ""}${text(metric.validation)}`) : null,
      metric.best && figures(metric.best.value, 4) !== text(metric.validated ? metric.validation : metric.value) ? make("div", { class: "validation" }, `best ${figures(metric.best.value, 4)} in epoch ${count(metric.best.epoch)}`) : null,
      sparkline([["train", metric.trend], ["validation", metric.validation_trend]])));
  }));
  drawSlowness(summary);
  const facts = [["Replicas", count(summary.replicas)], ["Seed", String(summary.seed ?? "")], ["Call", summary.call], ["Model", summary.model],
    ["Compared with one process", summary.compared.replace(/^compared with one process: |^not compared with one process$/, "") || (summary.compared && "no")],
    ["Lines that cannot be read", summary.skipped ? count(summary.skipped) : ""], ["Digest", summary.digest, true]];
  byId("facts").replaceChildren(...facts.filter(([, value]) => value).map(([name, value, long]) =>
    make("div", { class: long ? "long" : null }, make("dt", {}, name), make("dd", {}, value))));
  const { progress } = summary, share = progress?.steps && progress.step !== null ? percent(progress.step / progress.steps) : "…";
  document.title = `${{ good: "✓", warn: "!", bad: "✕" }[summary.state === "running" ? "busy" : mood] ?? share} ${state.run} (${summary.state}): Lockstep`;
  byId("icon").href = icon(mood);
  announce(summary);
}

/** Shows whether all went well, the problems, and what to do. */
function drawOutcome(summary, mood) {
  byId("outcome").hidden = false;
  byId("outcome").className = `outcome ${mood}`;
  setText(byId("headline"), capital(summary.headline) + (summary.state === "failed" && isNumber(summary.status) ? ` (exit status ${summary.status})` : ""));
  byId("troubles").replaceChildren(...summary.troubles.map((text) => make("li", {}, text)));
  byId("remedies").hidden = !summary.remedies.length;
  byId("remedies").querySelector("ul").replaceChildren(...summary.remedies.map((text) => make("li", {}, capital(text))));
  drawProgress(summary);
  const failure = byId("failure"), { failure: script } = summary;
  failure.hidden = script === null;
  if (script !== null && failure.dataset.text !== script.traceback) {
    failure.dataset.text = script.traceback;
    failure.replaceChildren(make("details", { open: true }, make("summary", {}, `Traceback of worker ${script.worker}`),
      make("pre", { tabindex: "0", role: "region", "aria-label": "Traceback" }, script.traceback || script.summary)));
  }
}

/** Shows what a run took: each value with its name and a remark. */
function drawCosts(summary) {
  const { epochs, effective, progress } = summary, ends = progress?.epochs, ended = summary.seconds !== null;
  const rate = isNumber(summary.rate) ? count(Number(summary.rate.toPrecision(3))) : "";
  const changes = [summary.lost ? `${count(summary.lost)} lost` : "", summary.joined ? `${count(summary.joined)} joined` : "",
    summary.lost_hosts ? `${some(summary.lost_hosts, "host")} lost` : "", summary.retired_hosts ? `${some(summary.retired_hosts, "host")} retired` : "",
    summary.joined_hosts ? `${some(summary.joined_hosts, "host")} joined` : ""].filter(Boolean);
  const elsewhere = Object.entries(summary.elsewhere).map(([what, seconds]) => `${duration(seconds)} for ${what}`).join(", ");
  const costs = [["Time", duration(summary.seconds ?? (summary.began ? Date.now() / 1000 - summary.began : null)), ""],
    ["Effective training", effective === null ? "" : percent(effective), elsewhere, effective],
    ["Steps", count(summary.steps), summary.before ? `${count(summary.before)} of them before` : epochs ? `${ends > epochs ? `${count(epochs)} of ${some(ends, "epoch")}` : some(epochs, "epoch")}` : ""],
    [ended ? "Mean speed" : "Speed now", rate, rate && summary.rate_unit],
    ["Workers", `${summary.workers} of ${summary.wanted ?? "?"}`, changes.join(", ")],
    ["Pauses", summary.pauses ? count(summary.pauses) : "none", summary.pauses ? `${duration(summary.paused)} in total` : ""],
    ["Checkpoints", summary.checkpoints ? count(summary.checkpoints) : "", summary.checkpoints && summary.saved !== null ? `the newest is from step ${count(summary.saved)}` : ""]];
  byId("costs").replaceChildren(...costs.filter(([, value]) => value).map(([name, value, remark, share]) => {
    const meter = isNumber(share) ? make("span", { class: "meter", "aria-hidden": "true" }, make("span")) : null;
    if (meter) meter.firstChild.style.width = percent(share).replace(" ", "");
    return make("div", {}, make("dt", {}, name), make("dd", {}, make("span", { class: "value" }, value), remark ? make("small", {}, remark) : null, meter));
  }));
}

/** Returns a small picture of lines without axes, each with its name; null if there is nothing to see. */
function sparkline(lines) {
  const values = lines.flatMap(([, line]) => line).filter(isNumber);
  const length = Math.max(...lines.map(([, line]) => line.length));
  if (length < 2 || values.length < 2) return null;
  const low = Math.min(...values), high = Math.max(...values), size = high - low || 1;
  const draw = (tag, attributes, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  return draw("svg", { class: "sparkline", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" }, ...lines.map(([name, line]) => {
    const points = line.map((value, at) => [value, (100 * at) / (line.length - 1)]).filter(([value]) => value !== null);
    return draw("polyline", { class: name, points: points.map(([value, x]) => `${x.toFixed(1)},${(28 - (26 * (value - low)) / size).toFixed(1)}`).join(" ") });
  }));
}

/** Returns the picture of the tab: its color, and its sign for those who do not see colors. */
function icon(mood) {
  const sign = { good: "M4 8.5l3 3 5-6.5", warn: "M8 3.5v6M8 12v.5", bad: "M5 5l6 6M11 5l-6 6" }[mood] ?? "M5 8h.1M8 8h.1M11 8h.1";
  const color = palette.read(mood === "busy" ? "accent" : mood), ink = palette.read("page");
  return `data:image/svg+xml,${encodeURIComponent(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="4" fill="${color}"/>`
    + `<path d="${sign}" fill="none" stroke="${ink}" stroke-width="2" stroke-linecap="round" stroke-linejoin="round"/></svg>`)}`;
}

/** Shows how far a run is that trains, and how long the rest takes; or what it does before that. */
function drawProgress(summary) {
  const { progress, phase } = summary, trains = summary.seconds === null;
  byId("progress").hidden = !trains || !(progress || phase);
  if (byId("progress").hidden) return;
  let share = null, parts = [phase];
  if (progress && (progress.step !== null || progress.epoch > 1)) {
    if (progress.steps && progress.step !== null) share = Math.min(1, progress.step / progress.steps);
    else if (progress.epochs && progress.epoch) share = Math.min(1, (progress.epoch - 1) / progress.epochs);
    const of = (total) => (total ? ` of ${count(total)}` : "");
    parts = [progress.epoch ? `Epoch ${count(progress.epoch)}${of(progress.epochs)}` : "", progress.step === null ? "" : `step ${count(progress.step)}${of(progress.steps)}`,
      share === null ? "" : percent(share), isNumber(progress.left) ? timeLeft(progress.left) : "", phase === "training" ? "" : phase];
  }
  const bar = byId("progress-bar");
  bar.hidden = share === null;
  bar.setAttribute("aria-valuenow", Math.round(100 * (share ?? 0)));
  bar.firstElementChild.style.width = `${100 * (share ?? 0)}%`;
  setText(byId("progress-text"), parts.filter(Boolean).join(" · "));
}

/** Says how long a run still trains, and of a longer time, when it ends. */
function timeLeft(seconds) {
  const end = seconds >= LONG ? `, until about ${shortDate(Date.now() / 1000 + seconds)}` : "";
  return `${duration(Math.round(seconds))} left${end}`;
}

/** Shows what slows a run, and the shares of the parts of its steps. */
function drawSlowness(summary) {
  const shown = Object.entries(summary.shares).filter(([, share]) => share >= 0.005);
  byId("slowness").hidden = !shown.length && !summary.advice.length;
  const quiet = make("li", { class: "quiet" }, `Nothing stands out: computing takes ${percent(summary.shares.compute ?? 0)} of the time.`);
  byId("advice").replaceChildren(...(summary.advice.length ? summary.advice.map((line) => make("li", {}, line)) : [quiet]));
  const color = (part) => palette.read(`part-${part}`) || palette.read("part-nested");
  byId("shares").replaceChildren(...shown.map(([part, share]) => {
    const bar = make("span", { title: `${part} ${percent(share)}` });
    bar.style.background = color(part);
    bar.style.flexGrow = share;
    return bar;
  }));
  byId("shares-legend").replaceChildren(...shown.map(([part, share]) => {
    const swatch = make("span", { class: "swatch area" });
    swatch.style.background = color(part);
    return make("li", {}, swatch, make("span", {}, `${part} ${percent(share)}`));
  }));
}

/** Says what has changed since the last announcement. */
function announce(summary) {
  const waits = (partsOf(state.run).waits ?? []).filter((wait) => wait.current);
  const text = [`${state.run}: ${summary.state}`, `${summary.workers} of ${summary.wanted ?? "?"} workers`,
    summary.lost ? `${summary.lost} lost` : "", summary.joined ? `${summary.joined} joined` : "",
    waits.length ? `worker ${waits[0].worker} waits for ${waits[0].waits_for.map((worker) => `worker ${worker}`).join(", ")}` : ""].filter(Boolean).join(", ");
  if (text !== state.said) say(state.said = text);
}

/** Names workers in few words. */
function workersOf(workers) {
  if (workers.length <= SHOWN_WORKERS) return workers.join(", ");
  const [first, last] = [workers[0], workers.at(-1)];
  return last - first === workers.length - 1 ? `${first} to ${last}` : `${count(workers.length)} workers`;
}

const TABLES = {
  workers: (rows) => fillTable(byId("workers-table"), [["Worker", (row) => String(row.worker), "number"],
    ...(rows.some((row) => row.task) ? [["Task", (row) => row.task]] : []), ["Phase", (row) => row.phase], ["Host", (row) => row.host],
    ["Process", (row) => String(row.pid ?? ""), "number"], ["Step", (row) => count(row.step), "number"], ["Replicas", (row) => count(row.replicas), "number"],
    ["Cores", (row) => (row.cores === null ? "" : figures(row.cores)), "number"], ["Memory", (row) => bytes(row.memory), "number"],
    ["Started", (row) => (row.began === null ? "" : clock(row.began)), "number"], ["Ended", (row) => (row.ended === null ? "" : clock(row.ended)), "number"],
    ["Status", (row) => String(row.status ?? ""), "number"], ["Reason", (row) => row.reason, "long"]], rows, "No worker has started."),
  views: (rows) => fillTable(byId("views-table"), [["View", (row) => String(row.number), "number"], ["Time", (row) => clock(row.time), "number"],
    ["Pause", (row) => duration(row.pause), "number"], ["Workers", (row) => row.workers.join(", ")], ["Reason", (row) => row.reason, "long"]], rows, "The membership has not changed."),
  waits: (rows) => fillTable(byId("waits-table"), [["Time", (row) => clock(row.time), "number"], ["Worker", (row) => String(row.worker), "number"], ["Waits for", (row) => row.waits_for.join(", ")],
    ["In", (row) => row.what, "long"], ["Duration", (row) => duration(row.seconds), "number"], ["", (row) => (row.current ? "in progress" : "ended")]], [...rows].reverse(), "No worker has waited for long."),
  checkpoints: (rows) => {
    const columns = [["Step", (row) => count(row.step), "number"], ["Time", (row) => clock(row.time), "number"],
      ["Written in", (row) => duration(row.seconds), "number"], ["Path", (row) => String(row.path ?? ""), "long"]];
    const newest = [...rows].reverse(), deleted = newest.filter((row) => row.deleted), details = byId("checkpoints-deleted");
    fillTable(byId("checkpoints-table"), columns, newest.filter((row) => !row.deleted), "No checkpoint has been written.");
    details.hidden = !deleted.length;
    setText(details.querySelector("summary"), `${count(deleted.length)} older, which newer ones have replaced`);
    fillTable(details.querySelector("table"), columns, deleted, "");
  },
  events: (rows) => fillTable(byId("events-table"), [["Time", (row) => clock(row.time), "number"], ["Event", (row) => row.event], ["Workers", (row) => workersOf(row.workers)],
    ["Details", (row) => row.text, "long"]], [...rows].reverse(), "No event yet."),
  configuration: (rows) => fillTable(byId("configuration-table"), [["Of", (row) => row.section], ["Name", (row) => row.name], ["Value", (row) => row.value, "long"]], rows, "The run has not started."),
};

/** Creates the charts that the runs have, and removes others. */
/** Returns the runs of a chart: areas that are added up cannot lie over each other. */
const chartRuns = (spec) => (spec.kind === "stack" ? [state.run] : shownRuns());

function drawCharts() {
  const specs = new Map(shownRuns().reverse().flatMap((run) => (partsOf(run).charts ?? [])
    .filter((spec) => chartRuns(spec).includes(run)).map((spec) => [spec.id, spec])));
  const workers = [...specs.values()].filter((spec) => spec.section === "parts");
  fillSelect(byId("parts-workers"), [["", workers.length > SHOWN_WORKERS ? `the first ${SHOWN_WORKERS}` : "all"], ...workers.map((spec) => [spec.id, spec.title])]);
  const chosen = byId("parts-workers").value;
  const hidden = workers.filter((spec, at) => (chosen ? spec.id !== chosen : at >= SHOWN_WORKERS));
  for (const spec of hidden) specs.delete(spec.id);
  for (const chart of [...charts.values()]) if (!specs.has(chart.spec.id) && chart.spec.kind !== "bars") chart.remove();
  let before = {};
  for (const section of ["metrics", "throughput", "parts", "load"]) {
    const ofSection = [...(partsOf(state.run).charts ?? []), ...specs.values()].filter((spec) => spec.section === section && specs.has(spec.id));
    const place = byId(`${section}-charts`);
    for (const id of new Set(ofSection.map((spec) => spec.id))) {
      const chart = charts.get(id) ?? new Chart(specs.get(id), section === "metrics" ? metricSpan : timeSpan);
      const last = before[section];
      if (last ? last.nextSibling !== chart.figure : place.firstChild !== chart.figure) last ? last.after(chart.figure) : place.prepend(chart.figure);
      before[section] = chart.figure;
      chart.load();
    }
    let empty = place.querySelector(":scope > p");
    if (before[section]) empty?.remove();
    else setText(empty ?? place.appendChild(make("p", { class: "muted" })), nothingIn(section));
  }
  if (!charts.has("membership")) byId("membership-charts").append(new Timeline(timeSpan).figure);
  charts.get("membership").load();
}

/** Says why a section has no chart. */
function nothingIn(section) {
  const { summary } = partsOf(state.run);
  if (!summary || summary.seconds === null) return "No data yet.";
  if (section === "load") return "No load was measured: the run was too short.";
  if (section === "metrics") return "No metrics were recorded: the script did not end an epoch of fit.";
  return summary.replicas === 1 ? "Keras itself takes the steps of one replica, so they are not measured." : "No steps were measured.";
}

/** Draws the parts of the chosen run that have changed. */
function draw() {
  const shown = state.known.get(state.run);
  if (!shown) return;
  let changed = false;
  for (const [name, digest] of Object.entries(shown.digests)) {
    const drawn = `${state.run} ${digest}`;
    if (state.drawn[name] === drawn) continue;
    state.drawn[name] = drawn;
    changed = true;
    if (name in TABLES) TABLES[name](shown.parts[name]);
    else if (name === "summary") drawSummary(shown.parts.summary);
  }
  announce(shown.parts.summary);
  drawCharts();
  const comparison = byId("comparison"), place = state.others.size ? byId("metrics") : null;
  if (comparison.nextElementSibling !== place) byId("main").insertBefore(comparison, place);
  const results = shownRuns().map((run) => `${run} ${state.known.get(run)?.digests.summary}`).join("\n");
  if (state.drawn.results !== results) {
    state.drawn.results = results;
    drawResults();
  }
  drawComparison(changed);
}

/** Shows the results of the chosen run and of those laid over it, a row each; a heading sorts them. */
function drawResults() {
  const valuesOf = (summary) => Object.fromEntries(summary.metrics.flatMap((metric) =>
    [...(metric.recorded ? [[metric.name, metric.value]] : []), ...(metric.validated ? [[`val_${metric.name}`, metric.validation]] : [])]));
  const runs = shownRuns().filter((run) => partsOf(run).summary)
    .map((run) => ({ run, ...partsOf(run).summary, metrics: valuesOf(partsOf(run).summary) }));
  const metrics = [...new Set(runs.flatMap((row) => Object.keys(row.metrics)))].sort((a, b) => (b === "loss") - (a === "loss"));
  const took = (row) => row.seconds ?? Date.now() / 1000 - row.began;
  const swatch = (run) => {
    const node = make("span", { class: "swatch", "aria-hidden": "true" });
    node.style.borderTopColor = palette.series[shownRuns().indexOf(run) % COLORS];
    return make("span", { class: "with-swatch" }, node, run);
  };
  const columns = [["Run", (row) => row.run], ["State", (row) => row.state], ["Tags", (row) => row.tags.join(", ")],
    ...metrics.map((name) => [name, (row) => row.metrics[name], (value) => (value === undefined ? "" : value === null ? "not finite" : figures(value, 4))]),
    ["Steps", (row) => row.steps, count], ["Duration", took, duration], ["Effective training", (row) => row.effective, (value) => (isNumber(value) ? percent(value) : "")],
    ["Lost", (row) => row.lost, count], ["Problems", (row) => row.troubles.join("; ")]];
  const { column, down } = state.order, value = (columns.find(([title]) => title === column) ?? columns[0])[1];
  const rank = (row) => value(row) ?? (down ? -Infinity : Infinity);
  if (column) runs.sort((a, b) => (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : 0) * (down ? -1 : 1));
  const heading = (title) => make("button", { type: "button", "data-key": title, onclick: () => {
    state.order = { column: title, down: column === title && !down };
    drawResults();
    [...byId("results-table").querySelectorAll("button")].find((node) => node.dataset.key === title)?.focus();
  } }, title === column ? `${title} ${down ? "▼" : "▲"}` : title);
  fillTable(byId("results-table"), columns.map(([title, of, text]) => [heading(title), (row) => (text ? text(of(row)) : title === "Run" ? swatch(row.run) : of(row)), text ? "number" : title === "Problems" ? "long" : null]),
    runs.length > 1 ? runs : [], "Overlay other runs to see their results beside those of this one.");
}

async function drawComparison(changed) {
  const others = state.runs.filter((run) => run.id !== state.run);
  const select = byId("comparison-run");
  fillSelect(select, [["", others.length ? "choose a run" : "no other run"], ...others.map((run) => [run.id, run.id])]);
  const first = [...state.others][0];
  if (!select.value && first && others.some((run) => run.id === first)) select.value = first;
  const pair = `${state.run} ${select.value}`;
  if (!changed && state.compared === pair) return;
  state.compared = pair;
  const rows = select.value ? await attempt(() => source.compare(state.run, select.value)) ?? [] : [];
  fillTable(byId("comparison-table"), [["", (row) => (row.differs ? "differs" : "equal")], ["Of", (row) => row.section], ["Name", (row) => row.name],
    [state.run ?? "", (row) => row.a, "long"], [select.value || "other run", (row) => row.b, "long"]], rows, "Choose a run to compare with.", (row) => (row.differs ? "differs" : ""));
}

// ---------------------------------------------------------------------------------------------------- logs

async function drawLogs() {
  const run = state.run;
  const sizes = await attempt(() => source.logs(run));
  if (!sizes || run !== state.run) return;
  fillSelect(byId("log-worker"), sizes.length ? sizes.map(([worker]) => [worker, `worker ${worker}`]) : [["", "no worker"]]);
  const log = state.log, worker = byId("log-worker").value;
  if (worker === "") return;
  const size = Object.fromEntries(sizes)[worker];
  if (log.worker !== worker || (log.last && size !== log.size)) {
    log.worker = worker;
    await showPage({});
  }
}

async function showPage(place) {
  const log = state.log, pre = byId("log");
  const page = await attempt(() => source.log(state.run, log.worker, place));
  if (!page) return;
  const atEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4;
  log.last = page.stop === page.size && place.start === undefined;
  [log.start, log.stop, log.size] = [page.start, page.stop, page.size];
  setText(pre, page.text || "The log is empty.");
  pre.setAttribute("aria-label", `Log of worker ${log.worker}`);
  if (place.start !== undefined) pre.scrollTop = 0;
  else if (log.last && (atEnd || log.fresh !== log.worker)) pre.scrollTop = pre.scrollHeight;
  log.fresh = log.worker;
  setText(byId("log-place"), `${bytes(page.start)} to ${bytes(page.stop)} of ${bytes(page.size)}`);
  byId("log-first").disabled = byId("log-previous").disabled = page.start === 0 || !source.live;
  byId("log-next").disabled = page.stop >= page.size || !source.live;
  byId("log-last").disabled = !source.live;
}

/** Searches from a byte of the log on until enough lines are found, or the log ends. */
async function find(start) {
  const log = state.log, text = byId("log-text").value, matchCase = byId("log-case").checked;
  const search = log.search = { text, resume: null };
  const list = byId("log-results"), more = byId("log-more");
  if (start === 0) list.replaceChildren();
  more.hidden = true;
  if (!text || log.worker === null) {
    setText(byId("log-found"), "");
    return;
  }
  let at = start, lines = 0;
  do {
    const answer = await attempt(() => source.search(state.run, log.worker, text, matchCase, at));
    if (!answer || log.search !== search) return;
    for (const line of answer.found) {
      const shown = line.text || "(empty line)";
      list.append(make("li", {}, line.start === null ? shown
        : make("button", { type: "button", onclick: () => showPage({ start: line.start }) }, shown)));
    }
    lines += answer.found.length;
    at = answer.resume;
    setText(byId("log-found"), at === null ? `${count(list.children.length)} lines found` : `${count(list.children.length)} lines found in ${bytes(at)} of ${bytes(answer.size)}`);
  } while (at !== null && lines < 100);
  search.resume = at;
  more.hidden = at === null;
}

// ----------------------------------------------------------------------------------------------- the page

/** Returns what an action returns; if it fails, says so and returns null. */
async function attempt(action) {
  try {
    return await action();
  } catch (error) {
    state.failing = true;
    say(error instanceof TypeError ? "The server of this page does not respond; trying again." : `Error: ${error.message}`);
    return null;
  }
}

async function refresh() {
  const failed = state.failing;
  state.failing = false;
  const answer = await attempt(() => source.runs(state.runsDigest));
  if (!answer) return;
  if (failed) state.said = "";
  if (answer.runs) {
    [state.runs, state.runsDigest] = [answer.runs, answer.digest];
    if (!state.runs.some((run) => run.id === state.run)) state.run = state.runs[0]?.id ?? null;
    state.others = new Set([...state.others].filter((run) => run !== state.run && state.runs.some(({ id }) => id === run)));
    drawRuns();
  }
  document.body.classList.toggle("no-run", state.run === null);
  byId("empty").hidden = state.run !== null;
  if (state.run === null) {
    say("There is no run yet.");
    return;
  }
  for (const run of shownRuns()) {
    const held = state.known.get(run) ?? { parts: {}, digests: {} };
    const news = await attempt(() => source.run(run, held.digests));
    if (!news) return;
    Object.assign(held.parts, news.parts);
    Object.assign(held.digests, news.digests);
    state.known.set(run, held);
  }
  draw();
  await drawLogs();
}

let polling = null, again = false, timer = null;

/** Refreshes now, once at a time, and then every two seconds while the page is visible. */
async function poll() {
  again = true;
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  while (again) {
    again = false;
    await refresh();
  }
  polling = false;
  if (source.live && !document.hidden) timer = setTimeout(poll, POLL_EVERY);
}

function start() {
  readPalette();
  if (!source.live) {
    document.body.classList.add("report");
    byId("log-pages").hidden = true;
  }
  const sections = [...document.querySelectorAll("main > section")].filter((section) => source.live || section.id !== "comparison");
  byId("sections").append(...sections.map((section) => make("a", { href: `#${section.id}`, onclick: (event) => {
    event.preventDefault();
    section.scrollIntoView();
    section.querySelector("h2").setAttribute("tabindex", "-1");
    section.querySelector("h2").focus({ preventScroll: true });
  } }, section.dataset.nav ?? section.querySelector("h2").textContent)));
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  if (matchMedia("(max-width: 52rem)").matches) document.querySelector("#runs details").open = false;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readPalette();
    for (const chart of charts.values()) {
      if (chart.spec.kind === "bars") chart.load();
      else chart.fillLegend();
      chart.redraw();
    }
    state.drawn = {};
    draw();
  });
  const metricCharts = () => [...metricSpan.charts];
  byId("smoothing").addEventListener("input", () => {
    const share = Number(byId("smoothing").value);
    setText(byId("smoothing-value"), share ? `mean over ${share} % of what is shown` : "off");
    for (const chart of metricCharts()) {
      chart.redraw();
      chart.loadSoon();
    }
  });
  byId("log-axis").addEventListener("change", () => metricCharts().forEach((chart) => chart.redraw()));
  byId("metric-axis").addEventListener("change", () => {
    metricSpan.axis = byId("metric-axis").value;
    metricSpan.start = metricSpan.stop = metricSpan.cursor = null;
    metricCharts().forEach((chart) => chart.load());
  });
  byId("parts-workers").addEventListener("change", drawCharts);
  byId("runs-filter").addEventListener("input", drawRuns);
  byId("comparison-run").addEventListener("change", () => drawComparison(true));
  byId("log-worker").addEventListener("change", () => {
    state.log = { worker: byId("log-worker").value, start: 0, stop: 0, size: 0, last: true, search: null };
    byId("log-results").replaceChildren();
    setText(byId("log-found"), "");
    byId("log-more").hidden = true;
    showPage({});
  });
  byId("log-search").addEventListener("submit", (event) => {
    event.preventDefault();
    find(0);
  });
  byId("log-more").addEventListener("click", () => find(state.log.search?.resume ?? 0));
  byId("log-first").addEventListener("click", () => showPage({ start: 0 }));
  byId("log-previous").addEventListener("click", () => showPage({ before: state.log.start }));
  byId("log-next").addEventListener("click", () => showPage({ start: state.log.stop }));
  byId("log-last").addEventListener("click", () => showPage({}));
  addEventListener("hashchange", () => {
    const before = state.run;
    readAddress();
    if (state.run !== before) choose(state.run);
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && source.live) poll(); });
  readAddress();
  say("Reading the run …");
  poll();
}

start();
