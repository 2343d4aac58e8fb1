"""Two ways through a model: its own forward and backward pass, one text at a time; and that of a
run, packed and fused.

Both give the same of each text: log-probs of the tokens that have a weight, or a scoring model's
score; and the gradients of the weighted sum of their squares.

n tokens of a completion   V vocabulary   M read positions of a packed batch   P all of them
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.distributed import fsdp, layout
from groupwise.distributed.ulysses import ContextGroup
from groupwise.errors import ConfigError
from groupwise.models.attention import PackedAttention, plain_attention
from groupwise.models.backbone import layers
from groupwise.models.layers import MODELS, class_name, stack_of
from groupwise.models.moe import BALANCE, router_coefficient
from groupwise.models.passes import BatchPass, packed_for, packed_pass
from groupwise.models.policy import Policy
from groupwise.models.reward_head import head_scores, reads_tokens
from groupwise.models.sharded import gathered, whole_policy
from groupwise.ops.query import Query
from groupwise.records import Sample

MANY = 30_000_000
"""Parameters of a model of which the gradients of all are compared; of a larger one see
`some_gradients`.
"""


class PassResults(NamedTuple):
    """What one way gives of texts."""

    values: list[np.ndarray]
    """One array a text: log-probs of its tokens that have a weight, nats; of a scoring model its
    score (1,).
    """
    gradient: dict[str, Tensor]
    """Gradients by the parameter's name; of a sharded one this process's shard."""


def model_pass(policy: Policy, samples: Sequence[Sample], *, gradients: bool) -> PassResults:
    """Compute texts by the model's own pass, one at a time, at each one's temperature and over its
    support.

    A model that is split is made whole for it: its own pass exchanges nothing.
    """
    if policy.split:
        return _whole_pass(policy, samples, gradients=gradients)
    if policy.context_group is not None:
        return _alone_pass(policy, policy.context_group, samples, gradients=gradients)
    model, scores, values = policy.model, reads_tokens(policy), list[np.ndarray]()
    few = "logits_to_keep" in inspect.signature(model.forward).parameters
    with plain_attention(model), torch.set_grad_enabled(gradients):
        for sample in samples:
            ids_N = np.concatenate([sample.prompt, sample.completion[:-1]])
            ids = torch.from_numpy(ids_N).to(policy.device)
            begin = int(np.argmax(sample.weight > 0))
            options = {}
            if sample.images is not None:
                options = policy.vision.arguments(policy, ids[None], [sample.images])
            if few:
                options["logits_to_keep"] = sample.completion.size - begin
            with policy.precision():
                value_N = model(input_ids=ids[None], use_cache=False, **options).logits[0]
            value_N = value_N.to(torch.promote_types(value_N.dtype, torch.float32))
            if not scores:
                weighted_N = torch.from_numpy(sample.weight[begin:] > 0).to(policy.device)
                logits_NV = value_N[begin - sample.completion.size :, : policy.vocabulary]
                value_N = _log_probs(sample, begin, logits_NV)[weighted_N]
            values.append(value_N.detach().double().cpu().numpy())
            if value_N.requires_grad:
                weight_N = torch.from_numpy(sample.weight[sample.weight > 0]).to(value_N)
                (weight_N * value_N.square()).sum().backward()
    return PassResults(values, take_gradients(policy) if gradients else {})


def _whole_pass(policy: Policy, samples: Sequence[Sample], *, gradients: bool) -> PassResults:
    """Compute `model_pass` by the whole model on each process; gradients are those of its part."""
    with gathered(policy) as plain:
        parameters = dict(policy.model.named_parameters())
        for name, parameter in plain.model.named_parameters():
            trained = name in parameters and parameters[name].requires_grad
            parameter.requires_grad_(gradients and trained)
        results = model_pass(plain, samples, gradients=gradients)
    assert policy.shards is not None
    parts = dict[str, Tensor]()
    for name, gradient in results.gradient.items():
        part = layout.part_of(gradient.__getitem__, parameters[name])
        # All workers compute these texts.
        parts[name] = part * layout.summed_already(parameters[name], policy.shards.parallel)
    return PassResults(results.values, parts)


def _alone_pass(
    policy: Policy, context: ContextGroup, samples: Sequence[Sample], *, gradients: bool
) -> PassResults:
    """Compute `model_pass` on each process by itself, where a run's pass computes it together."""
    results = model_pass(replace(policy, context_group=None), samples, gradients=gradients)
    return PassResults(results.values, _shares(policy, context, results.gradient))


