"use strict";
// Completions: their tokens, coloured by a quantity, with every number of the token under the cursor.

const HUES = {
  plus: { light: "37,99,235", dark: "96,165,250" },
  minus: { light: "234,88,12", dark: "251,146,60" },
  violet: { light: "124,58,237", dark: "167,139,250" },
  teal: { light: "13,148,136", dark: "45,212,191" },
  pink: { light: "219,39,119", dark: "244,114,182" },
  sand: { light: "161,98,7", dark: "250,204,21" },
};

/** The quantities by key 1 to 9; the last two once a step is replayed: what they are called, what they say, how they are coloured. */
const QUANTITIES = [
  {
    id: "push",
    label: "Push",
    unit: "advantage × ratio",
    low: "less likely",
    high: "more likely",
    signed: true,
    says:
      "What the update did to each token: advantage × ratio. Blue: made more likely, orange: less likely, hatched: clipped, " +
      "its gradient was cut.",
  },
  {
    id: "logp",
    label: "Log-prob",
    unit: "nats",
    low: "surprising",
    high: "certain",
    hue: "violet",
    inverse: true,
    says: "How likely the policy found the token before the update. The stronger the colour, the greater the surprise.",
  },
  {
    id: "entropy",
    label: "Entropy",
    unit: "nats",
    low: "certain",
    high: "open",
    hue: "teal",
    says: "How open the choice was at this token. The stronger the colour, the more else it could have said.",
  },
  {
    id: "kl",
    label: "KL",
    unit: "nats, policy − reference",
    low: "reference likes it more",
    high: "policy likes it more",
    signed: true,
    says: "Log-prob under the policy minus that under the reference: where the policy has moved.",
  },
  {
    id: "mismatch",
    label: "Mismatch",
    unit: "nats, trainer − sampler",
    low: "sampler higher",
    high: "trainer higher",
    signed: true,
    says: "Log-prob by the trainer minus that by the sampler, of the same token. Only rounding, unless something is wrong.",
  },
  {
    id: "gradient",
    label: "Gradient",
    unit: "share of the group",
    low: "none",
    high: "much",
    hue: "pink",
    share: true,
    says: "Share of the group's gradient that comes from this token: |d loss / d log-prob| at the step's last update.",
  },
  {
    id: "version",
    label: "Version",
    unit: "optimizer steps",
    low: "older",
    high: "newer",
    hue: "sand",
    says: "The version of the weights that drew the token.",
  },
  {
    id: "replay",
    label: "Replay",
    unit: "share of the group",
    low: "less likely",
    high: "more likely",
    signed: true,
    share: true,
    says:
      "What the replayed update pushes, by the ratios of the step's last pass (first, if the loss reads entropies): " +
      "minus the loss's gradient by each log-prob, " +
      "as a share of the group's sum, KL included.",
  },
  {
    id: "change",
    label: "Change",
    unit: "share of the group",
    low: "pushed down more",
    high: "pushed up more",
    signed: true,
    share: true,
    says: "The replayed push less the one that the run made.",
  },
];

const theme = () =>
  document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

/** [hue, strength 0..1] of a value on a scale. */
function tint(quantity, value, [low, high]) {
  if (value === null || value === undefined) return null;
  if (quantity.signed) return [value < 0 ? "minus" : "plus", Math.min(1, Math.abs(value) / high)];
  if (quantity.inverse) return [quantity.hue, Math.min(1, value / low)];
  return [quantity.hue, high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 0];
}

const STRONGEST = 0.6;
function colour(tinted) {
  if (!tinted) return "";
  const strength = STRONGEST * Math.sqrt(tinted[1]);
  return strength < 0.015 ? "" : `rgba(${HUES[tinted[0]][theme()]},${strength.toFixed(3)})`;
}

