"use strict";
// Curves.  uPlot draws the large ones; sparklines, the scrubber and the scatter are a few lines of canvas.

const LINES = ["#2563eb", "#ea580c", "#0d9488", "#a21caf", "#ca8a04", "#dc2626", "#4d7c0f", "#64748b"];
const LINES_DARK = ["#60a5fa", "#fb923c", "#2dd4bf", "#e879f9", "#facc15", "#f87171", "#a3e635", "#94a3b8"];
const lineColour = (i) => (theme() === "dark" ? LINES_DARK : LINES)[i % LINES.length];
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** How much a curve is smoothed: held-out figures are drawn as they are, and so are too few points, which smoothing would draw late. */
function smoothing(name, values, weight) {
  const known = values.filter((one) => one !== null).length;
  return name.startsWith("eval/") || known < 20 ? 0 : weight;
}

/** Exponential smoothing that is fair to the beginning; gaps stay gaps.  `weight` 0: as it is. */
function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0,
    norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** A canvas of the size that CSS gives it, sharp on any screen; `draw(context, width, height)` is called when it is seen or resized. */
function canvas(attributes, draw) {
  const element = h("canvas", { role: "img", ...attributes });
  const paint = () => {
    const { width, height } = element.getBoundingClientRect();
    if (!width || !height) return;
    const sharp = devicePixelRatio || 1;
    element.width = Math.round(width * sharp);
    element.height = Math.round(height * sharp);
    const context = element.getContext("2d");
    context.scale(sharp, sharp);
    draw(context, width, height);
  };
  const watch = new ResizeObserver(paint);
  watch.observe(element);
  element.paint = paint;
  return element;
}

/** The range of what is known, widened a little; null if nothing is. */
function rangeOf(values) {
  let low = Infinity,
    high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return null;
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  return [low - room, high + room];
}

function drawLine(context, xs, ys, x, y) {
  context.beginPath();
  let pen = false;
  let alone = [];
  for (let i = 0; i < ys.length; i++) {
    if (ys[i] === null || ys[i] === undefined) {
      pen = false;
      continue;
    }
    if (pen) context.lineTo(x(xs[i]), y(ys[i]));
    else context.moveTo(x(xs[i]), y(ys[i]));
    if (!pen && (ys[i + 1] === null || ys[i + 1] === undefined)) alone.push(i);
    pen = true;
  }
  context.stroke();
  // Points between gaps: evaluations that are rare.
  if (alone.length > 1) {
    context.beginPath();
    let first = true;
    for (const i of alone) {
      if (first) context.moveTo(x(xs[i]), y(ys[i]));
      else context.lineTo(x(xs[i]), y(ys[i]));
      first = false;
    }
    context.stroke();
  }
  for (const i of alone) {
    context.beginPath();
    context.arc(x(xs[i]), y(ys[i]), 2, 0, 7);
    context.fill();
  }
}

function sparkline(label, steps, values, scale) {
  return canvas({ class: "spark", "aria-label": label }, (context, width, height) => {
    const range = scale || rangeOf(values);
    if (!range || steps.length < 1) return;
    const x = (step) => 2 + ((step - steps[0]) / Math.max(1, steps[steps.length - 1] - steps[0])) * (width - 4);
    const y = (value) => height - 3 - ((value - range[0]) / (range[1] - range[0])) * (height - 6);
    context.lineWidth = 1.5;
    context.strokeStyle = context.fillStyle = lineColour(0);
    drawLine(context, steps, values, x, y);
  });
}

/** The reward over all steps: shows where one is, and goes where it is clicked. */
function scrubber(curves, name, steps, step, choose) {
  const values = curves.values[name] || [];
  const first = Math.min(curves.steps[0] ?? 0, steps[0] ?? 0),
    last = Math.max(curves.steps[curves.steps.length - 1] ?? 0, steps[steps.length - 1] ?? 0);
  const place = (width) => (at) => 6 + ((at - first) / Math.max(1, last - first)) * (width - 12);
  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    const wanted = first + ((event.clientX - box.left - 6) / Math.max(1, box.width - 12)) * (last - first);
    return steps.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best), steps[0]);
  };
  let hover = null;
  const picture = canvas(
    { class: "scrub", "aria-label": `${name} over steps ${first} to ${last}; step ${step} is shown` },
    (context, width, height) => {
      const range = rangeOf(values) || [0, 1];
      const x = place(width);
      const y = (value) => height - 6 - ((value - range[0]) / (range[1] - range[0])) * (height - 14);
      context.strokeStyle = context.fillStyle = lineColour(0);
      context.globalAlpha = 0.28;
      context.lineWidth = 1;
      drawLine(context, curves.steps, values, x, y);
      context.globalAlpha = 1;
      context.lineWidth = 2;
      drawLine(context, curves.steps, smooth(values, smoothing(name, values, 0.85)), x, y);
      for (const [at, solid] of [
        [hover, false],
        [step, true],
      ]) {
        if (at === null) continue;
        context.strokeStyle = variable(solid ? "--accent" : "--soft");
        context.setLineDash(solid ? [] : [3, 3]);
        context.lineWidth = solid ? 2 : 1;
        context.beginPath();
        context.moveTo(x(at), 0);
        context.lineTo(x(at), height);
        context.stroke();
        context.setLineDash([]);
        const i = curves.steps.findIndex((one) => one >= at);
        const shown = `${at}` + (i >= 0 && values[i] !== null && values[i] !== undefined ? `: ${fmt(values[i])}` : "");
        context.font = "12px system-ui, sans-serif";
        const wide = context.measureText(shown).width;
        const left = x(at) + 6 + wide > width ? x(at) - 6 - wide : x(at) + 6;
        context.fillStyle = variable("--panel");
        context.fillRect(left - 2, 1, wide + 4, 15);
        context.fillStyle = variable(solid ? "--ink" : "--soft");
        context.fillText(shown, left, 13);
      }
    },
  );
  picture.addEventListener("mousemove", (event) => {
    hover = nearest(event);
    picture.paint();
  });
  picture.addEventListener("mouseleave", () => {
    hover = null;
    picture.paint();
  });
  picture.addEventListener("click", (event) => choose(nearest(event)));
  return picture;
}

