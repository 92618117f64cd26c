"use strict";
// Draws the curves of report.html. A curve has the values of each axis at some steps, and each metric at others: `through` interpolates.

const data = JSON.parse(document.getElementById("data").textContent);
const view = document.getElementById("view");
const other = document.getElementById("other");
const dark = matchMedia("(prefers-color-scheme: dark)");

const numbers = text => new Float32Array(Uint8Array.from(atob(text), char => char.charCodeAt(0)).buffer);
for (const curve of data.curves) {
  for (const axis in curve.x) curve.x[axis] = numbers(curve.x[axis]);
  for (const metric in curve.y) curve.y[metric] = curve.y[metric].map(numbers);
  Object.setPrototypeOf(curve.y, null);  // a metric may be called "constructor"
}

// Names may hold any text, and plotly interprets some HTML and %{templates} in what it writes.
const plain = text => text.replace(/[&<>%]/g, char => `&#${char.codePointAt(0)};`);

// Linear interpolation of (xs, ys) at each of `places`, NaN outside; xs and places ascend.
function through(places, xs, ys) {
  let i = 0;
  return Float64Array.from(places, place => {
    while (i < xs.length - 2 && xs[i + 1] < place) i++;
    if (!(place >= xs[0] && place <= xs[xs.length - 1])) return NaN;
    const width = xs[i + 1] - xs[i];
    return width > 0 ? ys[i] + (ys[i + 1] - ys[i]) * (place - xs[i]) / width : ys[i];
  });
}

function points(curve, metric, axis) {
  if (!curve.y[metric]) return null;
  const [steps, y] = curve.y[metric];
  return { x: axis === "step" ? steps : through(steps, curve.x.step, curve.x[axis]), y };
}

// A recipe's curve minus that of its control with the same seed, at the same place of the axis. For a mean, the mean of these differences.
function difference(curve, metric, axis) {
  if (curve.seed === null) return meanDifference(curve.side, metric, axis);
  const pair = shownPair();
  const control = !pair ? data.controls[curve.side] : curve.side === pair[1] ? pair[0] : null;
  const base = data.curves.find(one => one.side === control && one.seed === curve.seed);
  const [mine, its] = [points(curve, metric, axis), base && points(base, metric, axis)];
  if (!mine || !its) return null;
  // At the sparser evaluations: between two of them, a line lies above a curve that falls fast.
  const x = mine.x.length <= its.x.length ? mine.x : its.x;
  const [own, others] = [mine, its].map(one => through(x, one.x, one.y));
  return { x, y: own.map((value, i) => value - others[i]) };
}

function meanDifference(side, metric, axis) {
  const seeds = new Map();  // the first run of each seed
  for (const one of data.curves) if (one.side === side && one.seed !== null && !seeds.has(one.seed)) seeds.set(one.seed, one);
  const each = [...seeds.values()].map(one => difference(one, metric, axis)).filter(one => one);
  if (!each.length) return null;
  const x = each.map(one => one.x).reduce((one, two) => two.length < one.length ? two : one);
  const curves = each.map(one => through(x, one.x, one.y));
  return { x, y: Float64Array.from(x, (_, i) => curves.reduce((sum, y) => sum + y[i], 0) / curves.length), count: curves.length };
}

// The sides of the pair that is shown, [control, other]; null if all are.
function shownPair() {
  const show = view.elements.show ? view.elements.show.value : "all";
  return show === "all" ? null : data.pairs[Number(show)];
}

const visible = side => shownPair()?.includes(side) ?? true;

function traces(metric, axis, minus) {
  const drawn = [];
  for (const curve of data.curves) {
    const side = data.sides[curve.side];
    const place = (minus ? difference : points)(curve, metric, axis);
    if (!place || !place.x.length || !visible(curve.side)) continue;
    const mean = curve.seed === null, { x, y, count = curve.count } = place;
    drawn.push({
      x, y, type: "scatter", mode: place.x.length > 1 ? "lines" : "markers",
      name: plain(mean ? `${side.name} (mean of ${count})` : `${side.name}, seed ${curve.seed}: ${curve.name}`),
      opacity: mean ? 1 : place.x.length > 200 ? 0.2 : 0.45,  // noise of every step is a background
      line: { color: side.color, width: mean ? 2.5 : 1, dash: mean ? side.dash : "solid" },
      legendgroup: `${curve.side}`, showlegend: mean,
      hovertemplate: "%{y:.5~g} at %{x:.5~s}",
      meta: { mean, side: side.name, run: curve.name },
    });
  }
  return drawn.sort((one, two) => one.meta.mean - two.meta.mean);  // the means on top
}

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(id, metric, label, minus, log) {
  const div = document.getElementById(id);
  const axis = view.elements.axis.value;
  const drawn = traces(metric, axis, minus);
  const scale = { gridcolor: color("--line"), linecolor: color("--quiet"), zerolinecolor: color("--line"), automargin: true };
  const [ink, paper] = [color("--ink"), color("--paper")];
  Plotly.react(div, drawn, {
    // The zoom is kept when the colours change, and reset when the curves change.
    uirevision: [axis, metric, minus, log, view.elements.log_x.checked, view.elements.show?.value].join(),
    paper_bgcolor: paper, plot_bgcolor: paper, font: { color: ink, family: "system-ui, sans-serif", size: 13 },
    margin: { l: 50, r: 12, t: 12, b: 44 }, showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, hovermode: "closest",
    hoverlabel: { namelength: -1, bgcolor: paper, bordercolor: color("--quiet"), font: { color: ink } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",  // a finger scrolls the page
    xaxis: { ...scale, title: { text: data.axes[axis] }, type: view.elements.log_x.checked ? "log" : "linear", exponentformat: axis === "tokens" ? "B" : "SI" },
    yaxis: { ...scale, title: { text: label }, type: log ? "log" : "linear", exponentformat: "SI", zeroline: minus, zerolinecolor: ink },
  }, { displaylogo: false, responsive: true, modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]] });
  const last = drawn.filter(trace => trace.meta.mean).map(trace => {
    const end = trace.y.findLastIndex(Number.isFinite);
    return end < 0 ? `${trace.meta.side}: no values` : `${trace.meta.side}: from ${trace.y.find(Number.isFinite).toPrecision(5)} to ${trace.y[end].toPrecision(5)}`;
  });
  div.setAttribute("aria-label", `${label} over ${data.axes[axis]}. ${last.join("; ") || "No curves"}.`);
}

// Disable metrics that none of the shown sides has logged.
function offerMetrics() {
  const select = other.elements.metric;
  for (const option of select.options) {
    option.disabled = option.hidden = !data.curves.some(curve => visible(curve.side) && curve.y[option.value]);
  }
  if (select.selectedOptions[0]?.disabled) select.value = [...select.options].find(option => !option.disabled)?.value ?? select.value;
}

function drawAll() {
  const [metric, minus] = view.elements.loss.value.split("-");
  const log = view.elements.log_y;
  log.disabled = Boolean(minus);  // a difference may be negative
  draw("loss", metric, data.labels[view.elements.loss.value], Boolean(minus), log.checked && !minus);
  if (other) offerMetrics();
  if (other) draw("metric", other.elements.metric.value, plain(other.elements.metric.value), false, other.elements.log_y.checked);
}

for (const form of [view, other]) form?.addEventListener("change", drawAll);
dark.addEventListener("change", drawAll);
drawAll();