/** The bar of the chosen quantity's scale, with its numbers. */
function scaleBar(quantity, [low, high]) {
  const stops = [];
  for (let i = 0; i <= 12; i++) stops.push(colour(tint(quantity, low + ((high - low) * i) / 12, [low, high])) || "transparent");
  const show = (value) => (quantity.share ? percent(value) : fmt(value, quantity.signed));
  return h(
    "div",
    {
      class: "scale",
      role: "img",
      "aria-label": `scale of ${quantity.label}: from ${show(low)} (${quantity.low}) to ${show(high)} (${quantity.high}), ${quantity.unit}`,
    },
    h("span", { class: "end", text: show(low) }),
    h("span", { class: "bar", style: { "background-image": `linear-gradient(90deg, ${stops.join(",")})` } }),
    h("span", { class: "end", text: show(high) }),
    h("span", { class: "unit", text: quantity.unit }),
  );
}

const FIRST = 280;
const CHUNK = 600;

/** A completion as a card.  `context`: what `more` needs (run, step, group, kind), the group's scales, the search to mark. */
class Card {
  constructor(completion, context) {
    this.completion = completion;
    // A report says a number that is the same for all tokens once.
    for (const [name, values] of Object.entries(completion.columns || {}))
      if (values.length === 1) completion.columns[name] = Array(completion.tokens.length).fill(values[0]);
    this.context = context;
    this.shown = 0;
    this.spans = [];
    this.at = -1;
    this.text = h("div", {
      class: "text",
      tabindex: 0,
      role: "group",
      "aria-label": `text of completion ${completion.index}; arrow keys go from token to token`,
      dir: "auto",
    });
    this.text.addEventListener("keydown", (event) => this.walk(event));
    this.text.addEventListener("scroll", () => this.nearEnd() && this.grow());
    this.text.addEventListener("mousemove", (event) => this.point(event));
    this.text.addEventListener("mouseleave", () => hideTip());
    this.text.addEventListener("blur", () => this.leave());
    if (completion.episode && completion.tokens) this.places = episodeOf(completion, this.text);
    this.element = this.frame();
    this.grow(FIRST);
  }

  frame() {
    const { completion, context } = this;
    const rewards = context.rewards.filter((value) => value !== null);
    const low = Math.min(...rewards, 0),
      high = Math.max(...rewards, 1e-9);
    const share = completion.reward === null ? 0 : (completion.reward - low) / Math.max(high - low, 1e-9);
    const cut = /length|truncat|max/i.test(completion.finish);
    const ended = ENDINGS[completion.finish] || (cut ? "truncated" : completion.finish);
    const warned = cut || ["turns", "deadline", "error"].includes(completion.finish);
    const turns = completion.episode?.turns || [];
    const world = turns.reduce((sum, turn) => sum + (turn.seconds || 0), 0);
    const advantage = completion.advantage;
    const facts = [
      advantage !== null &&
        h("span", {
          class: advantage > 0 ? "fact up" : advantage < 0 ? "fact down" : "fact",
          title: "advantage: how far above its siblings' its reward is",
          text: `advantage ${fmt(advantage, true)}`,
        }),
      h("span", { class: "fact", text: many(completion.length, completion.unit.slice(0, -1)) }),
      completion.finish && h("span", { class: warned ? "fact warn" : "fact", text: ended }),
      turns.length > 0 && h("span", { class: "fact", text: many(turns.length, "turn") }),
      world > 0 &&
        h("span", {
          class: "fact",
          title: "time that tools and the environment took to answer",
          text: `${turns.some((turn) => turn.calls.length) ? "tools" : "environment"} ${shortTime(world)}`,
        }),
    ];
    const functions = Object.entries(completion.rewards);
    const parts =
      functions.length > 1
        ? h(
            "div",
            { class: "functions" },
            functions.map(([name, value]) => h("span", { class: "chip" }, h("i", { text: name }), fmt(value))),
          )
        : null;
    const place = addressOf({ ...here, c: completion.index });
    const equal = completion.equal?.length || 1;
    return h(
      "article",
      {
        class: "card",
        id: `c${context.side || ""}${completion.index}`,
        data: { index: completion.index },
        "aria-label": `completion ${completion.index}, reward ${fmt(completion.reward)}`,
      },
      h(
        "header",
        {},
        h(
          "div",
          { class: "reward-line" },
          h("span", { class: "reward", text: fmt(completion.reward) }),
          h("span", { class: "meter", "aria-hidden": "true" }, h("span", { style: { width: `${100 * share}%` } })),
          h("a", {
            class: "number",
            href: place,
            title: equal > 1 ? `the same, token for token: #${completion.equal.join(", #")}` : "link to this completion",
            text: equal > 1 ? `#${completion.index} × ${equal}` : `#${completion.index}`,
          }),
        ),
        h("div", { class: "facts" }, facts),
        parts,
      ),
      completion.messages ? conversation(completion.messages) : this.text,
    );
  }

