"use strict";
// The views.  Each is a function that fills the page for the place one is at (`here`); `still()` says whether one is still there when
// an answer arrives.

const VIEWS = {};
let token = 0;

/** A check that the place has not changed since. */
function staying() {
  const mine = token;
  return () => mine === token;
}

const panel = (title, ...children) => h("section", { class: "panel" }, title ? h("h2", { text: title }) : null, ...children);
const empty = (text) => h("p", { class: "empty", text });
const failed = (error) => h("p", { class: "empty bad", role: "alert", text: error.message });
const skeleton = (lines = 4) =>
  h(
    "div",
    { class: "skeleton", "aria-hidden": "true" },
    Array.from({ length: lines }, () => h("span", {})),
  );

/** Fill an element once an answer is there; what went wrong is said in its place. */
async function later(element, work) {
  const still = staying();
  fill(element, skeleton(3));
  try {
    const found = await work();
    if (still()) fill(element, found);
  } catch (error) {
    if (still()) fill(element, failed(error));
  }
  return element;
}

// ---------------------------------------------------------------- groups: what one sees first

VIEWS.groups = async (main) => {
  const run = runHere(),
    kind = kindHere(),
    still = staying();
  if (!stepsOf(run, kind).length) {
    fill(main, h("div", { class: "columns" }, h("div", { class: "content" }, noCompletions(run)), await rail(run, null)));
    return;
  }
  const wanted = here.step !== undefined ? Number(here.step) : run.kept ? stepsOf(run, kind).at(-1) : "";
  const step = await ask("step", { run: run.run, kind, step: ANSWERS ? nearestKept(run, kind, wanted) : wanted }, wanted === "");
  if (!still()) return;
  const chosen = step.groups.find((group) => String(group.group) === here.group) || step.groups[0];
  const curves = await askCurves(run.run, run.first);
  if (!still()) return;
  const content = h("div", { class: "content" });
  const side = await rail(run, step, chosen, curves);
  if (!still()) return;
  fill(main, h("div", { class: "columns" }, content, side));
  fill(content, stepBar(run, kind, step, curves), h("div", { id: "group" }, skeleton(8)));
  if (chosen) await showGroup($("group"), run, kind, step, chosen, still);
  else fill($("group"), empty("No completions were recorded at this step."));
};

const nearestKept = (run, kind, wanted) =>
  stepsOf(run, kind).reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));

/** The metric that stands over the steps: the reward; of held-out completions what was measured of them. */
function metricOver(kind, values) {
  const held = ["eval/reward", "eval/sampled", "eval/greedy"];
  const names = kind === "evaluation" ? held : ["reward", ...Object.keys(values)];
  return names.find((name) => (values[name] || []).some((value) => value !== null));
}

function noCompletions(run) {
  const where =
    kindHere() === "evaluation"
      ? "No evaluation of this run recorded completions."
      : run.state === "live"
        ? "The first step is still being sampled; this page follows it."
        : "This run recorded no completions (save.rollouts_every: 0, or an objective that samples none).";
  return panel(
    "No completions",
    h("p", { text: where }),
    h("p", {}, h("a", { href: linkTo({ view: "curves" }), text: "Its curves" })),
  );
}

function stepBar(run, kind, step, curves) {
  const steps = stepsOf(run, kind);
  const at = steps.indexOf(step.step);
  const metric = metricOver(kind, curves.values);
  const jump = (to) => go({ step: to, group: null, c: null });
  const button = (label, to, key) =>
    h("button", {
      type: "button",
      class: "icon",
      disabled: to === undefined,
      title: `${label} (${key})`,
      "aria-label": label,
      onclick: () => jump(to),
      text: key,
    });
  const follows = here.step === undefined && run.state === "live";
  return h(
    "section",
    { class: "panel steps" },
    h(
      "div",
      { class: "line" },
      h(
        "h1",
        {},
        kind === "evaluation" ? "Held out, after step " : "Step ",
        h("b", { text: step.step }),
        h("span", { class: "of", text: run.planned && run.state !== "file" ? ` of ${run.planned}` : "" }),
      ),
      h("span", { class: "arrows" }, button("earlier step", steps[at - 1], "←"), button("later step", steps[at + 1], "→")),
      h(
        "span",
        { class: "facts" },
        h("span", { class: "fact", text: `${kind === "evaluation" ? "held-out reward" : "reward"} ${fmt(step.reward)}` }),
        h("span", { class: "fact", text: many(step.all || step.groups.length, "group") }),
        h("span", { class: "fact", text: many(step.completions, "completion") }),
      ),
      h("span", { class: "push" }),
      run.evaluations.length
        ? h(
            "span",
            { class: "switch", role: "group", "aria-label": "which completions" },
            ["training", "evaluation"].map((one) =>
              h("button", {
                type: "button",
                "aria-pressed": String(one === kind),
                onclick: () => go({ kind: one === "training" ? null : one, step: null, group: null, c: null }),
                text: one === "training" ? "Training" : "Held out",
              }),
            ),
          )
        : null,
      follows
        ? h("span", { class: "live", text: "following" })
        : at < steps.length - 1 && !ANSWERS
          ? h(
              "button",
              { type: "button", onclick: () => go({ step: null, group: null, c: null }), title: "to the newest step (f)" },
              "Newest ",
              h("kbd", { text: "f" }),
            )
          : null,
    ),
    metric && curves.steps.length > 1
      ? h(
          "figure",
          {},
          h("figcaption", {}, metric, saveLinks(metric, [{ runs: [run] }])),
          scrubber(curves, metric, steps, step.step, jump),
        )
      : null,
  );
}

/** The few curves, the flags, the groups of the step. */
async function rail(run, step, chosen, curves) {
  const health = await ask("health", { run: run.run }, run.state === "live");
  curves = curves || (await askCurves(run.run, run.first));
  const flags = health.flags.length
    ? h(
        "ul",
        { class: "flags" },
        health.flags.map((flag) =>
          h(
            "li",
            {},
            h("a", { href: linkTo({ view: "curves", metric: flag.metric }) }, h("b", { text: flag.title })),
            h("span", { text: flag.meaning }),
            h("details", {}, h("summary", { text: "What to do" }), h("span", { text: flag.remedy })),
          ),
        ),
      )
    : h("p", { class: "well", text: run.metrics.length ? "Nothing to warn of in the last ten steps." : "Nothing was measured." });
  const figures = health.figures
    .filter((figure) => (curves.values[figure.metric] || []).some((value) => value !== null))
    .map((figure) => {
      const values = curves.values[figure.metric];
      const known = values.filter((value) => value !== null);
      const show = figure.unit === "share" ? percent : fmt;
      const moved = known.length > 1 ? `from ${show(known[0])}` : "";
      return h(
        "a",
        { class: "figure", href: linkTo({ view: "curves", metric: figure.metric }), title: figure.meaning },
        h("span", { class: "label", text: figure.label }),
        h("span", { class: "value", text: show(known[known.length - 1]) }),
        h("span", { class: "moved", text: moved }),
        sparkline(`${figure.label} over ${many(curves.steps.length, "step")}`, curves.steps, values),
      );
    });
  return h(
    "aside",
    { class: "rail", "aria-label": "how the run stands" },
    h("div", { class: "standing" }, panel("How the run stands", flags, h("div", { class: "figures" }, figures))),
    step ? groupList(step, chosen) : null,
  );
}

