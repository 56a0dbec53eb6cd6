// Draws the report page from the JSON that it contains. Text of models and environments is data: it reaches the page
// only through text nodes (`element` and `shape` below), never as markup. A section can be drawn again (`page.live.js`)
// and keeps the reader's choices.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const choices = new Map(); // what the reader has chosen, by the name of the control

// Elements ----------------------------------------------------------------------------------------------------------

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const element = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const shape = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const byId = (id) => document.getElementById(id);

function section(id, title, about) {
  const node = element("section", { id }, element("h2", {}, title), about ? element("p", { class: "about" }, about) : null);
  const old = byId(id);
  if (old) {
    // Charts are drawn a moment later: until then the page must not jump.
    node.style.minHeight = `${old.offsetHeight}px`;
    setTimeout(() => { node.style.minHeight = ""; }, 300);
    old.replaceWith(node);
  } else {
    byId("page").append(node);
    byId("sections").append(element("a", { href: `#${id}` }, title));
  }
  return node;
}
const empty = (words) => element("p", { class: "empty" }, words);

/** The reader's earlier choice in a control, if it still exists, else the first option. */
const chosen = (key, options) => {
  const values = options.map(([value]) => String(value));
  return values.includes(choices.get(key)) ? choices.get(key) : values[0];
};

function picker(label, options, onPick, key = label) {
  const select = element("select", { change: () => { choices.set(key, select.value); onPick(select.value); }, "aria-label": label });
  for (const [value, words] of options) select.append(element("option", { value }, words));
  select.value = chosen(key, options);
  return element("label", {}, label, select);
}

function switcher(label, options, onPick, key = label) {
  const buttons = options.map(([value, words]) =>
    element("button", { type: "button", "aria-pressed": String(value === chosen(key, options)), "data-value": value, click: () => pick(value) }, words));
  const pick = (value) => {
    choices.set(key, value);
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === value));
    onPick(value);
  };
  return element("span", { class: "switch", role: "group", "aria-label": label }, buttons);
}

// Figures as words --------------------------------------------------------------------------------------------------

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
function short(value) {
  const size = Math.abs(value);
  if (size >= 1000) return plain.format(value);
  if (size !== 0 && size < 0.001) return value.toExponential(0);
  return String(Number(value.toPrecision(size >= 100 ? 3 : 2)));
}
function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${short(seconds / 60)} min`;
  return `${short(seconds / 3600)} h`;
}
const FORMATS = { share: (value) => `${Number((value * 100).toFixed(value <= 0 || value >= 0.1 ? 0 : value < 0.01 ? 2 : 1))} %`, number: short };
FORMATS.fraction = FORMATS.share;
const AXES = {
  tasks: { title: "tasks seen in training", format: (value) => plain.format(value) },
  seconds: { title: "time spent training, evaluation not counted", format: duration },
};
const seeds = (count) => (count === 1 ? "1 seed" : `${count} seeds`);
const colour = (group) => (group === null ? "c0" : `c${data.groups[group].colour} d${data.groups[group].dash}`);

/** The names of groups with their colours; with `onToggle` a click on one hides or shows it. */
function legend(groups, hidden, onToggle) {
  return element("ul", { class: "legend" }, groups.map((group) => {
    const words = [element("i"), data.groups[group].name];
    const toggle = onToggle && element("button", { type: "button", "aria-pressed": String(!hidden.has(group)), click: () => onToggle(group) }, words);
    return element("li", { class: colour(group) }, toggle || words);
  }));
}

const pen = document.createElement("canvas").getContext("2d");
function textWidth(words, weight = 400) {
  pen.font = `${weight} 12px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(words).width;
}
/** As much of a text as fits into a width. */
function fitted(words, width) {
  let text = words;
  while (text && textWidth(text === words ? text : `${text}…`) > width) text = text.slice(0, -1);
  return text === words ? words : `${text}…`;
}

// Charts ------------------------------------------------------------------------------------------------------------

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 18000, 36000, 86400, 172800];

function ticks(low, high, wanted, axis) {
  const range = high - low;
  let step = 10 ** Math.floor(Math.log10(range / wanted));
  if (axis === "seconds") step = TIME_STEPS.find((each) => range / each <= wanted) || step;
  else step *= [1, 2, 5, 10].find((factor) => range / (step * factor) <= wanted);
  if (axis === "tasks") step = Math.max(1, step);
  const found = [];
  // Multiples of the step, because sums of fractions miss zero.
  for (let index = Math.ceil(low / step); index * step <= high + step / 1000; index += 1) found.push(index * step);
  return found;
}

/** Draw now and whenever the width changes. */
function responsive(draw) {
  const box = element("div", { class: "chart" });
  let width = 0;
  new ResizeObserver(() => {
    const found = Math.floor(box.clientWidth);
    if (found > 0 && found !== width) draw(box, (width = found));
  }).observe(box);
  return { box, redraw: () => width && draw(box, width) };
}