  nearEnd() {
    return this.text.scrollTop + this.text.clientHeight > this.text.scrollHeight - 240;
  }

  /** Show more: what is here already, else what the server has. */
  async grow(count = CHUNK) {
    const { completion } = this;
    if (this.busy) return;
    if (completion.messages) return;
    this.note?.remove();
    if (!completion.tokens) {
      if (this.shown === 0) this.text.append(...marked(completion.text, this.context.wanted));
      this.shown = completion.text.length;
    } else {
      const end = Math.min(this.shown + count, completion.tokens.length);
      const special = new Set(completion.special),
        untrained = new Set(completion.untrained);
      const fresh = document.createDocumentFragment();
      for (let i = this.shown; i < end; i++)
        (this.places ? placeOf(this.places, i) : fresh).append(this.span(i, special.has(i), untrained.has(i)));
      this.text.append(fresh);
      this.shown = end;
      this.paint();
    }
    if (this.shown < completion.length) {
      const rest = completion.length - this.shown;
      this.note = h("button", {
        class: "more",
        type: "button",
        text: `${many(rest, completion.unit.slice(0, -1))} more`,
        onclick: () => this.grow(),
      });
      this.text.append(this.note);
      if (this.shown >= (completion.tokens ? completion.tokens.length : completion.text.length)) await this.fetchMore();
    }
  }

  async fetchMore() {
    const { completion, context } = this;
    this.busy = true;
    try {
      const { run, step, group, kind } = context;
      const more = await ask("more", { run, step, group, kind, index: completion.index, begin: this.shown });
      if (more.tokens) {
        const offset = completion.tokens.length;
        completion.tokens.push(...more.tokens);
        completion.ids.push(...more.ids);
        completion.special.push(...more.special.map((i) => i + offset));
        completion.untrained.push(...more.untrained.map((i) => i + offset));
        for (const [name, values] of Object.entries(more.columns)) completion.columns[name]?.push(...values);
      } else {
        this.note.remove();
        this.text.append(...marked(more.text, context.wanted));
        completion.text += more.text;
        this.shown = completion.text.length;
        if (this.shown < completion.length) this.text.append(this.note);
      }
    } catch (error) {
      this.note.textContent = `${this.note.textContent}: ${error.message}`;
      this.note.disabled = true;
    }
    this.busy = false;
  }

  span(i, special, untrained) {
    const { completion } = this;
    const text = completion.tokens[i];
    const blanks = here.blanks === "1";
    const classes = ["t"];
    if (special) classes.push("special");
    if (untrained) classes.push("untrained");
    if (completion.columns.clipped && completion.columns.clipped[i] > 0) classes.push("clipped");
    const span = h("span", { class: classes.join(" "), data: { i } });
    if (special) span.append(...(blanks ? visible(text) : ["∎"]));
    else if (text === "") span.append("‥");
    else span.append(...visible(text, blanks));
    this.spans.push(span);
    return span;
  }

  /** Colour what is shown by the chosen quantity. */
  paint() {
    const quantity = QUANTITIES.find((one) => one.id === this.context.by());
    const scale = quantity && this.context.scales[quantity.id];
    const values = scale && this.completion.columns?.[quantity.id];
    this.element.classList.toggle("shows-clipped", quantity?.id === "push" || quantity?.id === "gradient");
    const pushes = ["push", "gradient", "replay", "change"].includes(quantity?.id); // nothing pushes what the policy did not write
    this.spans.forEach((span, i) => {
      span.style.backgroundColor =
        values && !(pushes && span.classList.contains("untrained")) ? colour(tint(quantity, values[i], scale)) : "";
    });
  }