function groupList(step, chosen) {
  const flat = step.groups.flatMap((group) => group.rewards).filter((value) => value !== null);
  const low = Math.min(...flat),
    high = Math.max(...flat);
  const list = h("ol", { class: "group-list" });
  const show = (count) => {
    fill(
      list,
      step.groups.slice(0, count).map((group) =>
        h(
          "li",
          {},
          h(
            "a",
            {
              href: addressOf({ ...here, step: step.step, group: group.group, c: undefined }),
              "aria-current": group === chosen ? "true" : undefined,
            },
            h("span", { class: "prompt" }, ...visible(lastLine(group.prompt))),
            dots(group.rewards, low, high),
            h("span", {
              class: "note",
              title: "completions × reward",
              text: group.spread ? rewardsOf(group.rewards) : "all equal: teaches nothing",
            }),
          ),
        ),
      ),
    );
    if (count < step.groups.length)
      list.append(
        h("li", {}, h("button", { type: "button", onclick: () => show(count + 200), text: `${step.groups.length - count} more` })),
      );
  };
  show(60);
  const left = (step.all || step.groups.length) - step.groups.length;
  return panel(
    `Groups of step ${step.step}`,
    h("p", { class: "hint", text: "The one with the largest spread of rewards first." }),
    list,
    left > 0 ? h("p", { class: "hint", text: `${left} more are in the run, not in this report.` }) : null,
  );
}

/** The rewards of a group in words: how many completions earned each of two, or how many different ones there are. */
function rewardsOf(rewards) {
  const counts = new Map();
  for (const reward of rewards) counts.set(reward, (counts.get(reward) || 0) + 1);
  const unknown = counts.get(null) || 0;
  counts.delete(null);
  const [[high, highs], [low, lows]] = [...counts].sort(([one], [other]) => other - one);
  const known = counts.size === 2 ? `${highs} × ${fmt(high)}, ${lows} × ${fmt(low)}` : `${counts.size} different rewards`;
  return unknown ? `${known}, ${unknown} without one` : known;
}

const lastLine = (prompt) => prompt.replace(/<\|[^|<>]{1,30}\|>/g, " ").trim() || prompt;

const CARDS = [];

async function showGroup(element, run, kind, step, chosen, still, side = "") {
  const group = await ask("group", { run: run.run, kind, step: step.step, group: chosen.group });
  if (!still()) return;
  const place = step.groups ? step.groups.indexOf(chosen) : -1;
  const near = (i) => step.groups[i] && (() => go({ step: step.step, group: step.groups[i].group, c: null }));
  const move = (label, key, run_) =>
    h("button", {
      type: "button",
      class: "icon",
      disabled: !run_,
      onclick: run_ || undefined,
      title: `${label} (${key})`,
      "aria-label": label,
      text: key,
    });
  const rank =
    place === 0 && !chosen.spread
      ? "in every group of this step all rewards are equal: it taught nothing"
      : place === 0
        ? "the most informative of the step"
        : place > 0
          ? `number ${place + 1} of ${step.groups.length} by spread of rewards`
          : "";
  const strip = h("div", { class: "strip-place" });
  const context = { run: run.run, step: step.step, group: chosen.group, kind, side };
  const cards = cardsOf(group, context);
  const tokens = h("div", {}, quantityBar(group), cards);
  const replays = run.replay && !ANSWERS && !side && kind === "training";
  const again = replays ? replayPanel(run, here.replay !== undefined) : null;
  fill(
    element,
    h(
      "section",
      { class: "panel group-head" },
      h(
        "div",
        { class: "line" },
        h("h2", {}, `Group ${chosen.group}`),
        step.groups
          ? h("span", { class: "arrows" }, move("previous group", "↑", near(place - 1)), move("next group", "↓", near(place + 1)))
          : null,
        h("span", { class: place === 0 && !chosen.spread ? "of lonely" : "of", text: rank }),
        h("span", { class: "push" }),
        side || ANSWERS
          ? null
          : h("a", {
              class: "button",
              href: linkTo({ view: "compare", step: step.step, kind: here.kind, key: group.key }),
              text: "Compare",
            }),
      ),
      promptBox(group),
      strip,
    ),
    again,
    tokens,
  );
  if (again && here.replay !== undefined) showReplay(again.querySelector(".found-replay"), tokens, group, context, still);
  if (!side && !ANSWERS) showStrip(strip, run, kind, step.step, group.key, still);
  if (here.c !== undefined && !side) {
    const card = $("c" + (group.completions.find((one) => one.equal?.includes(Number(here.c)))?.index ?? here.c));
    card?.classList.add("linked");
    card?.scrollIntoView({ block: "center" });
  }
}

/** What another algorithm would have done with these completions: a form, and below it what was found. */
function replayPanel(run, open) {
  const { objectives, parts, options } = run.replay;
  const given = Object.fromEntries(
    (here.set || "")
      .split(";")
      .filter(Boolean)
      .map((change) => change.split("=")),
  );
  const pick = (key, label, values, first) =>
    choice(label, given[key] || "", [["", first], ...values.map((value) => [value, value])], { name: key });
  const numbers = h("span", { class: "numbers" });
  const surrogate = pick("group.surrogate", "Surrogate", parts.surrogate, "the objective's");
  const shown = () => {
    const known = options[surrogate.querySelector("select").value || "clipped"] || [];
    fill(
      numbers,
      known.map((name) =>
        field(name, {
          name: `group.surrogate.${name}`,
          class: "short",
          inputmode: "decimal",
          pattern: "[0-9.eE+\\-]*",
          value: given[`group.surrogate.${name}`] || "",
          placeholder: "as it is",
        }),
      ),
    );
  };
  surrogate.addEventListener("change", shown);
  shown();
  const form = h(
    "form",
    { class: "controls" },
    pick("objective", "Objective", objectives, "as recorded"),
    pick("group.credit", "Credit", parts.credit, "the objective's"),
    pick("group.ratio", "Ratio", parts.ratio, "the objective's"),
    surrogate,
    numbers,
    pick("group.weights", "Weights", parts.weights, "the objective's"),
    h("button", { type: "submit", class: "main", text: "Replay" }),
    open
      ? h("button", {
          type: "button",
          onclick: () => {
            if (here.by === "replay" || here.by === "change") delete here.by;
            go({ replay: null, set: null });
          },
          text: "Close",
        })
      : null,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const entries = [...new FormData(form)].map(([key, value]) => [key, String(value).trim()]).filter(([, value]) => value);
    const surrogateName = entries.find(([key]) => key === "group.surrogate");
    const set = entries
      .filter(
        ([key]) =>
          !key.startsWith("group.surrogate") ||
          key !== "group.surrogate" ||
          !entries.some(([other]) => other.startsWith("group.surrogate.")),
      )
      .map(([key, value]) => `${key}=${value}`);
    if (surrogateName && entries.some(([key]) => key.startsWith("group.surrogate.")))
      set.unshift(`group.surrogate.name=${surrogateName[1]}`);
    here.by = set.length ? "change" : "replay";
    go({ replay: "1", set: set.join(";") || null });
  });
  return h(
    "details",
    { class: "panel replay", open },
    h(
      "summary",
      {},
      h("b", { text: "What would another algorithm have done?" }),
      h("span", { class: "soft", text: " The same completions, computed again: which tokens would have been pushed." }),
    ),
    form,
    h("div", { class: "found-replay", role: "status" }),
  );
}

