"use strict";
// The frame around the views: header, keys, following a live run.

const TABS = [
  ["groups", "Groups", "g"],
  ["curves", "Curves", "c"],
  ["search", "Search", "/"],
  ["compare", "Compare", "d"],
  ["lenses", "Lenses", "l"],
  ["config", "Config", "i"],
];
const STATES = { live: "live", finished: "finished", failed: "failed", stopped: "stopped", file: "file" };

/** What a tab keeps of the place: the run and how tokens are coloured; the groups also where one was. */
let lastGroups = {};

function header() {
  const run = runHere();
  const picker =
    RUNS.length > 1
      ? h(
          "select",
          {
            "aria-label": "run",
            onchange: (event) =>
              go({ run: event.target.value === "0" ? null : event.target.value, step: null, group: null, c: null, key: null }),
          },
          RUNS.map((one) => h("option", { value: one.run, selected: one === run, text: one.name })),
        )
      : h("span", { class: "run-name", text: run.name });
  const progress = run.state === "file" ? "" : ` · step ${run.last}${run.planned ? " of " + run.planned : ""}`;
  fill(
    $("top"),
    h(
      "a",
      { class: "brand", href: addressOf({ view: "groups", run: here.run }), "aria-label": "groupwise, to the newest step" },
      h("span", { class: "mark", "aria-hidden": "true" }),
      h("span", { text: "groupwise" }),
    ),
    picker,
    h(
      "span",
      { class: `state ${run.state}`, id: "state", title: run.why || undefined },
      ANSWERS ? "report" : STATES[run.state],
      h("span", { class: "progress", text: progress }),
    ),
    h(
      "nav",
      { "aria-label": "views" },
      TABS.map(([view, label, key]) =>
        h("a", {
          href: view === "groups" ? linkTo(lastGroups) : linkTo({ view }),
          "aria-current": here.view === view ? "page" : undefined,
          title: `${label} (${key})`,
          text: label,
        }),
      ),
    ),
    h(
      "span",
      { class: "tools" },
      h(
        "button",
        {
          type: "button",
          class: "icon",
          title: "copy the link to this view (u)",
          "aria-label": "copy the link to this view",
          onclick: copyLink,
        },
        h(
          "svg",
          {
            viewBox: "0 0 16 16",
            width: 15,
            height: 15,
            "aria-hidden": "true",
            fill: "none",
            stroke: "currentColor",
            "stroke-width": 1.6,
            "stroke-linecap": "round",
          },
          h("path", {
            d: "M6.6 9.4 9.4 6.6M7.2 4.6l1.3-1.3a2.9 2.9 0 0 1 4.2 4.2l-1.3 1.3M8.8 11.4l-1.3 1.3a2.9 2.9 0 0 1-4.2-4.2l1.3-1.3",
          }),
        ),
      ),
      h(
        "button",
        { type: "button", class: "icon", title: "light or dark (t)", "aria-label": "light or dark", onclick: switchTheme },
        h(
          "svg",
          { viewBox: "0 0 16 16", width: 15, height: 15, "aria-hidden": "true" },
          h("circle", { cx: 8, cy: 8, r: 6, fill: "none", stroke: "currentColor", "stroke-width": 1.6 }),
          h("path", { d: "M8 2a6 6 0 0 1 0 12z", fill: "currentColor" }),
        ),
      ),
      h("button", { type: "button", class: "icon", title: "keys (?)", "aria-label": "keys", onclick: showHelp, text: "?" }),
    ),
  );
  const tabs = $("top").querySelector("nav"),
    current = tabs.querySelector("[aria-current]");
  if (current) tabs.scrollLeft = current.offsetLeft - tabs.offsetLeft - 40;
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    toast("The link to this view is copied.");
  } catch {
    toast("The link is in the address bar.");
  }
}

function switchTheme() {
  document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
  remembered.set("theme", document.documentElement.dataset.theme);
  arrive();
}

const KEYS = [
  ["←  →", "earlier, later step (inside a text: token by token)"],
  ["↑  ↓", "previous, next group"],
  ["m", "the most informative group of the step"],
  ["f", "the newest step, and follow it"],
  ["1 … 7", "colour tokens by push, log-prob, entropy, KL, mismatch, gradient, version"],
  ["8  9", "by the replayed push, and what it changes (once a step is replayed)"],
  ["p", "replay the step with another algorithm"],
  ["0", "no colours"],
  ["w", "show spaces, ends of lines and special tokens"],
  ["e", "training or held-out completions"],
  ["g c / d l i", "groups, curves, search, compare, lenses, configuration"],
  ["r", "the next run"],
  ["u", "copy the link to this view"],
  ["t", "light or dark"],
  ["Tab", "from completion to completion"],
  ["?", "this list"],
];

function showHelp() {
  fill(
    $("help"),
    h("h2", { id: "help-title", text: "Keys" }),
    h(
      "dl",
      {},
      KEYS.map(([key, text]) => h("div", {}, h("dt", {}, h("kbd", { text: key })), h("dd", { text }))),
    ),
    h("form", { method: "dialog" }, h("button", { class: "main", text: "Close" })),
  );
  $("help").showModal();
}