  point(event) {
    const span = event.target.closest?.(".t");
    if (span) showTip(this, Number(span.dataset.i), span);
    else hideTip();
  }

  walk(event) {
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      event.preventDefault();
      event.stopPropagation();
      const step = event.key === "ArrowRight" ? 1 : -1;
      this.spans[this.at]?.classList.remove("at");
      this.at = Math.max(0, Math.min(this.spans.length - 1, this.at + step));
      const span = this.spans[this.at];
      if (!span) return;
      span.classList.add("at");
      for (let fold = span.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
      span.scrollIntoView({ block: "nearest" });
      showTip(this, this.at, span);
      if (this.at > this.spans.length - 20) this.grow();
    } else if (event.key === "Escape") {
      this.leave();
    }
  }

  leave() {
    this.spans[this.at]?.classList.remove("at");
    hideTip();
  }
}

const ENDINGS = {
  eos: "ended",
  stop: "stop string",
  tool_calls: "called tools",
  done: "the environment ended it",
  turns: "too many turns",
  deadline: "out of time",
  error: "the environment failed",
};
const OPEN_TURNS = 3,
  LONG_ANSWER = 300;

/** An episode's turns as folds in `text`; returns where its tokens go: [first token, element], ascending. */
function episodeOf(completion, text) {
  const { turns, branches } = completion.episode;
  const places = [];
  const slowest = Math.max(...turns.map((turn) => turn.seconds || 0), 1e-9);
  const splits = (begin, end, another) =>
    branches
      .filter((one) => one.begin >= begin && one.begin < end)
      .map((one) =>
        h("span", {
          class: another ? "fact" : "fact warn",
          title:
            "from here on the tokens were drawn behind other ids than those before them: " +
            "another conversation begins, or the chat template rewrote the past",
          text: `${another ? "another conversation" : "split"}: drawn behind ${many(one.context, "token")} of its own`,
        }),
      );
  const contexts = (begin, end) =>
    branches
      .filter((one) => one.begin >= begin && one.begin < end && one.text)
      .map((one) =>
        h(
          "details",
          { class: "turn observed" },
          h("summary", {}, h("b", { text: "drawn behind" }), h("span", { text: many(one.context, "token") })),
          h("div", { class: "said", dir: "auto" }, ...visible(one.text)),
        ),
      );
  const unread = (place) => (branches.some((one) => one.begin === place) ? "read behind other ids" : "not read by the policy");
  const agents = new Set(turns.map((turn) => turn.agent)).size;
  const observed = (begin, end, turn) => {
    if (end <= begin && !turn?.answer) return null;
    const said = h("div", { class: "said", dir: "auto" });
    if (end > begin) places.push([begin, said]);
    else said.append(...visible(turn.answer));
    return h(
      "details",
      { class: "turn observed", open: end - begin <= LONG_ANSWER },
      h(
        "summary",
        {},
        h("b", { text: turn ? "answer" : "opening" }),
        h("span", { text: end > begin ? many(end - begin, "token") : unread(end) }),
        turn?.truncated ? h("span", { class: "fact warn", text: "cut to the limit" }) : null,
      ),
      said,
    );
  };
  if (completion.opening) {
    const said = h("div", { class: "said environment", dir: "auto" }, ...visible(completion.opening));
    text.append(h("div", { class: "turn observed" }, h("b", { text: "added to the prompt by reset" }), said));
  }
  if (turns.length && turns[0].begin > 0) text.append(observed(0, turns[0].begin, null));
  turns.forEach((turn, i) => {
    const said = h("div", { class: "said", dir: "auto" });
    if (turn.end > turn.begin) places.push([turn.begin, said]);
    const next = i + 1 < turns.length ? turns[i + 1].begin : completion.length;
    const warned = ["length", "turns", "deadline", "error"].includes(turn.finish);
    text.append(
      h(
        "details",
        { class: "turn own", open: turns.length <= OPEN_TURNS || i === turns.length - 1 },
        h(
          "summary",
          {},
          h("b", { text: `turn ${i + 1}` }),
          h("span", { text: many(turn.end - turn.begin, "token") }),
          turn.finish
            ? h("span", {
                class: warned ? "fact warn" : "fact",
                text: ENDINGS[turn.finish] || (turn.finish === "length" ? "truncated" : turn.finish),
              })
            : null,
          turn.reward !== null ? h("span", { class: "fact", text: `reward ${fmt(turn.reward)}` }) : null,
          agents > 1 ? h("span", { class: "fact", text: `agent ${turn.agent + 1}` }) : null,
          turn.side
            ? h("span", {
                class: "fact",
                title: "a conversation beside the work, such as a title: it is served, and its tokens are not trained",
                text: "side conversation, not trained",
              })
            : null,
          (turn.wishes || []).map((wish) =>
            h("span", { class: "fact", title: "the agent asked for it, and it was not served", text: `without ${wish}` }),
          ),
          splits(turn.begin, next, turn.side || turns[i - 1]?.side),
        ),
        contexts(turn.begin, next),
        said,
        turn.calls.map(callOf),
        turn.seconds > 0 ? timeOf(turn, slowest) : null,
        observed(turn.end, next, turn),
      ),
    );
  });
  if (completion.episode.left) text.append(...leftBehind(completion.episode.left));
  return places.sort((a, b) => a[0] - b[0]);
}