/** Ask for the replay of the group that is shown, and colour its tokens by it. */
async function showReplay(place, tokens, group, context, still) {
  fill(place, h("p", { class: "hint", text: "Computing the step again; the first time takes some seconds." }));
  let found;
  try {
    found = await ask("replay", { run: context.run, step: context.step, group: context.group, set: here.set });
  } catch (error) {
    if (still()) fill(place, failed(error));
    return;
  }
  if (!still()) return;
  const moved = found.pushes
    ? Object.entries(found.pushes)
        .filter(([, count]) => count)
        .map(([name, count]) => `${count.toLocaleString("en")} ${name}`)
        .join(", ")
    : "";
  fill(
    place,
    h("p", { class: "algorithm", text: found.algorithm }),
    found.without
      ? h("p", { class: "bad", text: found.without })
      : h("p", {
          class: "hint",
          text:
            `Loss of the ${found.pass} pass ${fmt(found.loss[0])}` +
            (here.set
              ? ` recorded, ${fmt(found.loss[1])} changed. Tokens of the step: ${moved}.`
              : ". Key 8 shows each token's push by the closed form, and key 6 its size."),
        }),
  );
  if (!found.scales.replay) return;
  for (const completion of group.completions) {
    const own = found.completions.find((one) => one.index === completion.index);
    if (!own?.replay || !completion.columns) continue;
    completion.columns.gradient = own.recorded.map(Math.abs);
    completion.columns.replay = own.replay;
    if (own.change) completion.columns.change = own.change;
  }
  group.quantities.gradient = [0, found.scales.recorded[1]];
  group.quantities.replay = found.scales.replay;
  if (found.scales.change) group.quantities.change = found.scales.change;
  fill(tokens, quantityBar(group), cardsOf(group, context));
}

function promptBox(group) {
  const row =
    group.row && typeof group.row === "object"
      ? Object.entries(group.row)
          .filter(([name]) => name !== "prompt" && !(name === "images" && group.images?.length))
          .slice(0, 12)
      : [];
  const [before, added, behind] = group.prompt;
  const left = group.prompt_length - before.length - added.length - behind.length;
  return [
    h(
      "div",
      { class: "prompt-text", tabindex: 0, role: "group", "aria-label": "prompt", dir: "auto" },
      ...visible(before),
      added ? h("span", { class: "environment", title: "added by the environment's reset" }, ...visible(added)) : null,
      ...visible(behind),
      left > 0 ? h("i", { text: ` … ${many(left, "character")} more` }) : null,
    ),
    group.images?.length
      ? h(
          "div",
          { class: "prompt-images" },
          group.images.map((url, i) =>
            url
              ? h("img", { src: url, alt: `image ${i + 1} of the prompt` })
              : h("i", { text: `image ${i + 1} is not in the run's folder` }),
          ),
        )
      : null,
    row.length
      ? h(
          "dl",
          { class: "row" },
          row.map(([name, value]) =>
            h(
              "div",
              {},
              h("dt", { text: name }),
              h("dd", {}, ...visible((typeof value === "string" ? value : JSON.stringify(value)).slice(0, 300))),
            ),
          ),
        )
      : null,
  ];
}

async function showStrip(element, run, kind, step, key, still) {
  if (kind !== "training") return;
  let found;
  try {
    found = await ask("visits", { run: run.run, key }, true);
  } catch {
    return;
  }
  if (!still()) return;
  const reading =
    found.read < found.total ? ` · ${found.read.toLocaleString("en")} of ${many(found.total, "step")} read so far` : "";
  if (found.visits.length < 2) {
    if (reading) fill(element, h("p", { class: "hint", text: "This prompt through training: looking for other visits" + reading }));
    return;
  }
  const flat = found.visits.flatMap((visit) => visit.rewards).filter((value) => value !== null);
  const low = Math.min(...flat),
    high = Math.max(...flat);
  const y = (value) => (high > low ? 40 - ((value - low) / (high - low)) * 34 : 23);
  const shown =
    found.visits.length > 120 ? found.visits.filter((_, i) => i % Math.ceil(found.visits.length / 120) === 0) : found.visits;
  fill(
    element,
    h("h3", { text: "This prompt through training" }),
    h("p", {
      class: "hint",
      text:
        `${many(found.visits.length, "visit")}${reading}; a dot is a completion, ` +
        `the bar their mean reward (${fmt(low)} to ${fmt(high)})`,
    }),
    h(
      "ol",
      { class: "strip" },
      shown.map((visit) => {
        const known = visit.rewards.filter((value) => value !== null);
        const mean = known.reduce((sum, value) => sum + value, 0) / Math.max(1, known.length);
        return h(
          "li",
          {},
          h(
            "a",
            {
              href: addressOf({ ...here, step: visit.step, group: visit.group, c: undefined }),
              "aria-current": visit.step === step ? "true" : undefined,
              "aria-label": `step ${visit.step}, mean reward ${fmt(mean)}`,
              title: `step ${visit.step}: mean ${fmt(mean)}`,
            },
            h(
              "svg",
              { viewBox: "0 0 26 46", width: 26, height: 46, "aria-hidden": "true" },
              h("rect", { x: 3, y: y(mean) - 1, width: 20, height: 2 }),
              known.slice(0, 32).map((value, i) => h("circle", { cx: 6 + ((i * 5) % 15), cy: y(value), r: 2.2 })),
            ),
            h("span", { text: visit.step }),
          ),
        );
      }),
    ),
  );
}

const REPLAYED = new Set(["replay", "change"]);

function chosenQuantity(scales) {
  if (here.by === "none") return null;
  if (here.by && scales[here.by]) return here.by;
  return QUANTITIES.find((one) => scales[one.id])?.id ?? null;
}