def _shares(
    policy: Policy, context: ContextGroup, gradients: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return gradients that each process has computed by itself as those of a run's pass.

    FSDP has summed them over all processes: a run's pass in shares, these whole.
    """
    if not policy.sharded:
        return gradients
    return {name: gradient / context.size for name, gradient in gradients.items()}


def _log_probs(sample: Sample, begin: int, logits_NV: Tensor) -> Tensor:
    """Log-probs of a completion's tokens from `begin` on (n,)."""
    logits_NV = logits_NV / sample.temperature
    drawn_N = torch.from_numpy(sample.completion[begin:]).to(logits_NV.device)
    chosen_N = logits_NV.gather(1, drawn_N[:, None])[:, 0]
    if sample.support is None:
        return chosen_N - logits_NV.logsumexp(-1)
    totals = []
    for logits_V, ids in zip(logits_NV, sample.support[begin:], strict=True):
        support = torch.from_numpy(ids.astype(np.int64)).to(logits_NV.device)
        totals.append(logits_V[support].logsumexp(0))
    return chosen_N - torch.stack(totals)


def run_pass(policy: Policy, samples: Sequence[Sample], *, gradients: bool) -> PassResults:
    """Compute texts as a run does: all in one stream, prompts shared, fused, gradients of head and
    embedding summed in place.
    """
    size = sum(sample.prompt.size + sample.completion.size for sample in samples)
    result = packed_pass(policy, _squares, packed_for(policy, samples, size), learn=gradients)
    values = [np.zeros(0) for _ in samples]
    _, columns = result.read(samples)
    for index, column in columns:
        values[index] = column[samples[index].weight > 0].astype(np.float64)
    return PassResults(values, _run_gradients(policy) if gradients else {})


def _run_gradients(policy: Policy) -> dict[str, Tensor]:
    """Return the gradients of a run's pass, summed as its optimizer sums them."""
    gradients = take_gradients(policy)
    if policy.context_group is not None and not policy.sharded:
        for gradient in gradients.values():
            policy.context_group.sum(gradient)
    return gradients


def _squares(passed: BatchPass) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the squares of a batch's log-probs or scores, and these (M,)."""
    if reads_tokens(passed.policy):
        value_M = head_scores(passed.policy, passed.hidden_MD)
    else:
        value_M = passed.head(fused=False).logp_M
    weight_M = passed.batch.weight_P[passed.rows_M].to(value_M)
    loss = (weight_M * value_M.square()).sum()
    if torch.is_grad_enabled() and not loss.requires_grad:
        loss.requires_grad_()  # a model that ignores its adapter: the comparison refuses it
    return loss, value_M


def balance_model_pass(policy: Policy, text: Sample) -> PassResults:
    """Compute the loss that balances experts, of one text, by the model's own pass.  Raises
    ConfigError for a model without one.
    """
    ids = torch.from_numpy(np.concatenate([text.prompt, text.completion[:-1]])).to(policy.device)
    options = {"use_cache": False, "output_router_logits": True, "output_hidden_states": True}
    with plain_attention(policy.model) as model:
        outputs = model(input_ids=ids[None], **options)
    loss = getattr(outputs, "aux_loss", None)
    if loss is None:
        name = type(policy.model).__name__
        raise ConfigError(f"{name} has no loss that balances experts; {BALANCE}")
    loss = router_coefficient(policy) * loss
    (loss + _nothing(outputs.hidden_states[-1])).backward()
    gradient = take_gradients(policy)
    if policy.context_group is not None:
        gradient = _shares(policy, policy.context_group, gradient)
    return PassResults([loss.detach().cpu().numpy()[None]], gradient)


def balance_run_pass(policy: Policy, text: Sample) -> PassResults:
    """Compute the same as a run does."""
    batches = packed_for(policy, [text], text.prompt.size + text.completion.size)
    loss = packed_pass(policy, _balance, batches, learn=True).loss
    return PassResults([loss.cpu().numpy()[None]], _run_gradients(policy))


def _balance(passed: BatchPass) -> tuple[Tensor, Tensor]:
    """Return the loss that balances experts, and zeros (M,)."""
    loss = passed.router_loss + _nothing(passed.hidden_MD)
    return loss, loss.detach().new_zeros(len(passed.rows_M))


def _nothing(hidden_TD: Tensor) -> Tensor:
    """Return 0 that depends on final hidden states: FSDP gathers the weights of a block when a
    gradient reaches its output, and what routers say is no part of that.
    """
    return 0.0 * hidden_TD.sum()


class ComparedAttention(PackedAttention):
    """Attention of a packed stream that is computed in float32 beside."""

    difference = 0.0
    """The largest difference of a token's output so far, relative to the root mean square over
    tokens.
    """

    def __call__(self, query: Query) -> Tensor:
        """See `Attend`."""
        out_THE = super().__call__(query)
        exact = query._replace(
            query_THD=query.query_THD.float(),
            key_TKD=query.key_TKD.float(),
            value_TKE=query.value_TKE.float(),
        )
        exact_THE = super().__call__(exact)
        distance_T = (out_THE.float() - exact_THE).flatten(1).norm(dim=-1)
        size = exact_THE.flatten(1).norm(dim=-1).square().mean().sqrt()
        difference = float(distance_T.max() / size)
        self.difference = float(np.maximum(self.difference, difference))  # NaN stays NaN
        return out_THE


def take_gradients(policy: Policy) -> dict[str, Tensor]:
    """The gradients of a model, by parameter, which are taken away from it."""
    gradients = dict[str, Tensor]()
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:
            fsdp.align_gradients([parameter])
            gradients[name], parameter.grad = fsdp.own(parameter.grad).detach(), None
    return gradients


@contextmanager
def some_gradients(policy: Policy) -> Iterator[None]:
    """Inside, of a model of more than `MANY` parameters no matrix takes a gradient but those of the
    first block of each kind.

    What flows through the other blocks is seen by these gradients, and by those of their norms and
    biases.
    """
    if policy.sharded or sum(p.numel() for p in policy.model.parameters()) <= MANY:
        yield
        return
    first = {repr(_kind(block)): block for block in reversed(layers(policy))}
    compared = set[nn.Parameter]()
    for block in first.values():
        compared.update(block.parameters())
    left_out = []
    for parameter in policy.model.parameters():
        if parameter.ndim > 1 and parameter.requires_grad and parameter not in compared:
            left_out.append(parameter)
    for parameter in left_out:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in left_out:
            parameter.requires_grad_(True)


@contextmanager
def shortened(policy: Policy) -> Iterator[None]:
    """Inside, a model of which `stack_of` knows all has its first blocks only: two, or as many as
    hold one of every kind.
    """
    if policy.split:
        with shortened(whole_policy(policy)), shortened(replace(policy, shards=None)):
            yield
        return
    model = policy.model
    # Of a model whose texts run one by one nobody has read the masks, which `stack_of` asks for.
    if (
        policy.attention == "single"
        or class_name(type(model)) not in MODELS
        or stack_of(model) is None
    ):
        yield
        return
    # An image encoder, whose blocks are no part of texts, stands before the last.
    last = layers(policy)[-1]
    (stack,) = (
        part
        for part in model.modules()
        if isinstance(part, nn.ModuleList) and [*part][-1:] == [last]
    )
    blocks = [*stack]
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    types = getattr(config, "layer_types", None) or [None] * len(blocks)
    kinds = list(zip(map(_kind, blocks), types, strict=True))
    count = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    del stack[count:]
    # The engine holds the model against what its config makes.
    config.num_hidden_layers = len(stack)
    try:
        yield
    finally:
        stack.extend(blocks[count:])
        config.num_hidden_layers = len(stack)


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _kind(block: nn.Module) -> list[tuple[Any, ...]]:
    """The structure of a block: of each module the class, the shapes of its parameters and whether
    they are trained, how many hooks it has, and whether its forward pass is its own.
    """
    kinds = []
    for part in block.modules():
        kind: list[Any] = [type(part), "forward" in vars(part)]
        for parameter in part._parameters.values():
            if parameter is not None:
                kind += [parameter.shape, parameter.requires_grad]
            else:
                kind.append(None)
        kind += [len(getattr(part, hooks)) for hooks in HOOKS]
        kinds.append(tuple(kind))
    return kinds
