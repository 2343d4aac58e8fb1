"use strict";
// What everything else is made of: elements, numbers, addresses, answers.  Text is only ever set as text: nothing that a completion
// says is parsed as HTML anywhere in this application.

/** An element.  `props`: attributes; `class`, `text`, `style` (an object, set through the CSSOM), `on*` listeners, `data` (an object). */
function h(tag, props, ...children) {
  const svg = ["svg", "path", "circle", "line", "rect", "g", "title"].includes(tag);
  const found = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") found.textContent = value;
    else if (name === "style") for (const [key, part] of Object.entries(value)) found.style.setProperty(key, part);
    else if (name === "data") for (const [key, part] of Object.entries(value)) found.dataset[key] = part;
    else if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (name === "class") found.setAttribute("class", value);
    else if (name === "value" || name === "checked" || name === "selected") found[name] = value;
    else found.setAttribute(name, value === true ? "" : value);
  }
  found.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return found;
}

const $ = (id) => document.getElementById(id);

/** Replace what an element holds. */
function fill(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A labelled input. */
const field = (label, attributes, props = {}) => h("label", props, label, h("input", attributes));

/** A labelled choice among [value, text] pairs. */
const choice = (label, chosen, options, attributes) =>
  h(
    "label",
    {},
    label,
    h(
      "select",
      attributes,
      options.map(([value, text]) => h("option", { value, text, selected: value === chosen })),
    ),
  );

/** A table that scrolls sideways: texts of its head, and rows of cells, the first of which is the row's head. */
const table = (kind, label, heads, rows) =>
  h(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": label },
    h(
      "table",
      { class: kind },
      heads &&
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            heads.map((text) => h("th", { scope: "col", text })),
          ),
        ),
      h(
        "tbody",
        {},
        rows.map(([first, ...cells]) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, first),
            cells.map((cell) => h("td", {}, cell)),
          ),
        ),
      ),
    ),
  );

// ---------------------------------------------------------------- numbers and text

const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** A very small number as people write it: 9.5×10⁻⁷. */
function inPowersOfTen(value) {
  const [digits, power] = value.toExponential(1).split("e-");
  const raised = [...power].map((digit) => RAISED[Number(digit)]).join("");
  return `${digits.replace(/\.0$/, "")}×10⁻${raised}`;
}

/** A number as short as it can be read: three significant digits; an en dash for what is not there. */
function fmt(value, signed) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const sign = signed && value > 0 ? "+" : "";
  let shown;
  if (value === 0) shown = "0";
  else if (size >= 1e6) shown = (value / 1e6).toPrecision(3) + "M";
  else if (size >= 1e4) shown = (value / 1e3).toPrecision(3) + "k";
  else if (Number.isInteger(value)) shown = String(value);
  else if (size >= 100) shown = value.toFixed(0);
  else if (size >= 10) shown = value.toFixed(1);
  else if (size >= 1) shown = value.toFixed(2);
  else if (size >= 1e-3) shown = value.toFixed(3);
  else if (size >= 1e-4) shown = String(Number(value.toPrecision(2)));
  else if (size >= 1e-12) shown = inPowersOfTen(value);
  else shown = "≈ 0";
  return sign + shown.replace("-", "−");
}

/** A number in powers of a thousand, each with its unit. */
function scaled(value, units) {
  const power = value > 0 ? Math.min(units.length - 1, Math.floor(Math.log10(value) / 3)) : 0;
  return `${fmt(value / 1000 ** power)} ${units[power]}`;
}

const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"]);

/** A short time: milliseconds below a second. */
function shortTime(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 1) return `${fmt(seconds)} s`;
  return seconds < 1e-4 ? "< 0.1 ms" : `${fmt(Number((1000 * seconds).toPrecision(2)))} ms`;
}

/** A share.  Halves are rounded to the even digit, as the terminal does: 0.125 is 12%. */
function percent(value) {
  if (value === null || value === undefined) return "–";
  const digits = value && Math.abs(value) < 0.1 ? 1 : 0;
  const shown = { minimumFractionDigits: digits, maximumFractionDigits: digits, roundingMode: "halfEven" };
  return (100 * value).toLocaleString("en", shown).replace("-", "−") + "%";
}

const many = (count, word, plural) => `${count.toLocaleString("en")} ${count === 1 ? word : plural || word + "s"}`;

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const minutes = Math.floor(seconds / 60);
  if (seconds < 60) return `${Math.round(seconds)} s`;
  return minutes < 60 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// Characters that move, hide or rewrite text: controls, marks that turn the direction of writing, and those without a width.
const HIDDEN = new RegExp(
  [
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/,
    /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udfff]/,
  ]
    .map((part) => part.source)
    .join("|"),
  "g",
);

/** Text as nodes, what cannot be seen as a small label with its code point; `blanks`: also spaces, tabs and ends of lines. */
function visible(text, blanks) {
  const found = [];
  let begin = 0;
  const plain = (part) => {
    if (!part) return;
    found.push(document.createTextNode(blanks ? part.replace(/ /g, "·").replace(/\t/g, "→\t").replace(/\n/g, "↵\n") : part));
  };
  for (const match of text.matchAll(HIDDEN)) {
    plain(text.slice(begin, match.index));
    begin = match.index + match[0].length;
    const code = match[0].codePointAt(0);
    const label =
      code < 32 ? String.fromCharCode(0x2400 + code) : code === 127 ? "␡" : "U+" + code.toString(16).toUpperCase().padStart(4, "0");
    found.push(
      h("span", { class: "hidden-character", title: "U+" + code.toString(16).toUpperCase().padStart(4, "0"), text: label }),
    );
  }
  plain(text.slice(begin));
  return found;
}