/** What tokens are coloured by: a key each, and the scale. */
function quantityBar(group) {
  const scales = group.quantities;
  const bar = h("section", { class: "panel quantities", "aria-label": "what tokens are coloured by" });
  if (!Object.keys(scales).length) return null;
  const paint = () => {
    const by = chosenQuantity(scales),
      quantity = QUANTITIES.find((one) => one.id === by);
    fill(
      bar,
      h(
        "div",
        { class: "line" },
        h(
          "div",
          { class: "switch", role: "group", "aria-label": "colour tokens by" },
          QUANTITIES.filter((one) => scales[one.id] || !REPLAYED.has(one.id)).map((one) =>
            h(
              "button",
              {
                type: "button",
                "aria-pressed": String(one.id === by),
                disabled: !scales[one.id],
                title: scales[one.id]
                  ? one.says
                  : one.id === "gradient"
                    ? "not recorded in this run; a replay of the step shows it, unless the run has a teacher"
                    : "not recorded in this run",
                onclick: () => colourBy(one.id),
              },
              h("kbd", { text: QUANTITIES.indexOf(one) + 1 }),
              one.label,
            ),
          ),
          h(
            "button",
            { type: "button", "aria-pressed": String(!by), onclick: () => colourBy("none") },
            h("kbd", { text: "0" }),
            "None",
          ),
        ),
        h("span", { class: "push" }),
        h(
          "button",
          {
            type: "button",
            "aria-pressed": String(here.blanks === "1"),
            onclick: () => go({ blanks: here.blanks === "1" ? null : "1" }, true),
            title: "spaces, ends of lines and special tokens",
          },
          h("kbd", { text: "w" }),
          "Blanks",
        ),
      ),
      h(
        "div",
        { class: "line legend" },
        quantity ? scaleBar(quantity, scales[by]) : null,
        h(
          "p",
          { class: "says" },
          quantity ? quantity.says : "Tokens are not coloured.",
          quantity && (by === "push" || by === "gradient")
            ? [" ", h("span", { class: "hatched", role: "img", "aria-label": "hatched" })]
            : null,
        ),
      ),
    );
  };
  paint();
  bar.repaint = paint;
  return bar;
}

function colourBy(id) {
  here.by = id;
  history.replaceState(null, "", addressOf(here));
  remembered.set("by", id);
  document.querySelectorAll(".quantities").forEach((bar) => {
    const focus = bar.contains(document.activeElement) ? [...bar.querySelectorAll("button")].indexOf(document.activeElement) : -1;
    bar.repaint();
    if (focus >= 0) bar.querySelectorAll("button")[focus]?.focus();
  });
  CARDS.forEach((card) => card.paint());
}

/** The completions, those that are the same token for token and got the same reward as one, with the indexes of all in `equal`. */
function folded(completions) {
  const known = new Map();
  for (const one of completions) {
    const said = JSON.stringify([one.reward, one.length, one.ids || one.text, one.messages]);
    const first = known.get(said);
    if (first) first.equal.push(one.index);
    else known.set(said, Object.assign(one, { equal: [one.index] }));
  }
  return [...known.values()];
}

/** The completions of a group, the best first. */
function cardsOf(group, context) {
  if (!context.side || context.side === "l") CARDS.length = 0;
  const scales = group.quantities;
  const better = (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.index - b.index;
  const sorted = folded([...group.completions].sort(better));
  const rewards = group.completions.map((one) => one.reward);
  const shared = { ...context, scales, rewards, wanted: here.text, by: () => chosenQuantity(scales) };
  const grid = h("div", { class: "cards" });
  const show = (from) => {
    for (const completion of sorted.slice(from, from + 32)) {
      const card = new Card({ ...completion }, shared);
      CARDS.push(card);
      grid.append(card.element);
    }
    if (from + 32 < sorted.length) {
      const more = h("button", {
        type: "button",
        class: "more wide",
        text: `${many(sorted.length - from - 32, "completion")} more`,
        onclick: () => {
          more.remove();
          show(from + 32);
        },
      });
      grid.append(more);
    }
  };
  show(0);
  if (group.size > group.completions.length)
    grid.append(
      h("p", { class: "hint", text: `${group.size - group.completions.length} more completions of this group are in the run.` }),
    );
  return grid;
}

// ---------------------------------------------------------------- curves

/** Groups of seeds and single runs that are laid over one another unless others are chosen: of each all its metrics are read. */
const LAID_OVER = 8;

/** The groups of seeds and the single runs whose curves are drawn: the one that is looked at, and those laid over it. */
function overlaidSeries() {
  const rewarded = (one) => one.runs[0].metrics.includes("reward");
  const all = seriesOf(RUNS);
  const shown = all.find((one) => one.runs.includes(runHere()));
  const alike = all.filter((one) => rewarded(one) === rewarded(shown)).slice(0, LAID_OVER);
  const chosen = here.overlay === undefined ? null : new Set(here.overlay.split(",").filter(Boolean).map(Number));
  return all.filter((one) => one === shown || (chosen ? chosen.has(one.runs[0].run) : alike.includes(one)));
}

/** The runs whose curves are drawn. */
const overlaid = () => overlaidSeries().flatMap((one) => one.runs);

const seedsOf = (one) => (one.runs.length > 1 ? ` (${many(one.runs.length, "seed")})` : "");

/** Links that save a curve as a figure and as a table. */
function saveLinks(metric, series, { axis, smooth, seeds } = {}) {
  if (ANSWERS) return null;
  const given = { metric, series: numbersOf(series), x: axis, smooth, seeds };
  const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value !== undefined));
  const link = (kind) =>
    h("a", {
      href: `/figure.${kind}?${query}`,
      download: "",
      title: `save as ${kind.toUpperCase()}`,
      "aria-label": `save ${metric} as ${kind.toUpperCase()}`,
      text: kind.toUpperCase(),
    });
  return h("span", { class: "save" }, link("svg"), link("csv"));
}

/** Sentences about a difference, its verdict in bold. */
const spoken = (sentences) =>
  sentences.map((text) => h("p", { class: /^(These data|Of these)/.test(text) ? "difference verdict" : "difference", text }));

/** What the held-out prompts show of the series: each against the first. */
async function differencePanel(series) {
  const found = await ask("differences", { series: numbersOf(series) });
  return panel(
    "What the held-out prompts show",
    h(
      "ul",
      { class: "letters" },
      found.legend.map((one, i) =>
        h(
          "li",
          {},
          h("span", { class: "swatch", style: { background: lineColour(series[i].place) } }),
          h("b", { text: one.letter }),
          " ",
          h("bdi", {}, ...visible(one.label)),
          `: ${many(one.runs, "run")}`,
        ),
      ),
    ),
    spoken(found.sentences),
  );
}

/** Where the work of a step goes: tokens by what became of them, seconds by phase beside the ideal step's. */
function workTable(rows) {
  const show = (row) =>
    row.unit === "share"
      ? percent(row.value)
      : row.unit === "seconds"
        ? shortTime(row.value)
        : row.unit === "bytes"
          ? bytes(row.value)
          : row.value < 1e6
            ? Math.round(row.value).toLocaleString("en")
            : scaled(row.value, ["", "", "M", "G", "T", "P"]);
  return table(
    "work",
    "where a step goes",
    null,
    rows.map((row) => [
      h("a", { href: linkTo({ view: "curves", metric: row.metric }), text: row.label }),
      show(row),
      row.share === undefined ? "" : [percent(row.share), h("span", { class: "note", text: " of the step" })],
      h("span", { class: "soft note", text: row.meaning }),
    ]),
  );
}

/** The last value that is known; of a group of seeds with half of its interval. */
function lastOf(values, half) {
  const at = values.findLastIndex((value) => value !== null);
  if (at < 0) return "–";
  return fmt(values[at]) + (half && half[at] !== null ? ` ± ${fmt(half[at])}` : "");
}