function moveStep(by) {
  const steps = stepsOf(runHere(), kindHere());
  const shown = Number(document.querySelector(".steps h1 b")?.textContent);
  const to = steps[steps.indexOf(shown) + by];
  if (to !== undefined) go({ step: to, group: null, c: null });
}

function moveGroup(by) {
  const links = [...document.querySelectorAll(".group-list a")];
  const to = links[links.findIndex((link) => link.getAttribute("aria-current")) + by];
  if (to) to.click();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const groups = here.view === "groups";
  const actions = {
    "?": showHelp,
    t: switchTheme,
    u: copyLink,
    w: () => go({ blanks: here.blanks === "1" ? null : "1" }, true),
    e: () =>
      groups &&
      runHere().evaluations.length &&
      go({ kind: kindHere() === "training" ? "evaluation" : null, step: null, group: null, c: null }),
    r: () => RUNS.length > 1 && go({ run: String((runHere().run + 1) % RUNS.length), step: null, group: null, c: null, key: null }),
    f: () => groups && go({ step: null, group: null, c: null }),
    p: () => {
      const box = document.querySelector(".replay");
      if (box) {
        box.open = !box.open;
        if (box.open) box.querySelector("select").focus();
      }
    },
    m: () => groups && go({ group: null, c: null }),
    ArrowLeft: () => groups && moveStep(-1),
    ArrowRight: () => groups && moveStep(1),
    ArrowUp: () => groups && !scrolls(event) && moveGroup(-1),
    ArrowDown: () => groups && !scrolls(event) && moveGroup(1),
    k: () => groups && moveGroup(-1),
    j: () => groups && moveGroup(1),
  };
  for (const [view, , key] of TABS)
    actions[key] = () => {
      location.hash = view === "groups" ? linkTo(lastGroups) : linkTo({ view });
    };
  if (/^[0-9]$/.test(event.key) && document.querySelector(".quantities"))
    actions[event.key] = () => colourBy(event.key === "0" ? "none" : QUANTITIES[Number(event.key) - 1].id);
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
});

/** True if the arrow keys scroll what has the focus. */
const scrolls = (event) => {
  const box = event.target.closest?.(".text, .prompt-text, .scroll");
  return box && box.scrollHeight > box.clientHeight + 1;
};

let shownView = null;

/** Show the place that the address names. */
async function arrive() {
  here = readAddress();
  if (runHere().brief) {
    try {
      RUNS = (await ask("runs", { run: here.run }, true)).runs;
    } catch {
      /* the view says what is wrong */
    }
  }
  if (!VIEWS[here.view]) here.view = "groups";
  if (here.by === undefined && remembered.get("by")) here.by = remembered.get("by");
  if (here.view === "groups") lastGroups = { step: here.step, group: here.group, kind: here.kind };
  token += 1;
  hideTip();
  header();
  document.title = `${runHere().name} · groupwise`;
  const main = $("main"),
    still = staying();
  const focused = document.activeElement?.closest?.(".group-list") ? "list" : null;
  if (shownView !== here.view) {
    fill(main, skeleton(10));
    scrollTo(0, 0);
  }
  shownView = here.view;
  main.dataset.view = here.view;
  try {
    await VIEWS[here.view](main);
  } catch (error) {
    if (still()) fill(main, panel("This cannot be shown", failed(error)));
  }
  if (!still() && here.view !== "search") return;
  main.dataset.ready = here.view;
  if (here.view === "search" && event_wasKey) $("search-text")?.focus();
  event_wasKey = false;
  if (focused) document.querySelector(".group-list a[aria-current]")?.focus({ preventScroll: true });
}

let event_wasKey = false;
document.addEventListener(
  "keydown",
  (event) => {
    event_wasKey = event.key === "/";
  },
  true,
);
addEventListener("popstate", arrive);
addEventListener("scroll", hideTip, { passive: true });

/** Ask again and again whether a live run has gone on. */
async function pulse() {
  try {
    const before = runHere();
    const found = await ask("pulse", { run: here.run }, true);
    RUNS = found.runs;
    const now = runHere();
    const moved = now.newest !== before.newest || now.last !== before.last || now.state !== before.state;
    if (moved) {
      forget("curves", "bands", "differences", "health", "lenses", "runs");
      const busy = /^(INPUT|SELECT)$/.test(document.activeElement?.tagName) || document.activeElement?.closest?.(".text");
      if (here.view === "groups" && here.step === undefined && !busy) arrive();
      else if (here.view === "curves" && !busy) arrive();
      else header();
    }
  } catch {
    $("state") && ($("state").textContent = "the viewer was stopped");
  }
  setTimeout(pulse, RUNS.some((run) => run.state === "live") ? 2000 : 10000);
}

(async () => {
  if (remembered.get("theme")) document.documentElement.dataset.theme = remembered.get("theme");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => arrive());
  try {
    RUNS = (await ask("runs", ANSWERS ? {} : { run: readAddress().run })).runs;
  } catch (error) {
    fill($("main"), panel("This cannot be shown", failed(error)));
    return;
  }
  await arrive();
  if (!ANSWERS) pulse();
})();