/** `visible`, with every occurrence of `wanted` marked. */
function marked(text, wanted) {
  if (!wanted) return visible(text);
  const found = [];
  const low = text.toLowerCase(),
    key = wanted.toLowerCase();
  let begin = 0;
  for (let at = low.indexOf(key); at >= 0; at = low.indexOf(key, at + key.length)) {
    found.push(...visible(text.slice(begin, at)), h("mark", {}, ...visible(text.slice(at, at + key.length))));
    begin = at + key.length;
  }
  return [...found, ...visible(text.slice(begin))];
}

// ---------------------------------------------------------------- where one is: the address behind #

/** What is looked at, all of it in the address: a link to it shows the same. */
let here = {};

function readAddress() {
  const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return { view: "groups", ...found };
}

function addressOf(place) {
  const kept = Object.entries(place).filter(
    ([key, value]) => value !== "" && value !== null && value !== undefined && !(key === "view" && value === "groups"),
  );
  return "#" + new URLSearchParams(kept).toString();
}

/** Go to a place: what is named changes, null takes away, the rest stays.  `quiet`: no new entry in the browser's history. */
function go(changes, quiet) {
  const place = { ...here, ...changes };
  for (const key of Object.keys(place)) if (place[key] === null || place[key] === undefined || place[key] === "") delete place[key];
  const address = addressOf(place);
  if (address === addressOf(here)) return;
  if (quiet) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  arrive();
}

/** The address of a place that starts anew: only the run and the way tokens are coloured stay. */
function linkTo(place) {
  const kept = { run: here.run, by: here.by, blanks: here.blanks, overlay: here.overlay, seeds: here.seeds };
  return addressOf({ ...kept, ...place });
}

// ---------------------------------------------------------------- answers

/** In a report the answers lie in the page; else they are asked for. */
const ANSWERS = (() => {
  const element = document.getElementById("answers");
  return element ? JSON.parse(element.textContent) : null;
})();

const cache = new Map();
const KEPT = 120;

function keyOf(name, parameters) {
  const known = Object.keys(parameters).filter(
    (key) => parameters[key] !== "" && parameters[key] !== null && parameters[key] !== undefined,
  );
  return (
    name +
    "?" +
    known
      .sort()
      .map((key) => `${key}=${parameters[key]}`)
      .join("&")
  );
}

/** The answer of an address; from memory where it cannot have changed (`fresh`: ask again). */
async function ask(name, parameters = {}, fresh = false) {
  const key = keyOf(name, parameters);
  if (ANSWERS) {
    const found = ANSWERS[key] || { error: "This is not in the report; open the run itself: groupwise view RUN" };
    if (found.error) throw new Error(found.error);
    return found;
  }
  if (!fresh && cache.has(key)) return cache.get(key);
  const clean = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const asked = (async () => {
    const answer = await fetch("/api/" + name + "?" + new URLSearchParams(clean));
    const found = await answer.json();
    if (found.error) throw new Error(found.error);
    return found;
  })();
  cache.set(key, asked);
  if (cache.size > KEPT) cache.delete(cache.keys().next().value);
  asked.catch(() => cache.delete(key));
  return asked;
}

/** Forget answers that may have changed: those whose address begins so. */
function forget(...names) {
  for (const key of [...cache.keys()]) if (names.some((name) => key.startsWith(name + "?"))) cache.delete(key);
}

/** Curves by name; a report holds all of them under one address. */
const askCurves = (run, names) => (ANSWERS || !names ? ask("curves", { run }) : ask("curves", { run, names: names.join(",") }));

/** Curves of a group of seeds: mean and half of the interval; a report holds all of them under one address. */
const askBands = (runs, name, axis, smooth) => ask("bands", ANSWERS ? { runs } : { runs, names: name, x: axis, smooth });

// ---------------------------------------------------------------- the runs

let RUNS = [];
const runHere = () => RUNS[Number(here.run) || 0] || RUNS[0];
const kindHere = () => (here.kind === "evaluation" ? "evaluation" : "training");

/** What is drawn as one line: the runs of a group of seeds, or a run that is alone. */
function seriesOf(runs) {
  const found = new Map();
  for (const run of runs) {
    const key = run.label ?? run.run;
    if (!found.has(key)) found.set(key, { label: run.label ?? run.name, runs: [], place: found.size });
    found.get(key).runs.push(run);
  }
  return [...found.values()];
}

/** Groups of runs in an address: the runs of a group with commas, the groups with semicolons. */
const numbersOf = (series) => series.map((one) => one.runs.map((run) => run.run).join(",")).join(";");

/** The recorded steps of a kind, in order. */
function stepsOf(run, kind) {
  if (run.kept) return run.kept[kind] || [];
  if (kind === "evaluation") return run.evaluations;
  const found = [];
  for (const [first, last, stride] of run.recorded) for (let step = first; step <= last; step += stride || 1) found.push(step);
  return found;
}

function toast(text) {
  $("toast").textContent = text;
  $("toast").classList.add("shown");
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => $("toast").classList.remove("shown"), 2600);
}

/** What is remembered in this browser, and only there. */
const remembered = {
  get(key) {
    try {
      return localStorage.getItem("groupwise." + key);
    } catch {
      return null;
    }
  },
  set(key, value) {
    try {
      localStorage.setItem("groupwise." + key, value);
    } catch {
      /* a page from a file may have no storage */
    }
  },
};