VIEWS.curves = async (main) => {
  const still = staying();
  const drawn = overlaidSeries();
  const runs = drawn.flatMap((one) => one.runs);
  const names = [...new Set(runs.flatMap((run) => run.metrics))];
  const seeds = here.seeds === "1";
  const weight = Number(here.smooth ?? 0.6),
    axis = here.x || "step";
  const found = h("div", { class: "charts" });
  const control = h(
    "section",
    { class: "panel controls" },
    field("Metric", {
      type: "search",
      id: "metric",
      value: here.metric || "",
      placeholder: "part of a name",
      oninput: (event) => {
        here.metric = event.target.value || undefined;
        history.replaceState(null, "", addressOf(here));
        draw();
      },
    }),
    h(
      "label",
      {},
      "Smoothing",
      h(
        "span",
        { class: "ranged" },
        h("input", {
          type: "range",
          min: 0,
          max: 0.98,
          step: 0.02,
          value: weight,
          disabled: Boolean(ANSWERS) && !seeds && drawn.every((one) => one.runs.length > 1), // their bands are made
          onchange: (event) => go({ smooth: event.target.value }, true),
        }),
        h("output", { text: weight.toFixed(2) }),
      ),
    ),
    choice(
      "Across",
      axis,
      [
        ["step", "steps"],
        ["tokens", "tokens sampled"],
        ["time", "time"],
      ],
      { onchange: (event) => go({ x: event.target.value }, true) },
    ),
    RUNS.length > 1
      ? h(
          "fieldset",
          {},
          h("legend", { text: "Runs" }),
          seriesOf(RUNS).map((one) =>
            h(
              "label",
              { class: "check" },
              h("input", {
                type: "checkbox",
                checked: drawn.some((other) => other.place === one.place),
                disabled: one.runs.includes(runHere()),
                onchange: (event) => {
                  const kept = new Set(drawn.map((other) => other.runs[0].run));
                  if (event.target.checked) kept.add(one.runs[0].run);
                  else kept.delete(one.runs[0].run);
                  go({ overlay: [...kept].join(",") || "none" }, true);
                },
              }),
              h("span", { class: "swatch", style: { background: lineColour(one.place) } }),
              h("bdi", {}, ...visible(one.label + seedsOf(one))),
            ),
          ),
        )
      : null,
    drawn.some((one) => one.runs.length > 1)
      ? h(
          "label",
          { class: "check" },
          h("input", {
            type: "checkbox",
            id: "seeds",
            checked: seeds,
            onchange: (event) => go({ seeds: event.target.checked ? "1" : null }, true),
          }),
          "a line for each seed",
        )
      : null,
    h("p", {
      class: "hint",
      text:
        "Click a point for the completions of its step; drag to look closer, double-click to go back." +
        (drawn.some((one) => one.runs.length > 1) ? " Seeds are drawn as their mean with its 95% interval." : ""),
    }),
  );
  const health = await ask("health", { run: runHere().run }, runHere().state === "live");
  const { work } = health;
  if (!still()) return;
  const compared = h("div");
  fill(
    main,
    control,
    compared,
    found,
    work.length && !here.metric ? panel("Where a step goes, over the last ten", workTable(work)) : null,
  );
  if (drawn.length > 1 && drawn.every((one) => one.runs[0].metrics.includes("reward")))
    later(compared, () => differencePanel(ANSWERS ? seriesOf(RUNS) : drawn));
  if (!names.length) {
    fill(found, empty("This run has no metrics yet."));
    return;
  }
  const lazily = new IntersectionObserver(
    (entries) =>
      entries.forEach((entry) => {
        if (!entry.isIntersecting) return;
        lazily.unobserve(entry.target);
        entry.target.draw();
      }),
    { rootMargin: "300px" },
  );
  function draw() {
    lazily.disconnect();
    const wanted = (here.metric || "").toLowerCase();
    const chosen = names.filter((name) => name.toLowerCase().includes(wanted) && !name.endsWith("/half_width"));
    const known = new Set(health.families.flatMap((family) => family.names));
    const others = { title: "Of the other runs", names: chosen.filter((name) => !known.has(name)) };
    fill(
      found,
      [...health.families, others]
        .map((family) => ({ title: family.title, names: family.names.filter((name) => chosen.includes(name)) }))
        .filter((family) => family.names.length)
        .map((family) => panel(family.title, h("div", { class: "chart-grid" }, family.names.map(place)))),
    );
    if (!chosen.length) fill(found, empty(`No metric has “${here.metric}” in its name.`));
  }
  /** A line for each run that has the metric. */
  async function linesOfRuns(one, name) {
    const thin = one.runs.length > 1;
    const lines = [];
    for (const run of one.runs.filter((run) => run.metrics.includes(name))) {
      const curves = await askCurves(run.run, [name]);
      const values = curves.values[name];
      const xs = axis === "tokens" && curves.tokens.length ? curves.tokens : axis === "time" ? curves.seconds : curves.steps;
      const averaged = smoothing(name, values, weight);
      const raw = averaged && !thin ? values : null;
      const ys = smooth(values, averaged);
      lines.push({ name: run.name, run: run.run, steps: curves.steps, xs, ys, raw, colour: lineColour(one.place), thin });
    }
    return lines;
  }
  /** A run's line; of a group of seeds the mean with its band, and each seed's own line where it is wanted or they share no step. */
  async function linesOf(one, name) {
    if (one.runs.length < 2) return linesOfRuns(one, name);
    if (!one.runs.some((run) => run.metrics.includes(name))) return [];
    const { steps, xs, mean: ys, half } = (await askBands(numbersOf([one]), name, axis, weight))[name];
    if (!steps.length) return linesOfRuns(one, name);
    const band = { name: one.label, run: one.runs[0].run, steps, xs: xs || steps, ys, half, colour: lineColour(one.place) };
    return seeds ? [...(await linesOfRuns(one, name)), band] : [band];
  }
  function place(name) {
    const element = h("div", { class: "plot" });
    const frame = h("figure", { class: "chart", "aria-label": name }, h("figcaption", { text: name }), element);
    frame.draw = async () => {
      try {
        const lines = [];
        for (const one of drawn) lines.push(...(await linesOf(one, name)));
        if (!still() || !lines.length) return;
        chart(element, lines, {
          label: name,
          time: axis === "time",
          pick: (x) => {
            const line = lines.find((one) => one.steps && one.xs.includes(x)) || lines[0];
            go({
              view: null,
              run: line.run || null,
              step: line.steps[line.xs.indexOf(x)],
              group: null,
              c: null,
              metric: null,
              smooth: null,
              x: null,
            });
          },
        });
        const last = lines
          .filter((line) => !line.thin)
          .map((line) =>
            h("span", { style: drawn.length > 1 ? { color: line.colour } : {}, text: lastOf(line.raw || line.ys, line.half) }),
          );
        const caption = frame.querySelector("figcaption");
        caption.append(h("span", { class: "last" }, ...last.flatMap((one, i) => (i ? [" · ", one] : [one]))));
        if (!ANSWERS) caption.append(saveLinks(name, drawn, { axis, smooth: weight, seeds: seeds ? 1 : undefined }));
      } catch (error) {
        fill(element, failed(error));
      }
    };
    lazily.observe(frame);
    return frame;
  }
  draw();
};