/** What an episode left behind: the files that it changed, and the end of what was printed. */
function leftBehind(left) {
  const folds = left.files.map(([name, text]) => (text === null ? [`file ${name} is gone`, ""] : [`file ${name}`, text]));
  if (left.output) folds.push(["printed at the end", left.output]);
  if (!left.files.length) folds.unshift(["no file was changed", ""]);
  return folds.map(([name, text]) =>
    h(
      "details",
      { class: "turn left", open: text.length < 1000 },
      h("summary", {}, h("b", {}, ...visible(name))),
      h("pre", {}, ...visible(text)),
    ),
  );
}

/** The element that token `i` goes to. */
function placeOf(places, i) {
  let found = places[0][1];
  for (const [begin, element] of places)
    if (begin <= i) found = element;
    else break;
  return found;
}

/** A call of a tool: what was asked, what came of it. */
function callOf(call) {
  const answered = call.seconds > 0 || call.result || call.failure;
  return h(
    "div",
    { class: call.failure ? "call failed" : "call" },
    h(
      "div",
      { class: "line" },
      h("b", {}, ...visible(call.name || "a call that cannot be read")),
      answered ? null : h("span", { class: "soft", text: "no answer was read" }),
      answered && call.seconds !== null ? h("span", { class: "soft", text: shortTime(call.seconds) }) : null,
      call.failure ? h("span", { class: "fact warn", text: call.failure }) : null,
    ),
    h("pre", {}, ...visible(call.arguments)),
    call.result
      ? h(
          "details",
          { open: call.result.length < 200 },
          h("summary", { text: "result" }),
          h("pre", { class: "soft" }, ...visible(call.result)),
        )
      : null,
  );
}

/** Where the time between a turn and its answer went: each call, and what is left. */
function timeOf(turn, slowest) {
  const calls = turn.calls.map((call) => [call.name, call.seconds || 0]);
  const left = Math.max(0, turn.seconds - calls.reduce((sum, [, seconds]) => sum + seconds, 0));
  if (!calls.length) return h("div", { class: "took soft", text: `environment ${shortTime(turn.seconds)}` });
  const parts = [...calls, ["else", left]].filter(([, seconds]) => seconds > 0.005 * turn.seconds);
  const label = parts.map(([name, seconds]) => `${name} ${shortTime(seconds)}`).join(", ");
  return h(
    "div",
    { class: "took", title: label },
    h("span", { class: "soft", text: shortTime(turn.seconds) }),
    h(
      "span",
      { class: "bar", role: "img", "aria-label": `where ${fmt(turn.seconds)} s went: ${label}` },
      parts.map(([name, seconds], i) =>
        h("span", {
          class: name === "else" ? "rest" : i % 2 ? "odd" : "",
          style: { width: `${(100 * seconds) / Math.max(slowest, turn.seconds)}%` },
        }),
      ),
    ),
    h("span", { class: "soft parts" }, ...visible(label)),
  );
}