const largest = (values, start) => values.reduce((one, other) => Math.max(one, other), start);
const pathOf = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/** A line for each group: the mean over its runs with its interval, each run as a thin line behind it. */
function lineChart({ curve, axis, height, labels, key }) {
  const hidden = choices.get(`hidden in ${key}`) || new Set();
  if (key) choices.set(`hidden in ${key}`, hidden);
  return responsive(function draw(box, width) {
    const spec = curve();
    const lines = spec.lines.filter((line) => !hidden.has(line.group));
    const blind = (spec.blind || []).filter((line) => !hidden.has(line.group));
    const x_axis = axis();
    const format = FORMATS[spec.format];
    const direct = labels && width >= 620;
    const margin = { top: 14, right: direct ? 24 : 10, bottom: labels ? 44 : 26, left: 46 };
    const everyX = lines.flatMap((line) => line.runs.flatMap((run) => run[x_axis]));
    const everyY = lines.flatMap((line) => line.runs.flatMap((run) => run.y)).concat(spec.ceiling ?? []);
    const highX = largest(everyX, 1);
    const share = spec.format === "share";
    const lowY = share ? 0 : -largest(everyY.map((value) => -value), 0);
    const highest = largest(everyY, lowY);
    const highY = share ? 1 : highest + 0.05 * (highest - lowY || 1);
    const counted = (line) => line.runs.filter((run) => !run.open).length || line.runs.length;
    const nameOf = (line) => {
      const name = data.groups[line.group].name;
      return `${name.length > 46 ? `${name.slice(0, 45)}…` : name}, ${seeds(counted(line))}`;
    };
    const several = (line) => line.runs.length > 1 && line.mean.y.length > 0;
    const drawn = (line) => (several(line) ? line.mean : line.runs[0]);
    const points = (stream) => stream.y.map((value, i) => [x(stream[x_axis][i]), y(value)]);
    const lengthOf = (line) => textWidth(nameOf(line), 600) + 12;
    if (direct) {
      // As wide as the plot can be while each name still fits behind the end of its line.
      const space = width - margin.left;
      const fits = lines.map((line) => (space - lengthOf(line)) / (drawn(line)[x_axis].at(-1) / highX || 1e-9));
      margin.right = Math.max(margin.right, space - Math.max(Math.min(...fits), space / 2));
    }
    const inner = { width: width - margin.left - margin.right, height: height - margin.top - margin.bottom };
    const x = (value) => margin.left + (value / highX) * inner.width;
    const y = (value) => margin.top + (1 - (value - lowY) / (highY - lowY)) * inner.height;
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": spec.title });

    for (const value of share ? [0, 0.25, 0.5, 0.75, 1] : ticks(lowY, highY, 5)) {
      svg.append(
        shape("line", { class: value === 0 ? "base" : "grid", x1: margin.left, x2: margin.left + inner.width, y1: y(value), y2: y(value) }),
        shape("text", { x: margin.left - 8, y: y(value) + 4, "text-anchor": "end" }, format(value)));
    }
    for (const value of ticks(0, highX, Math.max(2, Math.floor(inner.width / (labels ? 70 : 55))), x_axis)) {
      svg.append(shape("text", { x: x(value), y: margin.top + inner.height + 18, "text-anchor": "middle" }, AXES[x_axis].format(value)));
    }
    if (labels) svg.append(shape("text", { x: margin.left + inner.width, y: height - 6, "text-anchor": "end" }, AXES[x_axis].title));
    if (spec.ceiling !== null && spec.ceiling !== undefined) {
      svg.append(
        shape("line", { class: "rule", x1: margin.left, x2: margin.left + inner.width, y1: y(spec.ceiling), y2: y(spec.ceiling) }),
        shape("text", { x: margin.left + inner.width, y: y(spec.ceiling) - 6, "text-anchor": "end" }, `information ceiling ${format(spec.ceiling)}`));
    }

    const paths = [];
    for (const line of lines) {
      const group = shape("g", { class: colour(line.group) });
      const { mean } = line;
      if (labels && several(line) && mean.low.some((value) => value !== null)) {
        const clamp = (value) => y(Math.min(Math.max(value, lowY), highY));
        const upper = mean.y.map((value, i) => [x(mean[x_axis][i]), clamp(mean.high[i] ?? value)]);
        const lower = mean.y.map((value, i) => [x(mean[x_axis][i]), clamp(mean.low[i] ?? value)]);
        group.append(shape("path", { class: "band", d: `${pathOf(upper.concat(lower.reverse()))}Z` }));
      }
      for (const run of line.runs) {
        group.append(shape("path", { class: `${several(line) ? "run" : "mean"}${run.open ? " open" : ""}`, d: pathOf(points(run)) }));
        if (run.y.length === 1) group.append(shape("circle", { class: "dot", cx: x(run[x_axis][0]), cy: y(run.y[0]), r: 3 }));
      }
      if (several(line)) group.append(shape("path", { class: "mean", d: pathOf(points(mean)) }));
      svg.append(group);
      paths.push({ line, points: points(drawn(line)) });
    }
    for (const line of blind) svg.append(shape("g", { class: colour(line.group) }, shape("path", { class: "blind", d: pathOf(points(drawn(line))) })));
    if (direct) placeNames(svg, paths, { nameOf, lengthOf, bottom: margin.top + inner.height });
    const toggle = (group) => {
      if (!hidden.delete(group)) hidden.add(group);
      draw(box, width);
    };
    const crowded = labels && (!direct || spec.lines.length > 8);
    box.replaceChildren(...(crowded ? [legend(spec.lines.map((line) => line.group), hidden, toggle)] : []), svg);
    pointAt(box, svg, { lines, blind, axis: x_axis, format, x, y, margin, inner, width });
  });
}