// ---------------------------------------------------------------- search

VIEWS.search = async (main) => {
  const run = runHere();
  if (ANSWERS) {
    fill(main, panel("Search", empty("A report holds some groups only. Open the run to search all of it: groupwise view RUN")));
    return;
  }
  const input = (name, label, attributes) => field(label, { name, value: here[name] ?? "", ...attributes });
  const functions = run.metrics.filter((name) => /^rewards\/.*\/mean$/.test(name)).map((name) => name.slice(8, -5));
  const select = (name, label, values) => choice(label, here[name] ?? "", values, { name });
  const form = h(
    "form",
    { class: "panel controls", role: "search" },
    field(
      "Completion holds",
      { name: "text", id: "search-text", type: "search", value: here.text ?? "", placeholder: "text, upper or lower case" },
      { class: "grow" },
    ),
    field("Prompt holds", { name: "prompt", type: "search", value: here.prompt ?? "" }, { class: "grow" }),
    select("function", "Reward", [["", "combined"], ...functions.map((name) => [name, name])]),
    input("low", "from", { type: "number", step: "any", class: "short" }),
    input("high", "to", { type: "number", step: "any", class: "short" }),
    select("finish", "Finish", [
      ["", "any"],
      ["eos", "ended"],
      ["length", "truncated"],
      ["stop", "stop string"],
    ]),
    input("first", "Steps from", { type: "number", class: "short" }),
    input("last", "to", { type: "number", class: "short" }),
    select("kind", "Of", [
      ["", "training"],
      ["evaluation", "held out"],
    ]),
    h("button", { type: "submit", class: "main", text: "Search" }),
  );
  const submit = (event) => {
    event?.preventDefault();
    const changed = Object.fromEntries([...new FormData(form)].map(([key, value]) => [key, value || undefined]));
    if (Object.keys(changed).every((key) => here[key] === changed[key])) return;
    Object.assign(here, changed);
    delete here.c;
    history.pushState(null, "", addressOf(here));
    begin();
  };
  form.addEventListener("submit", submit);
  form.addEventListener("change", () => submit());
  const count = h("p", { class: "hint", role: "status" });
  const list = h("ol", { class: "found" });
  const more = h("button", { type: "button", class: "more wide", hidden: true, text: "More" });
  fill(main, form, h("section", { class: "panel" }, h("h2", { text: "Completions" }), count, list, more));
  const keys = ["text", "prompt", "low", "high", "function", "finish", "first", "last"];
  let still, asked, cursor, seen, total, wanted;
  const begin = () => {
    token += 1;
    still = staying();
    asked = Object.fromEntries(keys.map((key) => [key, here[key]]));
    cursor = "";
    seen = total = 0;
    wanted = 60;
    list.replaceChildren();
    return read();
  };
  const read = async () => {
    const kind = kindHere(),
      still_ = still;
    more.hidden = true;
    try {
      while (still_() && cursor !== null && total < wanted) {
        const answer = await ask("search", { ...asked, run: run.run, kind, cursor }, true);
        if (!still_()) return;
        list.append(...foldedRows(answer.matches));
        total += answer.matches.length;
        seen += answer.seen;
        cursor = answer.next;
        count.textContent =
          `${many(total, "completion")} in the ${many(seen, "newest step", "newest steps")}` +
          (answer.left ? `, ${answer.left.toLocaleString("en")} steps not looked at yet` : "; that is all");
      }
    } catch (error) {
      if (still_()) count.textContent = error.message;
    }
    if (still_()) more.hidden = cursor === null;
  };
  more.addEventListener("click", () => {
    wanted = total + 60;
    read();
  });
  await begin();
};

/** The rows of matches, those of one group that say the same and earned the same as one. */
function foldedRows(matches) {
  const known = new Map();
  for (const one of matches) {
    const said = JSON.stringify([one.step, one.group, one.reward, one.value, one.finish, one.digest]);
    if (known.has(said)) known.get(said).times += 1;
    else known.set(said, { ...one, times: 1 });
  }
  return [...known.values()].map(foundRow);
}

function foundRow(one) {
  const place = linkTo({ run: here.run, kind: here.kind, step: one.step, group: one.group, c: one.index, text: here.text });
  return h(
    "li",
    {},
    h(
      "a",
      { href: place },
      h("span", { class: "where", text: `step ${one.step} · group ${one.group} · #${one.index}` }),
      h("span", { class: "reward", text: fmt(here.function ? one.value : one.reward) }),
      h(
        "span",
        { class: "excerpt", dir: "auto" },
        h("span", { class: "asked" }, ...marked(lastLine(one.prompt), here.prompt)),
        ...marked(one.excerpt, here.text),
        one.answer ? h("span", { class: "asked" }, "answer ", ...visible(one.answer)) : null,
      ),
      h("span", {
        class: "note",
        text: `${one.times > 1 ? `× ${one.times} · ` : ""}${many(one.length, "token")}${one.finish === "length" ? " · truncated" : ""}`,
      }),
    ),
  );
}

// ---------------------------------------------------------------- two steps, two runs

