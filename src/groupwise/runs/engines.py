"""The rollout engine that a recipe names, and what a run does differently because of it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from groupwise.algorithms.algorithm import Algorithm
from groupwise.config.settings import EngineSettings, RolloutSettings, engine_traits
from groupwise.data.encoding import visit
from groupwise.environments.conversation import Environment
from groupwise.errors import ConfigError, EngineError
from groupwise.models.policy import Policy
from groupwise.models.shape import Shape
from groupwise.models.sharded import whole_policy
from groupwise.proof.fp8 import DRIFT
from groupwise.proof.texts import NATIVE, TRANSFORMERS, ProvenSampler
from groupwise.records import Prompt, Step
from groupwise.rollout.engine import Engine
from groupwise.rollout.gathered import GatheredEngine
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.transformers import TransformersEngine
from groupwise.rollout.vllm.engine import VllmEngine
from groupwise.rollout.vllm.server_fitness import unfit_on_cpu
from groupwise.runs.plan import Lines
from groupwise.training.groups import PrefetchedRollouts
from groupwise.utils.imports import demand_attributes, imported, own_code
from groupwise.utils.spelling import counted

Make = Callable[[Policy, RolloutSettings, Environment | None], Engine]


def _in_process(engine: Callable[..., Engine]) -> Make:
    def make(policy: Policy, settings: RolloutSettings, environment: Environment | None) -> Engine:
        if policy.sharded:
            return GatheredEngine(policy, lambda plain: make(plain, settings, environment))
        return engine(whole_policy(policy), max_rows=settings.max_rows, environment=environment)

    return make


def _vllm(policy: Policy, settings: RolloutSettings, environment: Environment | None) -> Engine:
    engine = settings.engine
    return VllmEngine(
        policy,
        servers=engine.servers,
        patience=engine.patience,
        colocated=engine.colocated,
        tensor_parallel=engine.tensor_parallel,
        dtype=engine.dtype,
        in_flight=engine.ahead > 0,
        max_rows=settings.max_rows,
        environment=environment,
        weights_folder=engine.weights_folder,
        full_every=engine.full_every,
    )


ENGINES: dict[str, Make] = {
    "native": _in_process(NativeEngine),
    "transformers": _in_process(TransformersEngine),
    "vllm": _vllm,
}
"""The rollout engines that a recipe may name, beside `module:function`."""


def make_engine(
    policy: Policy, settings: RolloutSettings, environment: Environment | None = None
) -> Engine:
    """The rollout engine that a recipe names.   environment: who answers the policy.

    One's own, `module:function`, is made by `function(policy, max_rows=...)`, and by
    `function(policy, max_rows=..., environment=...)` in runs that have an environment.
    Raises ConfigError if it cannot be imported, or does not take these arguments.
    """
    engine = settings.engine
    if engine.name in ENGINES:
        return ENGINES[engine.name](policy, settings, environment)
    make = imported("rollout.engine", engine.name, callable_only=True)
    keywords: dict[str, Any] = {"max_rows": settings.max_rows}
    if environment is not None:  # without one an engine need not know of any
        keywords["environment"] = environment
    try:
        inspect.signature(make).bind(policy, **keywords)
    except TypeError as error:
        raise ConfigError(
            f"rollout.engine: {engine.name} cannot be called with (policy, {', '.join(keywords)}):"
            f" {error}"
        ) from None
    with own_code(f"rollout.engine {engine.name}"):
        made = make(policy, **keywords)
    demand_attributes(
        f"rollout.engine {engine.name}",
        made,
        ["generate", "send_weights", "close", "version", "where", "tolerance"],
    )
    return made


def demand_model(engine: EngineSettings, config: dict[str, Any], *, cpu: bool) -> None:
    """Refuse a model for which a vLLM that the run starts cannot sample.  Raises ConfigError.

    config: transformers', of the model.   cpu: it is trained on a CPU.
    """
    if "servers" not in engine_traits(engine.name).takes or engine.servers:
        return
    if cpu and (wrong := unfit_on_cpu(config)):
        raise ConfigError(f"rollout.engine: vLLM cannot sample for this policy: {wrong}")
    shape, together = Shape.of(config, 0, dtype="float32"), engine.tensor_parallel
    if shape.heads % together:
        raise ConfigError(
            f"rollout.engine.tensor_parallel: {together} processes share the attention heads of"
            f" each layer, and the model has {shape.heads}: set a divisor of {shape.heads}",
            key="rollout.engine.tensor_parallel",
        )


def demand_colocated(engine: EngineSettings) -> None:
    """Refuse a colocated vLLM that is not installed beside the trainer.  Raises ConfigError."""
    if not engine.colocated:
        return
    installed = find_spec("vllm")
    if installed is None:
        raise ConfigError(
            "rollout.engine: colocated needs vLLM in the environment of the trainer"
            f" ({sys.executable}), and it is not there: install groupwise and vllm into one, or"
            " leave colocated out: a server has an environment of its own",
            key="rollout.engine.colocated",
        )


def sampler_of(settings: RolloutSettings, *, conversations: bool = False) -> ProvenSampler | None:
    """What a proof asks to sample, with the recipe's engine; None for one that samples elsewhere,
    or is one's own.

    conversations: an environment answers the policy's turns.
    """
    known = {"native": NATIVE, "transformers": TRANSFORMERS}.get(settings.engine.name)
    if known is None:
        return None

    def make(policy: Policy, *, max_rows: int, environment: Environment | None) -> Engine:
        return make_engine(policy, replace(settings, max_rows=max_rows), environment)

    return replace(known, make=make, conversations=conversations)


def sampled_elsewhere(
    algorithm: Algorithm, settings: RolloutSettings, *, fp8: bool = False
) -> Algorithm:
    """The algorithm, corrected where the recipe's engine computes other probabilities than the
    trainer, or samples ahead of it.

    fp8: the trainer rounds products, which no engine does (`model.fp8`).
    """
    engine = settings.engine
    trained = engine_traits(engine.name).own_weights and not engine.ahead and not fp8
    return algorithm if trained else replace(algorithm, correction=engine.correct)


def make_ahead(settings: RolloutSettings, prompts: Sequence[Prompt]) -> PrefetchedRollouts:
    """How far sampling runs ahead of training, and what may be begun again: visits of the prompts
    that are trained on.
    """
    by_id = {prompt.id: prompt for prompt in prompts}

    def find(name: str) -> Prompt:
        epoch, _, row = name.partition("/")
        return visit(by_id[row], epoch)

    engine = settings.engine
    return PrefetchedRollouts(engine.ahead, beside=engine_traits(engine.name).beside, find=find)


def check_agreement(step: Step, engine: Engine, *, fp8: bool = False) -> None:
    """Compare what the engine sampled with what the trainer scored, in a step that it has trained.

    Raises EngineError for a mean difference that no rounding explains: the servers sample with
    other weights, another temperature or old keys and values.  The step is then not saved.
    fp8: the trainer rounds products (`model.fp8`), which may have drifted too far.
    """
    gap = step.metrics.get("mismatch/mean", 0.0)
    if fp8 and not gap <= DRIFT:
        raise EngineError(
            f"step {step.number}: sampled and scored log-probs differ by {gap:.2g} nats on"
            f" average, more than FP8 may drift ({DRIFT:g}). The step is thrown away; start"
            " another run without model.fp8"
        )
    if not fp8 and not gap <= engine.tolerance:
        raise EngineError(
            f"step {step.number}: sampled and scored log-probs differ by {gap:.2g} nats on"
            f" average, more than rounding explains ({engine.tolerance:g}): the vLLM servers"
            " sample with other weights, at another temperature or from an old cache. The step is"
            " thrown away; `groupwise check` tests the servers"
        )


def engine_metrics(engine: Engine) -> dict[str, float]:
    """What servers did for a step; nothing where there are none."""
    return engine.metrics() if isinstance(engine, VllmEngine) else {}


def engine_lines(engine: Engine, ahead: PrefetchedRollouts) -> Lines:
    """Where completions come from and by how old weights, for the plan; nothing where it is this
    process with the newest ones.
    """
    lines = [("rollouts", engine.where)] if engine.where is not None else []
    if ahead.steps:
        how = "while it trains" if ahead.beside else "in turn with it"
        lines.append(
            ("ahead", f"sampling is up to {counted(ahead.steps, 'step')} ahead of training, {how}")
        )
    return lines
