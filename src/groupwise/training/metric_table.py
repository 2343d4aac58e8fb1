"""Every metric that a run writes, by name: unit, formula, meaning, its usual range, and when it is
a warning.

Terminal, viewer, reports and `docs/metrics.md` take it from here, and tests hold every key of a
real `metrics.jsonl` against it.  A new metric needs a row here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RECENT = 10
"""Steps whose mean a flag looks at."""
MOST = 0.8
"""Share of the groups from which on they are most of them."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A warning for readers who do not know the metric: what its value means, and what to do about
    it.
    """

    title: str
    meaning: str
    """With `{share}` or `{value}`: the metric's mean over the last steps."""
    remedy: str
    above: float | None = None
    """The warning is raised by a mean above this bound ..."""
    below: float | None = None
    """... or below this one; without a bound by NaN."""
    solved: bool = False
    """It also comes of success: where more than half of the groups are solved it is not raised."""
    after: int = 1
    """Steps with the metric before which it is not raised: what is learnt from nothing takes its
    time.
    """

    def wrong(self, value: float) -> bool:
        """True if a mean raises the warning."""
        if self.above is None and self.below is None:
            return math.isnan(value)
        return (
            value > self.above
            if self.above is not None
            else self.below is not None and value < self.below
        )

    def said(self, value: float) -> str:
        """`meaning` with the metric's value in it."""
        return self.meaning.format(
            share=f"{value:.0%}", value="NaN" if math.isnan(value) else f"{value:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Metric:
    """One row: a metric, or a family of metrics whose names differ in the words written in capitals
    (`rewards/NAME/mean`).
    """

    name: str
    unit: str
    formula: str
    meaning: str
    healthy: str = ""
    """A rule of thumb for reasoning tasks with a checker; empty where there is none."""
    label: str = ""
    """What pages call it where it stands among a run's first figures, or its work."""
    column: str = ""
    """What the terminal's progress line calls it."""
    flag: Flag | None = None

    def shown(self, value: float) -> str:
        """A value as the terminal shows it, by the unit.

        >>> Metric("", "share", "", "").shown(0.25), Metric("", "nats", "", "").shown(0.25)
        ('25%', '0.250')
        """
        match self.unit:
            case "share":
                return f"{value:.0%}"
            case "tokens":
                return f"{value:.0f}"
            case "tokens / second":
                return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"
        return f"{value:.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"

    def matches(self, key: str) -> bool:
        """True if `key` is this metric, or one of this family.

        >>> Metric("rewards/NAME/mean", "", "", "").matches("rewards/accuracy/mean")
        True
        """
        pattern = re.sub(r"NAME|VALUE", ".+", re.escape(self.name))
        pattern = re.sub(r"[A-Z]{2,}|\b[NK]\b", "[^/]+", pattern)
        return re.fullmatch(pattern, key) is not None


@dataclass(frozen=True, slots=True)
class Section:
    """Metrics of one subject, and when they are written."""

    title: str
    when: str
    metrics: tuple[Metric, ...]


METRICS: tuple[Section, ...] = (
    Section(
        "The step",
        "Every line.",
        (
            Metric(
                "step", "steps", "counts from 1", "A rollout and its updates, or one batch of rows."
            ),
            Metric("wall", "seconds", "time since 1970", "Time of writing."),
            Metric(
                "loss",
                "-",
                "mean over updates of sum(weight x loss)",
                "The objective. On-policy it is about 0 and no measure"
                " of progress; for SFT, DPO and reward models it does.",
                label="Loss",
                column="loss",
            ),
            Metric(
                "loss/TERM",
                "-",
                "mean over updates of sum(weight x term)",
                "An extra term of log-probs of your own row.",
            ),
            Metric(
                "grad_norm",
                "-",
                "|g|, before clipping; mean over updates",
                "Norm of the gradient.",
                "no spikes",
                label="Gradient norm",
            ),
            Metric("lr", "-", "of the last update", "Scheduled learning rate."),
            Metric(
                "skipped_updates",
                "updates",
                "count",
                "Skipped updates: the gradient was not finite.",
                "0",
                flag=Flag(
                    "Updates were skipped",
                    "{value} updates per step were skipped, because a loss or a gradient was not"
                    " finite.",
                    "Lower optimizer.lr; look at the rewards' range.",
                    above=0,
                ),
            ),
            Metric(
                "tokens/trained",
                "tokens",
                "sum over updates of tokens with weight != 0",
                "Tokens with a gradient.",
                label="Tokens trained",
                flag=Flag(
                    "Nothing is trained",
                    "Rewards are equal within every group, or every completion is truncated and"
                    " masked.",
                    "Too hard: easier prompts, a better start (SFT), partial rewards. Too easy:"
                    " harder prompts. With truncated completions masked: raise"
                    " rollout.max_new_tokens, or set group.truncated: keep.",
                    below=1,
                    solved=True,
                ),
            ),
            Metric(
                "tokens/per_second",
                "tokens / second",
                "tokens sampled (or read) / seconds of the step",
                "Speed of the whole step.",
                column="tok/s",
            ),
            Metric(
                "time/PHASE",
                "seconds",
                "wall time",
                "Of the phases `rollout`, `signals` (by reference, critic, teacher), `update`,"
                " `sync` or `data`.",
            ),
        ),
    ),
    Section(
        "Rewards",
        "Online objectives with reward functions. r_i is the combined reward of completion i, G the"
        " group size.",
        (
            Metric(
                "reward",
                "yours",
                "mean_i r_i",
                "Mean combined reward of scored completions.",
                "rises, with noise",
                label="Reward",
                column="reward",
                flag=Flag(
                    "Nothing could be scored",
                    "Every reward function returned None for every completion.",
                    "Try the reward functions on the completions: groupwise score.",
                ),
            ),
            Metric(
                "reward_std",
                "yours",
                "mean over groups of std(r_1 ... r_G), G - 1 in the denominator",
                "Spread of the rewards inside a group.",
                "above 0; falls as the task is learnt",
            ),
            Metric(
                "rewards/NAME/mean",
                "yours",
                "mean over completions",
                "One reward function, without None.",
            ),
            Metric(
                "rewards/NAME/none",
                "share",
                "completions with None / completions",
                "Share of None, if there is any.",
                "small, or as intended",
            ),
            Metric(
                "groups/dead",
                "share",
                "1 - groups with a trained token whose advantage is not 0 / prompts drawn",
                "Groups without a gradient: equal rewards, or all masked. With pass rate p expect"
                " p^G + (1 - p)^G. TRL's `frac_reward_zero_std` counts only equal rewards.",
                "below 0.5",
                label="Dead groups",
                column="dead",
                flag=Flag(
                    "Most groups are dead",
                    "{share} of the groups have no gradient: all their rewards are equal, or all"
                    " completions are masked.",
                    "Too hard: easier prompts, a better start (SFT), a larger group.group_size,"
                    " partial rewards. Too easy: harder prompts. Half of both: objective dapo, or"
                    " group.dead_groups: refill.",
                    above=MOST,
                    solved=True,
                ),
            ),
            Metric(
                "groups/solved",
                "share",
                "groups whose completions are all right / groups with a verdict",
                "Right by the recipe's verdict, if there is one.",
                "not near 1",
                flag=Flag(
                    "Most groups are solved",
                    "Every completion is right in {share} of the groups: there is little left to"
                    " learn from these prompts.",
                    "Stop here, or go on with harder prompts.",
                    above=MOST,
                ),
            ),
            Metric(
                "groups/failed",
                "share",
                "groups without a right completion / groups with a verdict",
                "By the same verdict.",
                "not near 1",
                flag=Flag(
                    "Most groups hold no right completion",
                    "No completion is right in {share} of the groups.",
                    "Easier prompts, a better start (SFT), a larger group.group_size, partial"
                    " rewards.",
                    above=MOST,
                ),
            ),
            Metric(
                "log/NAME", "yours", "mean over calls", "Logged by reward functions (`log_metric`)."
            ),
            Metric("prompts", "prompts", "count", "Prompts drawn, with refills."),
            Metric(
                "prompts/skipped",
                "prompts",
                "count since the start",
                "Skipped visits (`data.curriculum`, `data.retire`).",
            ),
            Metric("prompts/retired", "prompts", "count", "Removed prompts (`data.retire`)."),
        ),
    ),
    Section(
        "Completions",
        "Online objectives.",
        (
            Metric(
                "completions/mean_length",
                "tokens",
                "mean_i n_i: sampled tokens, with EOS",
                "Tokens of a completion.",
                "no steady growth",
                label="Length",
                column="length",
            ),
            Metric("completions/min_length", "tokens", "min_i n_i", "The shortest."),
            Metric("completions/max_length", "tokens", "max_i n_i", "The longest."),
            Metric(
                "completions/mean_terminated_length",
                "tokens",
                "mean over completions that are not truncated",
                "Length of completions that ended.",
            ),
            Metric(
                "completions/clipped_ratio",
                "share",
                "truncated completions / completions",
                "Share truncated at `rollout.max_new_tokens` (TRL's name).",
                "below 0.1",
                label="Truncated",
                flag=Flag(
                    "Most completions are truncated",
                    "{share} of the completions reach the length limit.",
                    "Raise rollout.max_new_tokens; check that the end token can be sampled"
                    " (groupwise check); reward stopping (soft_overlong).",
                    above=0.5,
                ),
            ),
            Metric(
                "completions/duplicates",
                "share",
                "1 - distinct completions / completions",
                "Share that repeats another completion of its group.",
                "small, unless answers are short",
                flag=Flag(
                    "Most completions of a group are equal",
                    "{share} of the completions repeat another one of their group, token by token.",
                    "The policy has collapsed, or rollout.temperature is too low.",
                    above=0.8,
                    solved=True,
                ),
            ),
            Metric(
                "entropy",
                "nats / token",
                "mean_t of -log p(sampled token)",
                "Sampled estimate of the policy's entropy at the temperature.",
                "falls slowly, not to 0",
                label="Entropy",
                column="entropy",
                flag=Flag(
                    "The policy no longer explores",
                    "Its entropy is {value} nats: it is certain of nearly every token.",
                    "Lower optimizer.lr, stop earlier, clip higher (dapo), or set"
                    " group.entropy_bonus.",
                    below=0.01,
                    solved=True,
                ),
            ),
            Metric(
                "entropy_bonus",
                "-",
                "c of Skywork-OR1's rule, at the last update",
                "Coefficient of the bonus with `group.entropy_target`.",
                "at its bound only for a while",
            ),
            Metric(
                "tokens/sampled",
                "tokens",
                "sum_i n_i",
                "Sampled tokens of the kept groups.",
                label="Tokens sampled",
            ),
            Metric(
                "tokens/discarded",
                "tokens",
                "tokens of groups sampled for the step and not kept",
                "Discarded by refilling dead groups; not written for rollouts ahead.",
            ),
        ),
    ),
    Section(
        "Episodes",
        "Online objectives in environments, or with tools. Means are over episodes.",
        (
            Metric("episodes/turns", "turns", "mean", "Turns of an episode."),
            Metric(
                "episodes/answer_tokens",
                "tokens",
                "mean",
                "Tokens of answers of tools and environments.",
            ),
            Metric(
                "episodes/side_calls",
                "turns",
                "mean",
                "Turns of side conversations, which are served and not trained.",
            ),
            Metric(
                "episodes/wishes/NAME",
                "turns",
                "mean",
                "Turns whose client asked for what is not offered: `tool_choice`, `web_search`.",
            ),
            Metric(
                "episodes/splits",
                "places",
                "mean",
                "Branches: the chat template rewrote earlier turns.",
                "0 if the template keeps earlier turns",
            ),
            Metric(
                "episodes/truncated",
                "share",
                "episodes that a limit ended / episodes",
                "Ended by a limit of tokens, turns or time.",
                "below 0.1",
            ),
            Metric(
                "episodes/errors",
                "share",
                "episodes that failed / episodes",
                "Failed environments and harnesses.",
                "0",
            ),
            Metric("episodes/tool_calls", "calls", "mean", "Calls of tools in an episode."),
            Metric(
                "episodes/tool_failures",
                "share",
                "failed calls / calls",
                "Calls that failed.",
                "falls",
            ),
            Metric(
                "episodes/tool_failures/NAME",
                "share",
                "failed calls of this kind / calls",
                "By kind: `unreadable`, `unknown`, `arguments`, `exception`, `timeout`.",
            ),
        ),
    ),
    Section(
        "The policy and how far an update moved it",
        "Online objectives. l, old, b, ref: log-prob of a token under the policy, the old policy"
        " (before the step), the sampler, the reference; rho = exp(l - old), at the algorithm's"
        " level (token or completion). Means are over trained tokens of all updates of the step.",
        (
            Metric(
                "progress",
                "-",
                "mean_t(A_t l_t)",
                "The gradient raises it. Compare it within a step, not between runs.",
            ),
            Metric(
                "ratio/mean", "-", "mean rho", "Importance ratio.", "1 with one update per rollout"
            ),
            Metric("ratio/min", "-", "min rho", "The smallest ratio."),
            Metric("ratio/max", "-", "max rho", "The largest ratio."),
            Metric(
                "ratio/kl",
                "nats / token",
                "mean(rho - 1 - log rho)",
                "Estimate of KL(old || policy).",
                "below 0.05",
                label="Off-policy KL",
            ),
            Metric(
                "ratio/ess",
                "share",
                "(sum rho)^2 / (N sum rho^2)",
                "Effective sample size; 1 when on-policy.",
                "above 0.9",
            ),
            Metric(
                "clip/low",
                "share",
                "tokens with rho < 1 - low and A < 0 / tokens",
                "Gradient cut at the lower bound.",
                "below 0.1",
            ),
            Metric(
                "clip/high",
                "share",
                "tokens with rho > 1 + high and A > 0 / tokens",
                "Gradient cut at the upper bound.",
                "below 0.1",
            ),
            Metric(
                "off_policy/dropped",
                "share",
                "tokens of completions with A < 0 and mean_t(b - l) > delta / tokens",
                "Tokens left out by `group.off_policy_delta`.",
                "below 0.2",
            ),
            Metric(
                "kl",
                "nats / token",
                "mean of the estimator `group.kl`, first pass",
                "KL to the reference, with `group.beta`. Without `group.kl`, a KL in the reward"
                " is k1.",
                "grows slowly",
                label="KL to reference",
                column="kl",
            ),
            Metric("kl/max", "nats", "max of the estimator", "Largest token."),
            Metric(
                "kl/guarded",
                "tokens",
                "count of |ref - l| > 20",
                "Tokens beyond 20 nats, where a tangent replaces the exponential.",
                "0",
                flag=Flag(
                    "Tokens are far from the reference",
                    "{value} tokens per step are 20 nats or more from the reference.",
                    "Lower optimizer.lr, or raise group.beta.",
                    above=0,
                ),
            ),
        ),
    ),
    Section(
        "Critic and teacher",
        "PPO, and objectives with a teacher. V: the critic's value before this step, R: its"
        " target.",
        (
            Metric("value/mean", "yours", "mean V", "Mean value, of completions with a reward."),
            Metric("value/return", "yours", "mean R", "Mean target.", "near `value/mean`"),
            Metric(
                "value/loss", "yours^2", "mean (V - R)^2 / 2", "Error of the critic, unclipped."
            ),
            Metric(
                "value/explained",
                "share",
                "1 - Var(R - V) / Var(R)",
                "Variance of the returns that the critic explains.",
                "above 0 and rising",
                flag=Flag(
                    "The critic explains nothing",
                    "Its values explain {value} of the variance of the returns.",
                    "Raise or lower critic.lr, train the critic first (critic.pretrain), or give it"
                    " a separate backbone (critic.path).",
                    below=0.01,
                    solved=True,
                    after=20,
                ),
            ),
            Metric(
                "teacher/kl",
                "nats / token",
                "mean(l - log p_teacher) over drawn tokens",
                "Estimate of KL(policy || teacher), for a teacher that scores only sampled tokens.",
                "falls",
            ),
        ),
    ),
    Section(
        "Work",
        "Every step of an online run. m: tokens of a prompt.",
        (
            Metric(
                "tokens/shared",
                "tokens",
                "sum over groups of (G - 1) x m",
                "Prompt tokens that sharing saves.",
                label="Tokens shared",
            ),
            Metric(
                "tokens/dead",
                "tokens",
                "count",
                "Tokens of completions that no update trained.",
                "below half of `tokens/sampled`",
                label="Tokens dead",
            ),
            Metric(
                "tokens/recomputed",
                "tokens",
                "count",
                "Completion tokens computed again: scoring before the updates,"
                " gradient checkpointing.",
                label="Tokens recomputed",
            ),
            Metric(
                "flops/per_second",
                "FLOP / second",
                "FLOPs of the step's models / seconds of the step / processes",
                "Sampling, updates, reference, critic and teacher, without recomputation. Divide by"
                " your device's peak for the utilisation (MFU). Not for mixtures of experts.",
                label="FLOPs per second",
            ),
        ),
    ),
    Section(
        "Sampler against trainer",
        "Online objectives. At the first update after a rollout both compute the same"
        " probabilities, up to rounding.",
        (
            Metric(
                "mismatch/mean",
                "nats",
                "mean |l - b|",
                "Mean difference of the log-probs.",
                "1e-5 in float32, 1e-2 in bfloat16",
            ),
            Metric(
                "mismatch/max",
                "nats",
                "max |l - b|",
                "Largest difference between sampled and scored log-probs.",
                "below 0.1",
                label="Sampler mismatch",
                flag=Flag(
                    "Sampler and trainer disagree",
                    "Sampler and trainer differ by {value} nats for the same token and weights;"
                    " rounding is 0.00001 to 0.01.",
                    "Run groupwise check RECIPE.",
                    above=0.1,
                ),
            ),
            Metric(
                "mismatch/kl",
                "nats / token",
                "mean(exp(l - b) - 1 - (l - b))",
                "Estimate of KL(sampler || trainer).",
            ),
            Metric(
                "mismatch/bounded",
                "share",
                "tokens whose weight exp(l - b) was cut / tokens",
                "With a [correction](vllm.md#what-is-checked).",
                "0 in float32, below 0.01",
            ),
            Metric(
                "staleness/mean",
                "updates",
                "mean(version now - version that drew the token)",
                "Age of sampled tokens ([rollouts ahead](vllm.md#rollouts-ahead-of-training)).",
            ),
            Metric(
                "staleness/max",
                "updates",
                "max of the same",
                "Oldest token.",
                "at most `ahead` x updates of a step",
            ),
            Metric(
                "staleness/versions",
                "versions",
                "mean over completions",
                "Versions of the weights in a completion.",
            ),
            Metric("staleness/versions_max", "versions", "max over completions", "The most."),
        ),
    ),
    Section(
        "Servers",
        "With vLLM servers: those that the first process sees at the end of a step.",
        (
            Metric(
                "servers/alive",
                "servers",
                "count",
                "Servers that get requests ([pools](scaling.md#a-pool-of-servers)).",
                "all that are named",
                label="Servers alive",
            ),
            Metric(
                "servers/prefix_hits",
                "share",
                "prompt tokens found in the prefix cache / prompt tokens",
                "Work that the servers' prefix caches save. The turns of a conversation share"
                " their beginning.",
                label="Prefix-cache hits",
            ),
            Metric(
                "servers/retries",
                "requests",
                "count",
                "Requests that were sent again: a server was lost, was busy, or had older weights.",
                "0",
                label="Requests sent again",
            ),
            Metric(
                "servers/version/NAME",
                "updates",
                "optimizer steps of its weights",
                "Version with which the server at the address NAME samples.",
            ),
        ),
    ),
    Section(
        "Several processes",
        "With more than one process.",
        (
            Metric(
                "ranks/imbalance",
                "-",
                "max positions of a process / mean",
                "Balance of the update.",
                "below 1.1",
            ),
            Metric(
                "ranks/idle/N",
                "share",
                "1 - positions of process N / max",
                "Idle share of process N in the update.",
            ),
            Metric("time/waiting/RANK", "seconds", "wall time", "Waiting for the slowest process."),
        ),
    ),
    Section(
        "Objectives on data",
        "SFT, reward models, DPO and IPO, process reward models; `eval/NAME` on held-out rows. s_c"
        " and s_r: scores of the chosen and the rejected side, for DPO the implicit rewards beta (l"
        " - ref).",
        (
            Metric("nll", "nats / token", "mean_t(-l_t)", "SFT's loss."),
            Metric("perplexity", "-", "exp(nll)", "SFT's perplexity."),
            Metric(
                "accuracy",
                "share",
                "pairs with s_c > s_r (a tie is half) / pairs; or steps judged right / steps",
                "Right orders of pairs, or right labels of steps.",
                "well above 0.5",
                label="Accuracy",
                column="accuracy",
            ),
            Metric("margin", "yours", "mean(s_c - s_r)", "Mean margin."),
            Metric("score/chosen", "yours", "mean s_c", "Mean score of the chosen side."),
            Metric("score/rejected", "yours", "mean s_r", "Mean score of the rejected side."),
            Metric(
                "accuracy/whole_solutions",
                "share",
                "solutions whose steps are all judged right / solutions",
                "Process reward models.",
            ),
            Metric(
                "right_steps",
                "share",
                "steps labelled right / steps",
                "Accuracy of a model that always answers `right`.",
            ),
            Metric(
                "accuracy/chosen_LENGTH",
                "share",
                "accuracy where the chosen side is shorter, longer, same_length",
                "Preference for length. Held-out rows only.",
            ),
            Metric(
                "calibration/error",
                "-",
                "sum over bins of pairs' share x |predicted - observed|",
                "Expected calibration error. Held-out rows only.",
            ),
            Metric(
                "calibration/BIN/predicted",
                "share",
                "mean sigmoid(|s_c - s_r|) in the bin",
                "Mean confidence.",
            ),
            Metric("calibration/BIN/observed", "share", "accuracy in the bin", "Accuracy."),
            Metric("calibration/BIN/pairs", "pairs", "count", "Pairs in the bin."),
        ),
    ),
    Section(
        "Held-out prompts",
        "With the sampling settings of `eval`. A completion is right if the recipe's"
        " [verdict](rewards.md#which-completions-are-right) is 1. Rates ignore completions with the"
        " verdict None. Without a verdict there are only rewards.",
        (
            Metric(
                "eval/greedy",
                "share",
                "right greedy completions / judged ones",
                "Greedy accuracy.",
                label="Held out, greedy",
            ),
            Metric(
                "eval/sampled",
                "share",
                "mean over prompts of right samples / judged ones",
                "Sampled accuracy.",
                label="Held out, sampled",
            ),
            Metric(
                "eval/pass@K",
                "share",
                "mean of 1 - C(n - c, k) / C(n, k); c right of n (2107.03374)",
                "Share of prompts with a right one of k samples, among prompts with at least k"
                " judged samples.",
            ),
            Metric(
                "eval/greedy_reward",
                "yours",
                "mean combined reward of the greedy completions",
                "Without a verdict.",
            ),
            Metric(
                "eval/reward", "yours", "mean combined reward of the samples", "Held-out reward."
            ),
            Metric(
                "eval/NAME/half_width",
                "as NAME",
                "half the 95% interval: Wilson for shares, normal over prompts for means",
                "Uncertainty of NAME.",
            ),
            Metric("eval/rewards/NAME", "yours", "mean over samples", "One reward function."),
            Metric(
                "eval/rewards/NAME/none",
                "share",
                "samples with None / samples",
                "Share of None, if there is any.",
            ),
            Metric("eval/completions/mean_length", "tokens", "mean n", "Length of the samples."),
            Metric(
                "eval/completions/clipped_ratio",
                "share",
                "truncated samples / samples",
                "Share truncated.",
            ),
            Metric(
                "eval/greedy/COLUMN=VALUE",
                "share",
                "greedy accuracy of the rows with that value",
                "By a column of a built-in task.",
            ),
        ),
    ),
)
"""All metrics by subject."""


ROWS = {metric.name: metric for section in METRICS for metric in section.metrics}


def find(key: str) -> Metric | None:
    """The row of a key of `metrics.jsonl`; None if there is none.  `eval/NAME` of an objective on
    data is NAME's row.

    >>> find("rewards/accuracy/mean").unit, find("eval/nll").name
    ('yours', 'nll')
    >>> find("eval/greedy/half_width").name
    'eval/NAME/half_width'
    """
    for name in (key, key.removeprefix("eval/")):
        row = ROWS.get(name) or next(
            (metric for metric in ROWS.values() if metric.matches(name)), None
        )
        if row is not None:
            return row
    return None


FLAGGED = tuple((metric, metric.flag) for metric in ROWS.values() if metric.flag is not None)
"""The metrics with a flag."""
LOOKED_AT = max(RECENT, *(flag.after for _, flag in FLAGGED))
"""Steps that decide about the flags."""


def raised(history: Sequence[Mapping[str, float]]) -> list[tuple[Metric, Flag, float]]:
    """The flags that the last steps raise, each with its metric and the metric's mean over them.
    history: oldest step first.

    What success looks like (dead groups, the same texts, no entropy) is no warning where half are
    solved; of flags with one
    cause only one is raised: nothing scored, all groups failed, nothing trained, dead groups.
    """
    means = {}
    for metric, flag in FLAGGED:
        values = [metrics[metric.name] for metrics in history if metric.name in metrics]
        recent = [metrics[metric.name] for metrics in history[-RECENT:] if metric.name in metrics]
        if recent and len(values) >= flag.after:
            means[metric.name] = sum(recent) / len(recent)
    solved, failed = means.get("groups/solved", 0.0) > 0.5, means.get("groups/failed", 0.0) > MOST
    silent = math.isnan(means.get("reward", 0.0))
    flagged: list[tuple[Metric, Flag, float]] = []
    for metric, flag in FLAGGED:
        if (
            metric.name not in means
            or not flag.wrong(mean := means[metric.name])
            or (flag.solved and solved)
        ):
            continue
        untrained = any(one.name == "tokens/trained" for one, _, _ in flagged)
        if metric.name in ("tokens/trained", "groups/dead") and (silent or failed or untrained):
            continue
        flagged.append((metric, flag, mean))
    return flagged


def flags(history: Sequence[Mapping[str, float]]) -> list[str]:
    """The warnings that the last steps raise, one line each; empty if there are none.

    history: metrics of each step, oldest first.

    >>> step = {"groups/solved": 0.87, "groups/dead": 0.9, "entropy": 0.001}
    >>> flags([step | {"completions/duplicates": 0.9}])
    ['groups/solved 87%: most groups are solved. Stop here, or go on with harder prompts.']
    """
    lines = []
    for metric, flag, mean in raised(history):
        shown = f"{mean:.0%}" if metric.unit == "share" else f"{mean:.3g}"
        lines.append(
            f"{metric.name} {shown}: {flag.title[0].lower()}{flag.title[1:]}. {flag.remedy}"
        )
    return lines