VIEWS.compare = async (main) => {
  const still = staying(),
    chosenKind = here.kind;
  const samples = (one) => one.metrics.includes("reward"); // runs on data have no completions
  const run = (here.run === undefined && !samples(runHere()) && RUNS.find(samples)) || runHere();
  const others = RUNS.filter((one) => one !== run && samples(one));
  const other = RUNS[Number(here.other)] || others.find((one) => one.label === null || one.label !== run.label) || others[0] || run;
  if (ANSWERS) {
    fill(main, await differences(overlaid()));
    return;
  }
  const picker = (label, runKey, stepKey, of, step) =>
    h(
      "fieldset",
      {},
      h("legend", { text: label }),
      choice(
        "Run",
        of.run,
        RUNS.map((one) => [one.run, one.name]),
        { onchange: (event) => go({ [runKey]: event.target.value, step: null, with: null, key: null }) },
      ),
      field("Step", {
        type: "number",
        class: "short",
        value: step ?? "",
        min: 0,
        onchange: (event) => go({ [stepKey]: event.target.value, kind: found?.kind, key: null }),
      }),
    );
  const controls = h("section", { class: "panel controls" }),
    seeds = h("div"),
    pairs = h("div"),
    sides = h("div", { class: "sides" }),
    config = h("div");
  fill(main, controls, seeds, pairs, sides, config);
  const groups = seriesOf(RUNS).filter((one) => one.runs.includes(run) || one.runs.includes(other));
  const grouped = groups.length > 1 && groups.some((one) => one.runs.length > 1);
  if (grouped) {
    const [left] = groups.filter((one) => one.runs.includes(run));
    later(seeds, () => differencePanel([left, ...groups.filter((one) => one !== left)]));
  }
  let found;
  try {
    found = await ask("compare", { run: run.run, step: here.step, other: other.run, with: here.with, kind: chosenKind });
  } catch (error) {
    if (still()) fill(pairs, panel("Prompts of both", failed(error)));
  }
  if (!still()) return;
  fill(
    controls,
    picker("Left", "run", "step", run, found?.step ?? here.step),
    picker("Right", "other", "with", other, found?.with ?? here.with),
    found?.near.length
      ? h(
          "p",
          { class: "hint" },
          "Steps with the same prompts as the right one: ",
          found.near
            .slice(0, 8)
            .map(([step, count]) =>
              h("a", { class: "chip", href: addressOf({ ...here, step, key: undefined }), text: `${step} (${count})` }),
            ),
        )
      : null,
  );
  if (found) {
    const chosen = found.pairs.find((pair) => pair.key === here.key) || found.pairs[0];
    fill(
      pairs,
      panel(
        "Prompts of both",
        h("p", {
          class: "hint",
          text: found.pairs.length
            ? `${found.kind === "evaluation" ? "Held-out prompts: " : ""}${found.pairs.length} of ${found.left} and ` +
              `${found.right} groups share their prompt; the one whose reward moved most first.`
            : "No prompt was visited at both steps. Training visits a prompt again in its second epoch; " +
              "evaluations ask the same prompts each time (eval.every).",
        }),
        spoken(grouped ? found.difference.slice(0, 2) : found.difference), // what seeds show stands above
        h(
          "ol",
          { class: "pairs" },
          found.pairs
            .slice(0, 24)
            .map((pair) =>
              h(
                "li",
                {},
                h(
                  "a",
                  { href: addressOf({ ...here, key: pair.key }), "aria-current": pair === chosen ? "true" : undefined },
                  h("span", { class: "prompt" }, ...visible(lastLine(pair.prompt))),
                  h("span", { class: "moved", text: `${fmt(pair.left.mean)} → ${fmt(pair.right.mean)}` }),
                ),
              ),
            ),
        ),
      ),
    );
    if (chosen) {
      const left = h("div", { class: "side" }),
        right = h("div", { class: "side" });
      fill(sides, left, right);
      const title = (of, step) => h("h2", { class: "side-title", text: `${of.name}, step ${step}` });
      const body = [h("div"), h("div")];
      fill(left, title(run, found.step), body[0]);
      fill(right, title(other, found.with), body[1]);
      try {
        await showGroup(body[0], run, found.kind, { step: found.step }, chosen.left, still, "l");
        await showGroup(body[1], other, found.kind, { step: found.with }, chosen.right, still, "r");
      } catch (error) {
        if (still()) fill(sides, failed(error));
      }
    }
  }
  if (still() && other !== run) fill(config, await differences([run, other]));
};

/** Keys of the resolved recipes that differ. */
async function differences(runs) {
  const found = await Promise.all(runs.map((run) => ask("config", { run: run.run })));
  const keys = [...new Set(found.flatMap((one) => Object.keys(one.config)))].sort();
  const differing = keys.filter((key) => new Set(found.map((one) => JSON.stringify(one.config[key] ?? null))).size > 1);
  return panel(
    "Differences of their configurations",
    differing.length
      ? configTable(runs, found, differing, "config")
      : empty(runs.length > 1 ? "Their recipes are the same." : "There is only one run."),
  );
}

function configTable(runs, found, keys, part) {
  const shown = (key, value) => {
    if (value === undefined || value === null) return "–";
    if (part === "environment" && key === "time") return new Date(1000 * value).toLocaleString();
    return typeof value === "string" ? value : JSON.stringify(value);
  };
  return table(
    "config",
    "table",
    ["Key", ...runs.map((run) => run.name)],
    keys.map((key) => [key, ...found.map((one) => visible(shown(key, one[part][key])))]),
  );
}

// ---------------------------------------------------------------- signs of reward hacking

/** How reward and held-out accuracy moved: the means of the first and the last fifth of each; null where there are too few. */
function movedBoth(reward, accuracy) {
  const known = (values) => (values || []).filter((value) => value !== null);
  const ends = (values) => {
    const part = Math.max(1, Math.floor(values.length / 5));
    const mean = (some) => some.reduce((sum, value) => sum + value, 0) / some.length;
    return [mean(values.slice(0, part)), mean(values.slice(-part))];
  };
  const [rewards, accuracies] = [known(reward), known(accuracy)];
  if (rewards.length < 2 || accuracies.length < 2) return null;
  const [was, is] = ends(rewards),
    [before, after] = ends(accuracies);
  const alone = after < 0.95 && is - was > 0.05 && after - before < 0.02;
  return { was, is, before, after, alone };
}

/** What reward and held-out accuracy say together. */
function verdictOf(moved) {
  if (!moved) return "Too few evaluations to compare: set eval.every and eval.at_start.";
  const { was, is, before, after } = moved;
  const text =
    "Means of the first and the last fifth of each: " +
    `the reward went from ${fmt(was)} to ${fmt(is)}, held-out accuracy from ${percent(before)} to ${percent(after)}.`;
  if (after >= 0.95) return `${text} It is near its ceiling of 100%.`;
  if (moved.alone)
    return `${text} The reward rose and accuracy did not: the reward may be cheated, or the prompts learnt by heart.`;
  return text;
}

/** The answer to the question of the page, from what it shows below. */
function answerOf(correlations, moved) {
  const signs = [];
  if (moved?.alone) signs.push("the reward rose and held-out accuracy did not");
  if (correlations.length > 0.6) signs.push("longer texts earn more");
  if (correlations.repetition > 0.6) signs.push("more repetitive texts earn more");
  if (signs.length) return `There are signs of it: ${signs.join("; ")}.`;
  const texts = "No sign of it: neither longer nor more repetitive texts earn much more";
  if (!moved) return `${texts}. Whether accuracy rises with the reward is not known: set eval.every.`;
  return `${texts}, and the reward did not rise without held-out accuracy.`;
}

function relation(correlation) {
  if (correlation === null) return h("span", { class: "soft", text: "does not vary" });
  const size = Math.abs(correlation);
  const words = size > 0.6 ? "strongly" : size > 0.3 ? "clearly" : size > 0.1 ? "weakly" : "not";
  return h(
    "span",
    { class: "relation", title: `correlation ${fmt(correlation, true)}` },
    h("span", { class: "bar" }, h("span", { class: correlation < 0 ? "minus" : "plus", style: { width: `${50 * size}%` } })),
    `${words}${size > 0.1 ? (correlation > 0 ? " up" : " down") : ""}`,
  );
}