/** Put each name after the end of its line, moved up or down until it overlaps no other line or name. */
function placeNames(svg, paths, { nameOf, lengthOf, bottom }) {
  const taken = [];
  for (const { line, points } of paths) {
    const [left, end] = points.at(-1);
    const right = left + lengthOf(line);
    const free = (at) => at > 8 && at < bottom - 4
      && !taken.some((other) => left < other.right && other.left < right && Math.abs(other.at - at) < 16)
      && !paths.some((other) => other.line !== line && crosses(other.points, left + 6, right, at));
    const shifts = Array.from({ length: 30 }, (_, index) => (index % 2 ? -7 : 7) * Math.ceil(index / 2));
    const at = shifts.map((shift) => end + shift).find(free) ?? end;
    taken.push({ left, right, at });
    if (Math.abs(at - end) > 20) svg.append(shape("line", { class: `leader ${colour(line.group)}`, x1: left + 2, y1: end, x2: left + 8, y2: at }));
    svg.append(shape("text", { class: `name ${colour(line.group)}`, x: left + 8, y: at + 4 }, nameOf(line)));
  }
}
const crosses = (points, left, right, at) => points.some(([x, y], i) => {
  const [fromX, fromY] = points[Math.max(0, i - 1)];
  return x >= left && fromX <= right && Math.max(y, fromY) > at - 9 && Math.min(y, fromY) < at + 9;
});

/** Show the values of all lines at the pointer. */
function pointAt(box, svg, { lines, blind, axis, format, x, y, margin, inner, width }) {
  const seriesOf = (known) => known.map((line) => {
    const several = line.runs.length > 1 && line.mean.y.length > 0;
    return { group: line.group, from: several ? line.mean : line.runs[0], several, words: known === blind ? ", blind" : "" };
  });
  const series = seriesOf(lines).concat(seriesOf(blind));
  const places = [...new Set(series.flatMap((each) => each.from[axis]))].sort((one, other) => one - other);
  if (!places.length) return;
  const cross = shape("line", { class: "cross", y1: margin.top, y2: margin.top + inner.height, visibility: "hidden" });
  const dots = shape("g");
  svg.append(cross, dots);
  const tip = element("div", { class: "tip", hidden: true });
  box.append(tip);
  const hide = () => {
    tip.hidden = true;
    dots.replaceChildren();
    cross.setAttribute("visibility", "hidden");
  };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const place = places.reduce((one, other) => (Math.abs(x(other) - at) < Math.abs(x(one) - at) ? other : one));
    const span = places[places.length - 1] / 60;
    const rows = [];
    dots.replaceChildren();
    for (const { group, from, several, words } of series) {
      const index = from[axis].reduce((best, value, i) => (Math.abs(value - place) < Math.abs(from[axis][best] - place) ? i : best), 0);
      if (Math.abs(from[axis][index] - place) > span) continue;
      const low = several ? from.low[index] : null;
      const interval = low === null || low === undefined ? "" : ` (${format(low)} to ${format(from.high[index])})`;
      dots.append(shape("circle", { class: `dot ${colour(group)}`, cx: x(from[axis][index]), cy: y(from.y[index]), r: 4 }));
      rows.push(element("div", { class: colour(group) }, element("i"), `${data.groups[group].name}${words}: ${format(from.y[index])}${interval}`));
    }
    cross.setAttribute("x1", x(place));
    cross.setAttribute("x2", x(place));
    cross.setAttribute("visibility", "visible");
    tip.replaceChildren(element("b", {}, `${AXES[axis].format(place)}${axis === "tasks" ? " tasks" : ""}`), ...rows);
    tip.hidden = false;
    const right = x(place) + 14 + tip.offsetWidth > width;
    tip.style.left = `${Math.max(0, right ? x(place) - 14 - tip.offsetWidth : x(place) + 14)}px`;
    tip.style.top = `${margin.top + 6}px`;
  });
}

