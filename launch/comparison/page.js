"use strict";
// Draws the curves of report.html. Each run, and each mean over seeds, has its axes at some rows and every metric at others; the step joins the two.

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

// A run's folder may have any name, and plotly reads a small HTML, and %{templates}, in what it writes.
const plain = text => text.replace(/[&<>%]/g, char => `&#${char.codePointAt(0)};`);

// The line through (xs, ys) at each of `places`, NaN outside of it; xs and places ascend.
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

// Of a recipe's curve, how far it lies above that of its control with the same seed, at the same place of the axis.
function difference(curve, metric, axis) {
  const control = data.controls[curve.side];
  const base = data.curves.find(one => one.side === control && one.seed === curve.seed);
  const [mine, its] = [points(curve, metric, axis), base && points(base, metric, axis)];
  if (!mine || !its) return null;
  const at = through(mine.x, its.x, its.y);
  return { x: mine.x, y: mine.y.map((value, i) => value - at[i]) };
}

function visible(side) {
  const show = view.elements.show ? view.elements.show.value : "all";
  return show === "all" || data.pairs[Number(show)].includes(side);
}

function traces(metric, axis, minus) {
  const drawn = [];
  for (const curve of data.curves) {
    const side = data.sides[curve.side];
    const place = (minus ? difference : points)(curve, metric, axis);
    const box = document.querySelector(`#legend [value="${curve.side}"]`);
    if (!place || !place.x.length || !visible(curve.side) || !box.checked) continue;
    const mean = curve.seed === null;
    drawn.push({
      ...place, type: "scatter", mode: mean ? "lines+markers" : "lines",
      name: plain(mean ? `${side.name}, mean of ${curve.count} seed(s)` : `${side.name}, seed ${curve.seed}: ${curve.name}`),
      opacity: mean ? 1 : place.x.length > 200 ? 0.2 : 0.45,  // noise of every step is a background
      line: { color: color(`--c${side.color}`), width: mean ? 2.5 : 1, dash: mean ? side.dash : "solid" },
      marker: { symbol: side.symbol, size: 8, maxdisplayed: 10 },
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
    // A zoom outlives a change of colours, not one of what is drawn.
    uirevision: [axis, metric, minus, log, view.elements.log_x.checked, view.elements.show?.value].join(),
    paper_bgcolor: paper, plot_bgcolor: paper, font: { color: ink, family: "system-ui, sans-serif", size: 13 },
    margin: { l: 50, r: 12, t: 12, b: 44 }, showlegend: false, hovermode: "closest",
    hoverlabel: { namelength: -1, bgcolor: paper, bordercolor: color("--quiet"), font: { color: ink } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",  // a finger scrolls the page
    xaxis: { ...scale, title: { text: data.axes[axis] }, type: view.elements.log_x.checked ? "log" : "linear", exponentformat: axis === "tokens" ? "B" : "SI" },
    yaxis: { ...scale, title: { text: label }, type: log ? "log" : "linear", exponentformat: "SI", zeroline: minus, zerolinecolor: ink },
  }, { displayModeBar: false, responsive: true });
  const last = drawn.filter(trace => trace.meta.mean).map(trace => {
    const end = trace.y.findLastIndex(Number.isFinite);
    return end < 0 ? `${trace.meta.side}: nothing to draw` : `${trace.meta.side}: from ${trace.y.find(Number.isFinite).toPrecision(5)} to ${trace.y[end].toPrecision(5)}`;
  });
  div.setAttribute("aria-label", `${label} over ${data.axes[axis]}. ${last.join("; ") || "No runs to draw"}.`);
}

// What no side that is shown has logged cannot be chosen.
function offerMetrics() {
  const select = other.elements.metric;
  for (const option of select.options) {
    option.disabled = option.hidden = !data.curves.some(curve => visible(curve.side) && curve.y[option.value]);
  }
  if (select.selectedOptions[0]?.disabled) select.value = [...select.options].find(option => !option.disabled)?.value ?? select.value;
}

function drawAll() {
  for (const box of document.querySelectorAll("#legend input")) box.closest("li").hidden = !visible(Number(box.value));
  const [metric, minus] = view.elements.loss.value.split("-");
  const log = view.elements.log_y;
  log.disabled = Boolean(minus);  // a difference may be negative
  draw("loss", metric, data.labels[view.elements.loss.value], Boolean(minus), log.checked && !minus);
  if (other) offerMetrics();
  if (other) draw("metric", other.elements.metric.value, plain(other.elements.metric.value), false, other.elements.log_y.checked);
}

// The buttons are the zoom of the keyboard; ranges are in powers of ten where the scale is logarithmic.
function zoom(event) {
  const div = document.getElementById(event.currentTarget.dataset.chart);
  const action = event.target.value;
  const [low, high] = div._fullLayout.xaxis.range;
  const width = high - low;
  const moved = { in: [low + width / 4, high - width / 4], out: [low - width / 2, high + width / 2], left: [low - width / 4, high - width / 4], right: [low + width / 4, high + width / 4] };
  if (action === "reset") Plotly.relayout(div, { "xaxis.autorange": true, "yaxis.autorange": true });
  else if (moved[action]) Plotly.relayout(div, { "xaxis.range": moved[action] });
}

for (const form of [view, other]) form?.addEventListener("change", drawAll);
document.getElementById("legend").addEventListener("change", drawAll);
for (const group of document.querySelectorAll(".zoom")) group.addEventListener("click", zoom);
dark.addEventListener("change", drawAll);
for (const [event, paper] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => { document.documentElement.classList.toggle("paper", paper); drawAll(); });
}
drawAll();