VIEWS.lenses = async (main) => {
  const run = runHere(),
    still = staying();
  fill(main, panel("Is the reward being cheated?", skeleton(6)));
  let found;
  try {
    found = await ask("lenses", { run: run.run, first: here.first, last: here.last }, run.state === "live");
  } catch (error) {
    if (still()) fill(main, panel("Is the reward being cheated?", failed(error)));
    return;
  }
  const curves = await askCurves(
    run.run,
    ["completions/duplicates", "eval/greedy", "eval/sampled", "reward"].filter((name) => run.metrics.includes(name)),
  );
  if (!still()) return;
  const { points } = found;
  const columns = { length: points.length, repetition: points.repetition, ...points.functions };
  const label = { length: `length, ${found.unit}`, repetition: "repetition (share of three-word sequences said before)" };
  const across = columns[here.across] ? here.across : "length";
  const place = (i) => [points.step[i], points.group[i], points.index[i]];
  const link = ([step, group, index]) => linkTo({ step, group, c: index });
  const plotted = points.reward
    .map((y, i) => ({ x: columns[across][i], y, place: place(i) }))
    .filter((point) => point.x !== null && point.y !== null);
  const seen = new Set();
  const ranked = [...plotted]
    .sort((a, b) => b.y - a.y || b.x - a.x)
    .filter(({ place: [step, group] }) => !seen.has(`${step}/${group}`) && seen.add(`${step}/${group}`))
    .slice(0, 6);
  const sentence = (name) => {
    const value = found.correlations[name];
    return h("li", {}, h("a", { href: addressOf({ ...here, across: name }), text: name }), relation(value));
  };
  const evaluated = ["eval/sampled", "eval/greedy"].find((name) => (curves.values[name] || []).some((value) => value !== null));
  const moved = movedBoth(curves.values.reward, curves.values[evaluated]);
  const alike = new Map();
  for (const one of found.duplicates) {
    const says = `${one.distinct} different of ${one.size}, reward ${fmt(one.reward)}`;
    alike.set(says, [...(alike.get(says) || []), one]);
  }
  fill(
    main,
    panel(
      "Is the reward being cheated?",
      h("p", { class: "lead", text: answerOf(found.correlations, moved) }),
      h("p", {
        class: "hint",
        text:
          `${many(points.reward.length, "completion")} of steps ${found.first} to ${found.last}. A reward that can be had without ` +
          "the task shows here: longer, more repetitive or better formatted texts earn more, and the answers do not get better.",
      }),
      h(
        "form",
        {
          class: "controls",
          onsubmit: (event) => {
            event.preventDefault();
            go(Object.fromEntries(new FormData(event.target)));
          },
        },
        field("Steps from", { name: "first", type: "number", class: "short", value: found.first }),
        field("to", { name: "last", type: "number", class: "short", value: found.last }),
        ANSWERS ? null : h("button", { type: "submit", class: "main", text: "Look" }),
      ),
    ),
    h(
      "div",
      { class: "two" },
      panel(
        `Reward against ${label[across] || across}`,
        h(
          "div",
          { class: "switch", role: "group", "aria-label": "against" },
          Object.keys(columns).map((name) =>
            h("button", {
              type: "button",
              "aria-pressed": String(name === across),
              onclick: () => go({ across: name }, true),
              text: name,
            }),
          ),
        ),
        plotted.length
          ? scatter(plotted, {
              x: label[across] || across,
              y: "reward",
              choose: ([step, group, index]) => go({ view: null, step, group, c: index, across: null, first: null, last: null }),
            })
          : empty("Nothing to draw."),
        h("p", { class: "hint", text: "Click a point to read it. The best rewarded, the longest of them first:" }),
        h(
          "ul",
          { class: "links" },
          ranked.map((point) =>
            h(
              "li",
              {},
              h("a", {
                href: link(point.place),
                text:
                  `step ${point.place[0]} · group ${point.place[1]} · #${point.place[2]}: ` +
                  `reward ${fmt(point.y)}, ${across} ${fmt(point.x)}`,
              }),
            ),
          ),
        ),
      ),
      h(
        "div",
        {},
        panel("What the reward goes with", h("ul", { class: "relations" }, Object.keys(found.correlations).map(sentence))),
        evaluated
          ? panel(
              "Reward and held-out accuracy",
              h("p", {
                class: "hint",
                text: verdictOf(moved),
              }),
              h(
                "div",
                { class: "pair" },
                ["reward", evaluated].map((name) =>
                  h(
                    "figure",
                    {},
                    h("figcaption", { text: name }),
                    sparkline(name, curves.steps, curves.values[name], rangeOf([0, 1, ...(curves.values.reward || [])])),
                  ),
                ),
              ),
            )
          : null,
        panel(
          "One function without another",
          found.conflicts.length
            ? h(
                "ul",
                { class: "links" },
                found.conflicts.map((one) =>
                  h(
                    "li",
                    {},
                    `${percent(one.share)} satisfy `,
                    h("b", { text: one.high }),
                    " and not ",
                    h("b", { text: one.low }),
                    ": ",
                    one.places.map((where, i) => [
                      i ? ", " : "",
                      h("a", { href: link(where), text: `#${where[2]} of step ${where[0]}` }),
                    ]),
                  ),
                ),
              )
            : empty(
                Object.keys(points.functions).length > 1
                  ? "No function is satisfied where another is not."
                  : "There is one reward function: nothing to hold against it.",
              ),
        ),
        panel(
          "Groups that say one thing",
          found.duplicates.length
            ? h(
                "ul",
                { class: "links" },
                [...alike].map(([says, groups]) =>
                  h(
                    "li",
                    {},
                    `${says}: `,
                    groups.map((one, i) => [
                      i ? ", " : "",
                      h("a", { href: linkTo({ step: one.step, group: one.group }), text: `step ${one.step} · group ${one.group}` }),
                    ]),
                  ),
                ),
              )
            : empty("All completions of a group differ."),
          curves.values["completions/duplicates"]
            ? h(
                "figure",
                { class: "wide" },
                h("figcaption", { text: "completions/duplicates: share that repeat another of their group" }),
                sparkline("duplicates", curves.steps, curves.values["completions/duplicates"]),
              )
            : null,
        ),
      ),
    ),
  );
};

// ---------------------------------------------------------------- configuration and environment

VIEWS.config = async (main) => {
  const still = staying();
  const runs = overlaid();
  const found = await Promise.all(runs.map((run) => ask("config", { run: run.run })));
  if (!still()) return;
  const keys = [...new Set(found.flatMap((one) => Object.keys(one.config)))];
  const chosen = keys.filter((key) => found.some((one) => one.set.includes(key)));
  const plain = keys.filter((key) => !chosen.includes(key));
  const about = [...new Set(found.flatMap((one) => Object.keys(one.environment)))].filter((key) => !["versions"].includes(key));
  const versions = found.map((one) => ({ part: one.environment.versions || {} }));
  fill(
    main,
    runs.length > 1 ? await differences(runs) : null,
    panel(
      "What the recipe sets",
      found.map((one, i) => h("p", { class: "hint" }, runs.length > 1 ? `${runs[i].name}: ` : "", one.path)),
      keys.length ? configTable(runs, found, chosen, "config") : empty("A file of completions has none."),
      plain.length
        ? h(
            "details",
            {},
            h("summary", { text: `${many(plain.length, "key")} at the default` }),
            configTable(runs, found, plain, "config"),
          )
        : null,
    ),
    about.length ? panel("Environment", configTable(runs, found, about, "environment")) : null,
    versions.some((one) => Object.keys(one.part).length)
      ? panel("Versions", configTable(runs, versions, [...new Set(versions.flatMap((one) => Object.keys(one.part)))], "part"))
      : null,
  );
};
