# SPDX-License-Identifier: Apache-2.0
"""The table of all metrics with their units and meanings, the source of docs/metrics.md.

Names are verl's where verl has them. A name may contain a placeholder ``<name>``, a choice
``<mean|max|min>`` and an optional ending ``[/lag_<k>]``. A run logs only the metrics of features
that it uses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table; ``unit`` is "" if there is none."""

    name: str
    unit: str
    meaning: str


_LAG = "[/lag_<k>]"
_STATISTIC = "<mean|max|min>"
_TOKENS = "tokens"
_SHARE = "share"
_NATS = "nats"
_SECONDS = "s"

METRICS = (
    Metric("training/global_step", "", "the step; 0 is the validation before training"),
    Metric("training/epoch", "", "the epoch of the latest prompt, from 0"),
    Metric("training/dropped_groups", "groups", "groups that dynamic sampling dropped"),
    Metric("training/lag/mean", "versions", "the age of the sampling weights, mean over tokens"),
    Metric("training/lag/max", "versions", "the age of the oldest token of the batch"),
    Metric("training/lag/share/lag_<k>", _SHARE, "samples with an oldest token of lag k"),
    Metric("training/lag/old_log_prob", "versions", "the age of the weights of old log-probs"),
    Metric("training/rollout_probs_diff_valid", "", "1 if the trainer scored the batch itself"),
    Metric(
        "training/rollout_probs_diff_<max|mean|std>",
        "",
        "the absolute difference of token probabilities, trainer against rollout",
    ),
    Metric(
        "training/rollout_actor_probs_pearson_corr",
        "",
        "the correlation of token probabilities, trainer against rollout",
    ),
    Metric(
        "training/rollout_logp_diff_<max|mean>",
        _NATS,
        "the absolute difference of token log-probs, trainer against rollout",
    ),
    Metric(f"critic/score/{_STATISTIC}", "", "the scores that the reward gave the samples"),
    Metric(f"critic/rewards/{_STATISTIC}", "", "the rewards of the samples after any KL penalty"),
    Metric(f"critic/advantages/{_STATISTIC}", "", "the advantages of the response tokens"),
    Metric(f"critic/returns/{_STATISTIC}", "", "the returns of the response tokens"),
    Metric(f"critic/values/{_STATISTIC}", "", "the critic's values of the response tokens"),
    Metric("critic/vf_explained_var", _SHARE, "variance of the returns that the values explain"),
    Metric("critic/vf_loss", "", "the loss of the critic"),
    Metric("critic/vf_clipfrac", _SHARE, "tokens whose value is clipped"),
    Metric("critic/vpred_mean", "", "the mean value during the update"),
    Metric("<actor|critic|train>/grad_norm", "", "the norm of the gradient before clipping"),
    Metric("<actor|critic|train>/lr", "", "the learning rate of the step"),
    Metric(
        "<actor|critic>/skipped_updates",
        "updates",
        "optimizer steps skipped because loss or gradient was not finite",
    ),
    Metric("actor/loss", "", "the whole loss of the policy"),
    Metric("actor/pg_loss", "", "the policy term of the loss"),
    Metric(f"actor/pg_clipfrac{_LAG}", _SHARE, "tokens that the loss clips or drops"),
    Metric("actor/pg_clipfrac_lower", _SHARE, "tokens bounded by clip_ratio_c"),
    Metric("actor/ppo_kl", _NATS, "the KL from the policy before the step, k1, computed tokens"),
    Metric("actor/experts/max_over_mean", "", "tokens of the fullest expert relative to the mean"),
    Metric("actor/router/replay_overlap", _SHARE, "replayed experts that routers would choose"),
    Metric("actor/entropy", _NATS, "the entropy of the policy, mean over computed tokens"),
    Metric("actor/entropy_loss", _NATS, "the entropy as aggregated in the loss"),
    Metric("actor/kl_loss", _NATS, "the KL from the reference as aggregated in the loss"),
    Metric("actor/kl_coef", "", "the coefficient of the KL in the loss"),
    Metric("actor/reward_kl_penalty", _NATS, "the KL from the reference, mean over sequences"),
    Metric("actor/reward_kl_penalty_coeff", "", "the coefficient of the KL in the reward"),
    Metric(
        "actor/computed_sequences/share",
        _SHARE,
        "sequences with a reward that went through the model in the update",
    ),
    Metric("reward/<number>/mean", "", "another number that the reward function returned"),
    Metric("reward/timeouts", "samples", "samples whose reward exceeded its deadline"),
    Metric("reward/errors", "samples", "samples whose reward failed for another reason"),
    Metric("reward/failures", "samples", "samples without a reward"),
    Metric("reward/zero_variance_group_ratio", _SHARE, "groups whose samples all score the same"),
    Metric(
        f"num_turns/{_STATISTIC}",
        "turns",
        "1 plus the number of turns of policy and environment in an episode",
    ),
    Metric("agent/calls/<mean|max>", "calls", "the calls of tools of an episode"),
    Metric(
        "agent/calls/<ok|model_error|timeout|limit|failed>", "calls", "the calls with this outcome"
    ),
    Metric("agent/malformed_share", _SHARE, "calls that were malformed, unknown or wrong"),
    Metric(
        "agent/end/<answer|done|turns|length|deadline|failed>", _SHARE, "episodes that ended so"
    ),
    Metric("agent/forks/<reason>", "forks", "conversations that went on from other tokens"),
    Metric(
        "agent/failed",
        "samples",
        "episodes without a reward: a tool failed, or the deadline passed",
    ),
    Metric("agent/wait_s/<mean|max>", _SECONDS, "the wait of an episode for its environment"),
    Metric("agent/drawn_tokens/mean", _TOKENS, "the tokens that the policy drew in an episode"),
    Metric("agent/given_share", _SHARE, "response tokens that came from the environment"),
    Metric(f"<response|prompt>_length/{_STATISTIC}", _TOKENS, "the lengths"),
    Metric("<response|prompt>_length/clip_ratio", _SHARE, "sequences of the maximum length"),
    Metric(f"response_length_non_aborted/{_STATISTIC}", _TOKENS, "the lengths above 0"),
    Metric("response_length_non_aborted/clip_ratio", _SHARE, "sequences of the maximum length"),
    Metric("response/aborted_ratio", _SHARE, "responses without a token"),
    Metric(f"rollout_corr/kl{_LAG}", _NATS, "the KL of rollout from trainer, k1, mean over tokens"),
    Metric(f"rollout_corr/k3_kl{_LAG}", _NATS, "the same KL by the estimator k3"),
    Metric(f"rollout_corr/rollout_is_mean{_LAG}", "", "the mean importance weight of the tokens"),
    Metric(f"rollout_corr/rollout_is_std{_LAG}", "", "the standard deviation of the weights"),
    Metric(
        "rollout_corr/rollout_is_<max|min>",
        "",
        "the extreme importance weights: applied weights of tokens, raw weights of sequences",
    ),
    Metric(
        "rollout_corr/rollout_is_seq_<mean|std|max|min|max_deviation>",
        "",
        "the mean applied weights of the sequences; max_deviation: the largest distance from 1",
    ),
    Metric(
        "rollout_corr/rollout_is_seq_fraction_<high|low>",
        _SHARE,
        "sequences whose mean raw weight is beyond the bound",
    ),
    Metric(
        "rollout_corr/rollout_is_batch_norm_factor",
        "",
        "the mean weight by which rollout_is_batch_normalize divides",
    ),
    Metric(
        f"rollout_corr/rollout_is_eff_sample_size{_LAG}",
        _SHARE,
        "the effective sample size relative to the number of tokens",
    ),
    Metric(
        f"rollout_corr/rollout_is_ratio_fraction_<high|low>{_LAG}",
        _SHARE,
        "tokens whose raw weight is beyond the bound",
    ),
    Metric(
        f"rollout_corr/rollout_rs_masked_fraction{_LAG}", _SHARE, "tokens that rejection excludes"
    ),
    Metric(
        "rollout_corr/rollout_rs_<option>_masked_fraction",
        _SHARE,
        "tokens that this rejection option excludes",
    ),
    Metric(
        "rollout_corr/rollout_rs_[<option>_]seq_masked_fraction",
        _SHARE,
        "sequences with an excluded token",
    ),
    Metric("rollout_corr/<training|rollout>_ppl", "", "the perplexity, mean over sequences"),
    Metric("rollout_corr/<training|rollout>_log_ppl", _NATS, "its logarithm, mean over sequences"),
    Metric(
        "rollout_corr/log_ppl_diff_<max|min>",
        _NATS,
        "the largest and the smallest difference of a sequence",
    ),
    Metric("rollout_corr/log_ppl_<diff|abs_diff>", _NATS, "the difference of log-perplexities"),
    Metric("rollout_corr/ppl_ratio", "", "the ratio of perplexities, trainer to rollout"),
    Metric("rollout_corr/chi2_<token|seq>", "", "the chi-squared divergence"),
    Metric("timing_s/step", _SECONDS, "the step with saving, without validation"),
    Metric("timing_s/testing", _SECONDS, "the validation"),
    Metric("timing_s/<section>", _SECONDS, "a section of the step, such as gen or reward"),
    Metric("timing_per_token_ms/<section>", "ms", "a section, per token"),
    Metric("perf/total_num_tokens", _TOKENS, "the tokens of prompts and responses"),
    Metric("perf/time_per_step", _SECONDS, "the same as timing_s/step"),
    Metric("perf/throughput", "tokens/s", "the tokens of a step per second and device"),
    Metric("perf/wall_throughput", "tokens/s", "the same, including data and validation"),
    Metric("perf/mfu/actor", _SHARE, "the update's model flops relative to the devices' peak"),
    Metric(
        "perf/max_memory_<allocated|reserved>_gb",
        "GiB",
        "the peak of the device's allocator, with memory that a sleeping vLLM has released",
    ),
    Metric("perf/cpu_memory_used_gb", "GiB", "the memory in use on the driver's host"),
    Metric("perf/decode_step_s/fixed", _SECONDS, "the fixed part of a decode step"),
    Metric("perf/decode_step_s/per_sequence", _SECONDS, "the part of a decode step per sequence"),
    Metric("global_seqlen/<min|max>", _TOKENS, "the tokens of a rank without balancing"),
    Metric("global_seqlen/minmax_diff", _TOKENS, "their difference"),
    Metric("global_seqlen/balanced_<min|max>", _TOKENS, "the tokens of a rank after balancing"),
    Metric("global_seqlen/mean", _TOKENS, "the mean over ranks"),
    Metric(
        "pipeline/wall_s",
        _SECONDS,
        "the time since the end of the previous step; pipeline/* needs a lag above 0",
    ),
    Metric("pipeline/busy_s/<role>", _SECONDS, "the work of a role, mean over its engines"),
    Metric("pipeline/idle_share/<role>", _SHARE, "wall time without work"),
    Metric("pipeline/wait_s/<role>/<cause>", _SECONDS, "the time that a role waited for a cause"),
    Metric("pipeline/buffered_groups", "groups", "scored groups that wait for later steps"),
    Metric("rollout/engine/<counter>", "", "the growth of a counter of the rollout engines"),
    Metric("train/loss", _NATS, "the loss of supervised training, mean over tokens"),
    Metric("train/global_tokens", _TOKENS, "the tokens of the step"),
    Metric("val/loss", _NATS, "the loss of supervised validation, mean over tokens"),
    Metric(
        "<val-core|val-aux>/<source>/<variable>/<mean|std>@<N>",
        "",
        "the score or another number over the N samples of a prompt, mean over prompts",
    ),
    Metric(
        "<val-core|val-aux>/<source>/<variable>/<best|worst|maj>@<n>/<mean|std>",
        "",
        "the best, the worst or the majority of n samples, by bootstrap",
    ),
    Metric(f"val-aux/num_turns/{_STATISTIC}", "turns", "the same of validation episodes"),
    Metric("val-aux/agent/calls/mean", "calls", "the calls of tools of a validation episode"),
    Metric("val-aux/<source>/failures/count", "samples", "validation samples without a reward"),
)


def find_metric(name: str) -> Metric | None:
    """Return the first row that matches a logged name."""
    return next((row for row in METRICS if re.fullmatch(_pattern(row.name), name)), None)


def _pattern(name: str) -> str:
    """Convert a name of the table to a regular expression."""
    parts = re.split(r"(<[^>]*>|\[|\])", name)
    special = {"[": "(?:", "]": ")?"}
    return "".join(special.get(part) or _placeholder(part) for part in parts)


def _placeholder(part: str) -> str:
    if not part.startswith("<"):
        return re.escape(part)
    choices = part[1:-1].split("|")
    return ".+" if len(choices) == 1 else f"(?:{'|'.join(map(re.escape, choices))})"