/** Rewards of a group as dots on a line from the step's lowest to its highest. */
function dots(rewards, low, high, title) {
  const wide = 96;
  const known = rewards.filter((value) => value !== null);
  const x = (value) => 5 + ((value - low) / Math.max(high - low, 1e-9)) * (wide - 10);
  return h(
    "svg",
    {
      class: "dots",
      viewBox: `0 0 ${wide} 14`,
      width: wide,
      height: 14,
      role: "img",
      "aria-label": title || `rewards ${known.map((value) => fmt(value)).join(", ")}`,
    },
    h("line", { x1: 4, x2: wide - 4, y1: 7, y2: 7 }),
    known.slice(0, 128).map((value) => h("circle", { cx: x(value).toFixed(1), cy: 7, r: 3.4 })),
  );
}

/** Distances of marks on an axis of steps or tokens: there are no halves of one. */
const WHOLE = [...Array(15).keys()].flatMap((power) => [1, 2, 5].map((times) => times * 10 ** power));

/**
 * One metric of one or more runs.  `lines`: {name, xs, ys, colour}; of a single run also `raw`, of a group of seeds `half`, half of its
 * interval; `thin`: a seed of a group.  `pick(x)`: where it was clicked.
 */
function chart(element, lines, { label, pick, height = 170, time }) {
  const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const data = [xs],
    series = [{ label }],
    bands = [];
  lines.forEach((line) => {
    const spread = (ys) => {
      const column = new Array(xs.length).fill(null);
      ys.forEach((value, i) => {
        if (value !== null && value !== undefined) column[place.get(line.xs[i])] = value;
      });
      return column;
    };
    const known = line.ys.filter((value) => value !== null).length;
    if (line.raw) {
      data.push(spread(line.raw));
      series.push({ stroke: line.colour + "55", width: 1, spanGaps: true, points: { show: false } });
    }
    if (line.half) {
      const end = (sign) => line.ys.map((value, i) => (value === null ? null : value + sign * (line.half[i] || 0)));
      bands.push({ series: [data.length, data.length + 1], fill: line.colour + "33" });
      for (const sign of [1, -1]) {
        data.push(spread(end(sign)));
        series.push({ width: 0, spanGaps: true, points: { show: false } });
      }
    }
    data.push(spread(line.ys));
    series.push({
      label: line.name,
      stroke: line.thin ? line.colour + "88" : line.colour,
      width: line.thin ? 1 : 2,
      spanGaps: true,
      points: { show: known < 40 && !line.thin, size: 5, fill: line.colour },
    });
  });
  const axis = {
    stroke: variable("--soft"),
    grid: { stroke: variable("--line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  const short = (plot, ticks) => ticks.map((value) => (time ? duration(value) : fmt(value)));
  const exact = (plot, marks) => labelsOf(marks);
  const flat = (value) => (value ? rangeOf([value]) : [0, 1]);
  const plot = new uPlot(
    {
      width: Math.max(200, element.clientWidth),
      height,
      series,
      bands,
      legend: { show: false },
      padding: [6, 10, 0, 0],
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
      scales: {
        x: { time: false },
        y: { range: (plot, low, high) => (low === high ? flat(low) : uPlot.rangeNum(low, high, 0.1, true)) },
      },
      axes: [
        { ...axis, size: 26, values: short, ...(time ? {} : { incrs: WHOLE }) },
        { ...axis, size: 52, values: exact },
      ],
      hooks: {
        setCursor: [
          (plot) => {
            const i = plot.cursor.idx;
            if (i === null || i === undefined) {
              readout.textContent = "";
              return;
            }
            const parts = [];
            series.forEach((one, s) => {
              if (s && one.label && data[s][i] !== null) parts.push((lines.length > 1 ? one.label + " " : "") + fmt(data[s][i]));
            });
            readout.textContent = parts.length ? `${time ? duration(xs[i]) : fmt(xs[i])}: ${parts.join(" · ")}` : "";
          },
        ],
      },
    },
    data,
    element,
  );
  const readout = h("output", { class: "readout" });
  element.append(readout);
  if (pick)
    plot.over.addEventListener("click", () => {
      if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) pick(xs[plot.cursor.idx]);
    });
  new ResizeObserver(() => plot.setSize({ width: Math.max(200, element.clientWidth), height })).observe(element);
  return plot;
}

/** The numbers at an axis, with as many digits as tell one from the next. */
function labelsOf(marks) {
  const largest = Math.max(...marks.map(Math.abs));
  if (marks.length < 2 || largest >= 1000) return marks.map((value) => fmt(value));
  if (largest < 1e-3) return marks.map((value) => (value ? inPowersOfTen(value).replace("-", "−") : "0"));
  const distance = marks[1] - marks[0];
  let digits = Math.max(0, -Math.floor(Math.log10(distance) + 1e-9));
  if (Math.abs(distance - Number(distance.toFixed(digits))) > 1e-3 * distance) digits += 1; // a quarter has two
  return marks.map((value) => (Number.isInteger(value) ? fmt(value) : value.toFixed(digits).replace("-", "−")));
}

/** About five round numbers in a range. */
function ticks([low, high]) {
  const raw = (high - low) / 5,
    size = 10 ** Math.floor(Math.log10(raw));
  const step = size * ([1, 2, 5, 10].find((times) => times * size >= raw) || 10);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(6)));
  return found;
}