/** All that is known of a token, beside it. */
function showTip(card, i, span) {
  const { completion, context } = card;
  const value = (id) => completion.columns[id]?.[i];
  const rows = QUANTITIES.filter((one) => completion.columns[one.id]).map((one) =>
    h(
      "tr",
      { class: one.id === context.by() ? "chosen" : "" },
      h("th", { text: one.label }),
      h("td", {
        text: one.share ? percent(value(one.id)) : one.id === "version" ? String(value(one.id)) : fmt(value(one.id), one.signed),
      }),
    ),
  );
  const clipped = value("clipped");
  const extra = [
    value("advantage") !== undefined &&
      h("tr", {}, h("th", { text: "Advantage" }), h("td", { text: fmt(value("advantage"), true) })),
    value("ratio") !== undefined && h("tr", {}, h("th", { text: "Ratio" }), h("td", { text: fmt(value("ratio")) })),
    clipped > 0 &&
      h("tr", {}, h("th", { text: "Clipped" }), h("td", { text: clipped >= 0.999 ? "yes" : `${percent(clipped)} of updates` })),
    completion.untrained.includes(i) &&
      h("tr", {}, h("th", { text: "Not trained" }), h("td", { text: "the policy did not write it" })),
  ];
  const tip = fill(
    $("tip"),
    h(
      "div",
      { class: "token" },
      h("b", {}, ...visible(completion.tokens[i] || "part of a character", true)),
      h("span", { text: `token ${completion.begin + i} · id ${completion.ids[i]}` }),
    ),
    h("table", {}, h("tbody", {}, rows, extra)),
  );
  tip.hidden = false;
  const box = span.getBoundingClientRect(),
    own = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - own.width - 8));
  const top = box.bottom + own.height + 10 < innerHeight ? box.bottom + 6 : Math.max(8, box.top - own.height - 6);
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

function hideTip() {
  $("tip").hidden = true;
}

/** Messages as turns that fold: what the model said open, what it was told grey, tool calls with their arguments. */
function conversation(messages) {
  const turns = messages.map((message, i) => {
    const role = String(message.role || "text");
    const said =
      typeof message.content === "string"
        ? message.content
        : Array.isArray(message.content)
          ? message.content.map((part) => part.text ?? JSON.stringify(part)).join("\n")
          : message.content
            ? JSON.stringify(message.content)
            : "";
    const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
    const own = role === "assistant";
    return h(
      "details",
      { class: own ? "turn own" : "turn observed", open: own || said.length < 400 },
      h(
        "summary",
        {},
        h("b", { text: role }),
        h("span", {
          text: `turn ${i + 1} · ${many(said.length, "character")}${calls.length ? " · " + many(calls.length, "tool call") : ""}`,
        }),
      ),
      h(
        "div",
        { class: "said", dir: "auto" },
        ...visible(said.slice(0, 20000)),
        said.length > 20000 ? h("i", { text: ` … ${many(said.length - 20000, "character")} more` }) : null,
      ),
      calls.map((call) => {
        const made = call.function || call;
        return h(
          "div",
          { class: "call" },
          h("b", { text: String(made.name || "tool") }),
          h(
            "pre",
            {},
            ...visible(typeof made.arguments === "string" ? made.arguments : JSON.stringify(made.arguments ?? made, null, 1)),
          ),
        );
      }),
    );
  });
  return h("div", { class: "text conversation", tabindex: 0, role: "group", "aria-label": "conversation" }, turns);
}