/** A row for each category, with a lane for each group: seeds as rings, the mean as a dot, and its interval. */
function dotPlot(rows, format) {
  return responsive((box, width) => {
    const groups = [...new Set(rows.flatMap((row) => row.marks.map((mark) => mark.group)))].filter((group) => group !== null);
    groups.sort((one, other) => one - other);
    const narrow = width < 440;
    const words = FORMATS[format];
    const labelWidth = narrow ? 0 : Math.min(270, Math.max(...rows.map((row) => Math.max(textWidth(row.label), textWidth(row.note || "")))) + 10);
    const margin = { left: labelWidth + 8, right: 56, top: 8, bottom: 24 };
    const every = rows.flatMap((row) => row.marks.flatMap((mark) => mark.values.concat(mark.high ?? [])));
    const high = format === "share" ? 1 : largest(every, 1e-9) * 1.05;
    const lane = 18;
    const tops = [];
    let height = margin.top;
    for (const row of rows) {
      tops.push(height);
      height += (narrow ? 22 : 0) + Math.max(row.note && !narrow ? 30 : lane, row.marks.length * lane) + 16;
    }
    const inner = width - margin.left - margin.right;
    const x = (value) => margin.left + (Math.min(Math.max(value, 0), high) / high) * inner;
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height + margin.bottom}`, height: height + margin.bottom, role: "img" });
    for (const value of format === "share" ? [0, 0.25, 0.5, 0.75, 1] : ticks(0, high, 4)) {
      svg.append(
        shape("line", { class: value === 0 ? "base" : "grid", x1: x(value), x2: x(value), y1: 0, y2: height - 6 }),
        shape("text", { x: x(value), y: height + 12, "text-anchor": "middle" }, words(value)));
    }
    rows.forEach((row, index) => {
      let middle = tops[index] + 12;
      const side = narrow ? { x: margin.left, "text-anchor": "start" } : { x: labelWidth - 4, "text-anchor": "end" };
      const line = narrow && row.note ? [row.label, row.note].filter(Boolean).join(", ") : row.label;
      const room = narrow ? width - margin.left : labelWidth - 4;
      svg.append(shape("text", { class: "row", ...side, y: middle + 4 }, fitted(line, room)));
      if (!narrow && row.note) svg.append(shape("text", { ...side, y: middle + 20, "font-size": 11 }, fitted(row.note, room)));
      if (narrow) middle += 22;
      if (row.ceiling !== null && row.ceiling !== undefined) {
        const bottom = middle - 10 + Math.max(1, row.marks.length) * lane;
        svg.append(shape("line", { class: "rule", x1: x(row.ceiling), x2: x(row.ceiling), y1: middle - 10, y2: bottom },
          shape("title", {}, `information ceiling ${words(row.ceiling)}`)));
      }
      for (const mark of row.marks) {
        const group = shape("g", { class: colour(mark.group) });
        if (mark.low !== null) {
          group.append(shape("line", { class: "whisker", x1: x(mark.low), x2: x(mark.high), y1: middle, y2: middle }));
        }
        if (mark.values.length > 1) for (const value of mark.values) group.append(shape("circle", { class: "seed", cx: x(value), cy: middle, r: 3 }));
        const furthest = Math.max(mark.mean, mark.high ?? 0, ...mark.values);
        group.append(
          shape("circle", { class: "dot", cx: x(mark.mean), cy: middle, r: 5 },
            shape("title", {}, `${mark.group === null ? row.label : data.groups[mark.group].name}: ${words(mark.mean)}, ${seeds(mark.values.length)}`)),
          shape("text", { class: "value", x: Math.min(x(furthest) + 9, width - 44), y: middle + 4 }, words(mark.mean)));
        svg.append(group);
        middle += lane;
      }
      if (!row.marks.length) svg.append(shape("text", { x: margin.left + 6, y: middle + 4 }, "nothing measured"));
    });
    box.replaceChildren(...(groups.length ? [legend(groups)] : []), svg);
  });
}

// Sections ----------------------------------------------------------------------------------------------------------

function head() {
  document.title = data.title;
  byId("headline").textContent = data.headline;
  byId("lede").textContent = data.lede;
  const masthead = document.querySelector(".masthead");
  for (const id of ["problems", "notes"]) byId(id)?.remove();
  if (data.problems.length) masthead.append(element("ul", { class: "notices", id: "problems" }, data.problems.map((words) => element("li", {}, words))));
  if (data.notes.length) masthead.append(element("ul", { class: "notices quiet-notices", id: "notes" }, data.notes.map((words) => element("li", {}, words))));
}

function themeButton() {
  const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  byId("theme").addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; });
}

const INTERVAL = "Thin lines are single runs, thick ones the mean of their seeds; the band is the 95 % t-interval of the mean over seeds. ";
const BLIND = "Dotted: the same tasks blind, without look-ahead; blind is what the policy's weights know. ";

function learning() {
  const node = section("learning", "Learning", data.success.length
    ? `${INTERVAL}${data.success.some((curve) => curve.blind.length) ? BLIND : ""}A mean goes as far as all of its runs. The ceiling is the best chance of an agent that knows the rules but no exception to them.`
    : null);
  if (!data.success.length) return node.append(empty("No run has been evaluated yet: a learning curve needs at least one evaluation (eval.every)."));
  const splits = data.success.map((curve, index) => [index, curve.title]);
  const axes = [["tasks", "tasks"], ["seconds", "time"]];
  let split = Number(chosen("evaluated on", splits));
  let axis = chosen("Horizontal axis", axes);
  const chart = lineChart({ curve: () => data.success[split], axis: () => axis, height: 430, labels: true, key: "learning" });
  chart.box.id = "learning-chart";
  const redraw = () => chart.redraw();
  node.append(element("div", { class: "controls" },
    data.success.length > 1 ? picker("evaluated on", splits, (value) => { split = Number(value); redraw(); }) : null,
    switcher("Horizontal axis", axes, (value) => { axis = value; redraw(); })), chart.box);
}

function comparison() {
  const node = section("comparison", "Comparison", data.comparison.length
    ? "Tasks to a target: the geometric mean over seeds of the tasks seen at the first of two consecutive evaluations at or above it. If a run ended before, the figure is a bound, marked >, ≥ or ≤. Ratio: times fewer tasks to 70 % of the ceiling, or to 70 % success if no ceiling is known, paired by seed. Costs are those of training, without evaluation."
    : null);
  if (!data.comparison.length) return node.append(empty("A comparison needs runs that were evaluated on val after some training."));
  const groupTable = ({ title, columns, rows }) => {
    const head = columns.map((column, index) => element("th", { class: index ? "number" : null, scope: "col" }, column));
    const body = rows.map((row) => element("tr", { class: colour(row.group) },
      element("td", {}, element("span", { class: "swatch" }), data.groups[row.group].name),
      row.cells.map((cell) => element("td", { class: "number" }, cell))));
    return element("div", { class: "scroll" }, element("table", {}, element("caption", {}, title), element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
  };
  for (const { title, tables, words } of data.comparison) {
    if (data.comparison.length > 1) node.append(element("h3", { class: "apart" }, title));
    node.append(...tables.map(groupTable));
    node.append(...words.map((sentence) => element("p", { class: "quiet" }, sentence)));
  }
}

function levels() {
  const node = section("levels", "By split and level", data.levels.length
    ? "Success at the last evaluation: each ring one seed, the dot their mean with its 95 % t-interval, the dotted line the ceiling where it is known." : null);
  if (!data.levels.length) return node.append(empty("Nothing evaluated yet."));
  node.append(dotPlot(data.levels, "share").box);
}

function worldModel() {
  const node = section("world-model", "World model", data.world_model.length
    ? "How well the replies of the environment are predicted, over training and by kind of reply." : null);
  if (!data.world_model.length) return node.append(empty("No run here trained or evaluated a world model."));
  const halves = element("div", { class: "halves" });
  node.append(halves);
  const measures = data.world_model.map((curve, index) => [index, curve.title]);
  let which = Number(chosen("measure", measures));
  const over = lineChart({ curve: () => data.world_model[which], axis: () => "tasks", height: 300, labels: true, key: "world model" });
  over.box.id = "world-model-chart";
  halves.append(element("div", {}, element("h3", {}, "Over training"),
    element("div", { class: "controls" }, picker("measure", measures, (value) => { which = Number(value); over.redraw(); })), over.box));
  const side = element("div", {}, element("h3", {}, "By kind of reply, last evaluation"));
  halves.append(side);
  if (data.categories.length) {
    const place = element("div", { id: "categories" });
    const show = (index) => place.replaceChildren(dotPlot(data.categories[index].rows, data.categories[index].format).box);
    const kinds = data.categories.map((each, index) => [index, each.title]);
    side.append(element("div", { class: "controls" }, picker("measure", kinds, (value) => show(Number(value)), "measure by kind")), place);
    show(Number(chosen("measure by kind", kinds)));
  } else {
    side.append(empty("These runs were not evaluated by kind of reply."));
  }
  if (data.examples.length) node.append(element("h3", { class: "apart" }, "Expected and said"), examples());
}

/** If two texts are mostly alike, mark the words of `text` that differ from `other`. */
function differing(text, other) {
  const [one, two] = [text.split(/(\s+)/), other.split(/(\s+)/)];
  if (one.length * two.length > 250000) return [text];
  const longest = Array.from({ length: one.length + 1 }, () => new Uint16Array(two.length + 1));
  for (let i = one.length - 1; i >= 0; i--)
    for (let j = two.length - 1; j >= 0; j--)
      longest[i][j] = one[i] === two[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
  // Marks are useless in two very different replies. Spaces are half of all pieces and always equal.
  if (longest[0][0] < 0.75 * Math.max(one.length, two.length)) return [text];
  const nodes = [];
  for (let i = 0, j = 0; i < one.length; ) {
    if (j < two.length && one[i] === two[j]) { nodes.push(one[i]); i++; j++; }
    else if (j < two.length && longest[i][j + 1] >= longest[i + 1][j]) j++;
    else { nodes.push(one[i].trim() ? element("mark", {}, one[i]) : one[i]); i++; }
  }
  return nodes;
}

function pair(expectedTitle, expected, saidTitle, said, compare) {
  const words = said === null ? ["—"] : compare ? differing(said, expected) : [said];
  return element("div", { class: "pair" },
    element("div", { class: "expected" }, element("h5", {}, expectedTitle), element("p", { class: "said" }, compare && said !== null ? differing(expected, said) : expected)),
    element("div", { class: "actual" }, element("h5", {}, saidTitle), element("p", { class: "said" }, words)));
}

function examples() {
  const place = element("ul", { class: "examples", id: "examples" });
  const runs = [...new Set(data.examples.map((example) => example.run))];
  const show = (run) => place.replaceChildren(...data.examples.filter((example) => example.run === run).map((example) =>
    element("li", {},
      element("div", { class: "facts" }, element("span", { class: example.same_meaning ? "won" : "lost" }, example.same_meaning ? "✓ means the same" : "✕ means something else"),
        example.category ? element("span", { class: "chip" }, example.category) : null, element("span", {}, `step ${example.step}`)),
      call(example.action),
      pair("expected by the world model", example.predicted, "said by the environment", example.actual, true),
      element("details", {}, element("summary", {}, "what the world model had seen"), element("p", { class: "call" }, example.state)))));
  const named = runs.map((run) => [run, data.runs[run].name]);
  show(Number(chosen("examples of", named)));
  const controls = element("div", { class: "controls" }, picker("run", named, (value) => show(Number(value)), "examples of"));
  return element("div", {}, controls, place);
}

function training() {
  const node = section("training", "Training", data.training.length ? "Metrics of each step. Thick lines are means over seeds, thin lines single runs; in long runs, a point is the mean of neighbouring steps." : null);
  if (!data.training.length) return node.append(empty("No training step has been recorded yet."));
  node.append(legend([...new Set(data.training.flatMap((curve) => curve.lines.map((line) => line.group)))].sort((one, other) => one - other)));
  node.append(element("div", { class: "multiples" }, data.training.map((curve) =>
    element("div", {}, element("h3", {}, curve.title), lineChart({ curve: () => curve, axis: () => "tasks", height: 170, labels: false }).box))));
}

function ablations() {
  if (!data.ablations.length) return;
  const node = section("ablations", "Ablations", "One setting varied, everything else equal. Each ring is one seed, the dot their mean with its 95 % t-interval.");
  for (const ablation of data.ablations) {
    node.append(element("h3", {}, ablation.title), element("p", { class: "about" }, ablation.about));
    if (ablation.rows.length) node.append(dotPlot(ablation.rows, "share").box);
    if (ablation.failed.length) node.append(element("ul", { class: "notices" }, ablation.failed.map((words) => element("li", {}, words))));
  }
}

function runTable() {
  const node = section("runs", "Runs", null);
  if (!data.runs.length) return node.append(empty("These folders contain no run."));
  const titles = ["run", "group", "seed", "state", "tasks", "time", "success"];
  const rows = data.runs.map((run) => element("tr", { class: run.group === null ? null : colour(run.group) },
    element("td", {}, element("code", {}, run.path)),
    element("td", {}, run.group === null ? "" : element("span", { class: "swatch" }), run.group === null ? "—" : data.groups[run.group].name),
    element("td", { class: "number" }, run.seed === null ? "—" : String(run.seed)),
    element("td", {}, run.state, run.words ? element("small", {}, run.words) : null),
    element("td", { class: "number" }, run.tasks === null ? "—" : plain.format(run.tasks)),
    element("td", { class: "number" }, run.seconds === null ? "—" : duration(run.seconds)),
    element("td", { class: "number" }, run.success === null ? "—" : FORMATS.share(run.success))));
  node.append(element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, titles.map((title, index) => element("th", { class: [2, 4, 5, 6].includes(index) ? "number" : null, scope: "col" }, title)))),
    element("tbody", {}, rows))));
}

// Rollouts ----------------------------------------------------------------------------------------------------------

const TOOL_CALL = /^\s*<tool_call>\s*(\{[\s\S]*\})\s*<\/tool_call>\s*$/;

/** A message of the policy: a lone, well-formed call as `name(arguments)`, anything else exactly as it was written. */
function call(text) {
  const found = TOOL_CALL.exec(text);
  let words = text;
  if (found) {
    try {
      const { name, arguments: given } = JSON.parse(found[1]);
      if (typeof name === "string" && given && typeof given === "object") words = `${name}(${JSON.stringify(given, null, 1).replace(/\n\s*/g, " ")})`;
    } catch { /* not JSON: shown as it is */ }
  }
  return element("p", { class: "call" }, words || "(an empty message)");
}

function rolloutBrowser() {
  const { texts, items, about } = data.rollouts;
  const node = section("rollouts", "Rollouts", items.length ? about : null);
  if (!items.length) return node.append(empty("These folders contain no sample rollouts. A run writes some into its rollouts folder at each evaluation."));
  const text = (index) => texts[index];
  const filters = {};
  const categories = items.map((item) => new Set(item.turns.map((turn) => turn.category).filter((category) => category !== null)));
  const succeeded = (item) => item.reward >= 1;
  let shown = [];
  let place = 0;
  let turn = 0;

  const list = element("div", { class: "list" });
  const stage = element("div", { class: "stage" });
  const count = element("span", { class: "quiet", id: "rollout-count", role: "status" });
  const distinct = (values) => [...new Set(values)].filter((value) => value !== null && value !== "").sort((one, other) => (one > other) - (one < other));
  const choice = (name, label, options) => {
    const offered = [["", "all"], ...options];
    filters[name] = chosen(`rollouts by ${name}`, offered);
    return picker(label, offered, (value) => { filters[name] = value; filter(); }, `rollouts by ${name}`);
  };
  const plainOptions = (values) => values.map((value) => [String(value), String(value)]);
  node.append(element("div", { class: "controls", id: "rollout-filters" },
    choice("outcome", "outcome", [["won", "succeeded"], ["lost", "failed"]]),
    choice("level", "level", plainOptions(distinct(items.map((item) => item.level)))),
    choice("category", "reply", plainOptions(distinct(categories.flatMap((each) => [...each])))),
    choice("split", "split", plainOptions(distinct(items.map((item) => item.split)))),
    choice("run", "run", distinct(items.map((item) => item.run)).map((run) => [String(run), data.runs[run].name])), count),
    element("div", { class: "browser" }, list, stage));

  function filter() {
    shown = items.map((_, index) => index).filter((index) => {
      const item = items[index];
      return (!filters.run || String(item.run) === filters.run) && (!filters.level || String(item.level) === filters.level)
        && (!filters.split || item.split === filters.split) && (!filters.category || categories[index].has(filters.category))
        && (!filters.outcome || succeeded(item) === (filters.outcome === "won"));
    });
    count.textContent = `${plain.format(shown.length)} of ${plain.format(items.length)} rollouts`;
    open(0);
  }

  const PAGE = 100;
  const nameOf = (item) => JSON.stringify([item.run, item.step, item.split, item.task]);
  /** Keep the rollout and the turn that the reader looks at when new rollouts arrive. */
  const bookmark = () => choices.set("rollout", place || turn ? [nameOf(items[shown[place]]), turn] : null);
  function open(index, scroll) {
    place = Math.min(Math.max(index, 0), Math.max(shown.length - 1, 0));
    turn = 0;
    drawList();
    drawStage(scroll);
  }

  function drawList() {
    const first = Math.floor(place / PAGE) * PAGE;
    const buttons = shown.slice(first, first + PAGE).map((index, offset) => {
      const item = items[index];
      return element("button", { type: "button", "aria-current": String(first + offset === place), click: () => open(first + offset) },
        element("span", { class: succeeded(item) ? "won" : "lost" }, succeeded(item) ? "✓" : "✕"),
        element("span", {}, item.task), element("small", {}, `${data.runs[item.run].name}, step ${item.step}`));
    });
    const rest = shown.length > PAGE ? element("p", { class: "quiet" }, `${plain.format(first + 1)} to ${plain.format(first + buttons.length)} of ${plain.format(shown.length)}`) : null;
    list.replaceChildren(...buttons, ...(rest ? [rest] : []));
    const current = list.querySelector('[aria-current="true"]');
    if (current) list.scrollTop = Math.max(0, current.offsetTop - list.offsetTop - list.clientHeight / 2);
  }

  function drawStage(scroll) {
    if (!shown.length) return stage.replaceChildren(empty("No rollout matches these filters."));
    bookmark();
    const item = items[shown[place]];
    const step = (words, label, enabled, action) => element("button", { type: "button", "aria-label": label, disabled: !enabled, click: action }, words);
    const steps = element("div", { class: "steps" },
      step("‹ turn", "Previous turn", turn > 0, () => move(-1)), step("turn ›", "Next turn", turn < item.turns.length - 1, () => move(1)),
      element("span", { class: "where", id: "turn-count" }, item.turns.length ? `turn ${turn + 1} of ${item.turns.length}` : "no turns"),
      element("span", { class: "quiet keys" }, element("kbd", {}, "←"), " ", element("kbd", {}, "→"), " turns, with ", element("kbd", {}, "shift"), " rollouts"),
      element("span", { class: "gap" }),
      step("‹ previous", "Previous rollout", place > 0, () => open(place - 1)), step("next ›", "Next rollout", place < shown.length - 1, () => open(place + 1)));
    const facts = [succeeded(item) ? element("span", { class: "won" }, "✓ succeeded") : element("span", { class: "lost" }, "✕ failed"),
      `reward ${short(item.reward)}`, item.level === null ? null : `level ${item.level}`, item.split || null, `ended: ${item.stop.replaceAll("_", " ")}`,
      item.blind ? "without look-ahead" : null, `${data.runs[item.run].name}, step ${item.step}`];
    const task = element("div", { class: "task" },
      element("div", { class: "facts" }, facts.filter(Boolean).map((fact) => (typeof fact === "string" ? element("span", {}, fact) : fact)), element("code", {}, item.task)),
      item.opening.map(([role, index]) => role === "system"
        ? element("details", {}, element("summary", {}, "system prompt"), element("p", {}, text(index))) : element("p", {}, text(index))),
      item.error ? element("p", { class: "lost" }, item.error) : null);
    const turns = item.turns.map((each, index) => drawTurn(item, each, index));
    stage.replaceChildren(steps, task, ...turns);
    if (scroll && turns[turn]) turns[turn].scrollIntoView({ block: "nearest" });
  }

  function drawTurn(item, each, index) {
    const title = each.checked ? "checked, not called" : each.taken_back ? "imagined and taken back"
      : each.predicted ? "imagined, not called" : each.tool || "message without a call";
    const body = [call(text(each.action))];
    if (each.predicted && !each.checked) {
      const real = item.turns.slice(index + 1).find((other) => !other.predicted && other.tool === each.tool);
      const same = real && real.action === each.action;
      const saidTitle = !real ? "never called" : same ? "said, to the same call" : "said, to the call then made";
      body.push(pair("expected by the world model", text(each.observation), saidTitle, real ? text(real.observation) : null, same));
    } else {
      body.push(element("p", { class: "said" }, text(each.observation)));
    }
    return element("div", { class: `turn${index === turn ? " now" : ""}${each.predicted ? " ahead" : ""}${each.taken_back ? " back" : ""}`, click: () => { turn = index; drawStage(); } },
      element("h4", {}, `${index + 1}. ${title}`, each.category ? element("span", { class: "chip" }, each.category) : null,
        each.facts.length ? element("span", {}, each.facts.join(", ")) : null), body);
  }

  function move(by) {
    const target = turn + by;
    if (!shown.length || target < 0 || target >= items[shown[place]].turns.length) return;
    turn = target;
    drawStage(true);
  }

  onKey = (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const { top, bottom } = node.getBoundingClientRect();
    if (!by || bottom < 0 || top > innerHeight) return;
    event.preventDefault();
    if (event.shiftKey) open(place + by);
    else move(by);
  };
  const [marked, at] = choices.get("rollout") || [];
  filter();
  const again = shown.findIndex((index) => nameOf(items[index]) === marked);
  if (again >= 0) {
    open(again);
    turn = Math.min(at, items[shown[again]].turns.length - 1);
    drawStage();
  }
}
let onKey = () => {};
document.addEventListener("keydown", (event) => onKey(event));

// The sections, and the parts of the data that each needs -------------------------------------------------------------------

const SECTIONS = [
  ["learning", learning, ["success", "groups"]],
  ["comparison", comparison, ["comparison", "groups"]],
  ["levels", levels, ["levels", "groups"]],
  ["world-model", worldModel, ["world_model", "categories", "examples", "groups"]],
  ["training", training, ["training", "groups"]],
  ["ablations", ablations, ["ablations"]],
  ["rollouts", rolloutBrowser, ["rollouts"]],
  ["runs", runTable, ["runs", "groups"]],
];

themeButton();
head();
for (const [, draw] of SECTIONS) draw();
byId("foot").textContent = data.foot;
document.documentElement.dataset.ready = "true";