/** Points that can be clicked: `points` {x, y, place}. */
function scatter(points, { x: xLabel, y: yLabel, choose }) {
  const ranges = [rangeOf(points.map((point) => point.x)) || [0, 1], rangeOf(points.map((point) => point.y)) || [0, 1]];
  const room = { left: 62, right: 14, top: 10, bottom: 36 };
  // Rewards of 0 and 1 would lie on top of each other: each point is moved a little, always the same way.
  points.forEach((point, i) => {
    const turn = i * 2.39996;
    const far = 10 * Math.sqrt((i * 0.7548776) % 1);
    point.dx = far * Math.cos(turn);
    point.dy = far * Math.sin(turn);
  });
  let near = null;
  const at = (width, height) => [
    (value) => room.left + ((value - ranges[0][0]) / (ranges[0][1] - ranges[0][0])) * (width - room.left - room.right),
    (value) => height - room.bottom - ((value - ranges[1][0]) / (ranges[1][1] - ranges[1][0])) * (height - room.top - room.bottom),
  ];
  const picture = canvas(
    { class: "scatter", "aria-label": `${yLabel} against ${xLabel}, ${points.length} completions` },
    (context, width, height) => {
      const [x, y] = at(width, height);
      context.font = "11px system-ui, sans-serif";
      context.strokeStyle = variable("--line");
      context.fillStyle = variable("--soft");
      for (const value of ticks(ranges[1])) {
        context.beginPath();
        context.moveTo(room.left, y(value));
        context.lineTo(width - room.right, y(value));
        context.stroke();
        context.textAlign = "right";
        context.fillText(fmt(value), room.left - 6, y(value) + 4);
      }
      context.textAlign = "center";
      for (const value of ticks(ranges[0])) context.fillText(fmt(value), x(value), height - room.bottom + 14);
      context.textAlign = "center";
      context.fillText(xLabel, room.left + (width - room.left - room.right) / 2, height - 5);
      context.save();
      context.translate(10, room.top + (height - room.top - room.bottom) / 2);
      context.rotate(-Math.PI / 2);
      context.fillText(yLabel, 0, 0);
      context.restore();
      context.fillStyle = lineColour(0);
      context.globalAlpha = Math.max(0.2, Math.min(0.75, 90 / points.length));
      for (const point of points) {
        context.beginPath();
        context.arc(x(point.x) + point.dx, y(point.y) + point.dy, 3.2, 0, 7);
        context.fill();
      }
      context.globalAlpha = 1;
      if (near) {
        context.strokeStyle = variable("--ink");
        context.lineWidth = 2;
        context.beginPath();
        context.arc(x(near.x) + near.dx, y(near.y) + near.dy, 6, 0, 7);
        context.stroke();
      }
    },
  );
  const find = (event) => {
    const box = picture.getBoundingClientRect();
    const [x, y] = at(box.width, box.height);
    let best = null,
      gap = 400;
    for (const point of points) {
      const distance =
        (x(point.x) + point.dx - event.clientX + box.left) ** 2 + (y(point.y) + point.dy - event.clientY + box.top) ** 2;
      if (distance < gap) {
        gap = distance;
        best = point;
      }
    }
    return best;
  };
  picture.addEventListener("mousemove", (event) => {
    const found = find(event);
    if (found !== near) {
      near = found;
      picture.style.cursor = near ? "pointer" : "";
      picture.paint();
    }
  });
  picture.addEventListener("click", (event) => {
    const found = find(event);
    if (found) choose(found.place);
  });
  return picture;
}
