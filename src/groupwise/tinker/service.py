"""Sessions, models and samplers of the server, and what each route does with them.

One thread computes; routes only note what is to be done.  A model is dropped when its session ends,
or to make room once its session is silent.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from groupwise.config.settings import LoraSettings, ModelSettings, Recipe, positions_of
from groupwise.models.gguf import checkpoint_folder
from groupwise.models.loading import make_policy
from groupwise.models.lora import linear_layers
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE
from groupwise.runs.prepared import modelled
from groupwise.runs.run_models import fit_threads
from groupwise.tinker.bodies import (
    CreateModelBody,
    CreateSamplerBody,
    LoadBody,
    LoraBody,
    NumberedBody,
    OptimStepBody,
    SaveBody,
    SaveForSamplerBody,
    check_optimizer,
)
from groupwise.tinker.places import SAMPLER, WEIGHTS, CheckpointPlace, name_of
from groupwise.tinker.promises import Answer, ModelTurns, Promises, Table
from groupwise.tinker.samplers import Samplers, WeightsReader
from groupwise.tinker.trained import ALPHA, ModelOrigin, TrainedModel
from groupwise.tinker.wire import demand_protobuf, read_batch
from groupwise.utils.files import expanded
from groupwise.utils.http import Refused
from groupwise.utils.terminal import logger
from groupwise.utils.threads import Thread

log = logger(__name__)

SILENT = 60.0
"""Seconds without a heartbeat after which a session's models may make room; the SDK sends one every
10.
"""
ATTENTION, MLP = ("attn", "attention"), ("mlp", "feed_forward")
"""Parts of the names of modules that `train_attn` and `train_mlp` mean."""
ADAPTERS = (
    "adapters lie on attention and MLP layers, not on the output head: train_unembed has no effect"
)
ALL_WEIGHTS = "this server trains all weights: ranks and layers of adapters have no effect"
KEPT_CHECKPOINTS = "checkpoints are kept until they are deleted: ttl_seconds has no effect"


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerSettings:
    """What the server was started with."""

    model: str
    """Model folder, hub name, or a packaged model."""
    root: Path
    """Folder of checkpoints."""
    dtype: str = "float32"
    full: bool = False
    """Train all weights, whatever rank a client names."""
    largest_rank: int = 64
    models: int = 2
    """Models in training at the same time."""
    rows: int = 256
    """Completions drawn at the same time."""


@dataclass(slots=True)
class Session:
    """One client."""

    heard: float
    """When it was heard of, seconds of the service's clock."""
    ended: bool = False


@dataclass(slots=True)
class HeldModel:
    """A model in training, and its requests."""

    session_id: str
    turns: ModelTurns
    trained: TrainedModel | None = None
    """None until it is made."""

    def model(self) -> TrainedModel:
        """Return the model.  Raises Refused if it could not be made."""
        if self.trained is None:
            raise Refused("the model was not made: see the error of its creation")
        return self.trained


class TinkerService:
    """What is behind the routes."""

    def __init__(
        self, settings: TinkerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Load the base model, and prove that it is computed rightly.   clock: seconds.

        Raises ConfigError.
        """
        demand_protobuf()
        # `launch` writes paths in quotes, in which no shell replaces ~.
        self.name = str(expanded(checkpoint_folder(settings.model)))
        self.settings, self._clock = settings, clock
        self.base = ModelSettings(path=self.name, dtype=settings.dtype)  # type: ignore[arg-type]
        recipe, blueprint = modelled(Recipe(objective="sft", model=self.base))
        policy = make_policy(blueprint.load(), blueprint.tokenizer, self.base)
        fit_threads(policy, None)
        prove(policy, sampler=NATIVE)
        self.context, self.family = policy.context, str(policy.model.config.model_type)
        self._layers = linear_layers(policy.model)
        self._worker = Thread("tinker")
        self._lock = threading.RLock()
        self._promises = Promises()
        self._made: Table[str] = Table()
        self._sessions: dict[str, Session] = {}
        self._models: OrderedDict[str, HeldModel] = OrderedDict()
        self.samplers = Samplers(
            WeightsReader(settings=self.base, rows=settings.rows, positions=positions_of(recipe)),
            policy,
            settings.root,
            self._promises,
            self._worker,
        )

    def close(self) -> None:
        """End the thread that computes, once it has finished what it was given."""
        self._worker.close()

    # ---- sessions

    def create_session(self) -> dict[str, Any]:
        """Begin a session."""
        name = secrets.token_hex(8)
        with self._lock:
            self._sessions[name] = Session(self._clock())
        return {"type": "create_session", "session_id": name, "warning_message": self._note()}

    def _note(self) -> str:
        """Return what a script should know of this server; the SDK logs it as a warning."""
        weights = ALL_WEIGHTS if self.settings.full else ADAPTERS
        return f"groupwise serve --tinker: {weights}; {KEPT_CHECKPOINTS}"

    def heartbeat(self, session_id: str) -> dict[str, Any]:
        """Note that a session's client is there."""
        self._session(session_id)
        return {"type": "session_heartbeat"}

    def finish(self, session_id: str) -> dict[str, Any]:
        """End a session, and drop its models."""
        self._session(session_id).ended = True
        with self._lock:
            for model_id, held in list(self._models.items()):
                if held.session_id == session_id:
                    del self._models[model_id]
        return {}

    def _session(self, session_id: str) -> Session:
        """Return a session, which was heard of.  Raises Refused."""
        session = self._sessions.get(session_id)
        if session is None:
            raise Refused(f"there is no session {session_id[:80]!r}", HTTPStatus.NOT_FOUND)
        if session.ended:
            raise Refused(f"the session {session_id} has ended", HTTPStatus.GONE)
        session.heard = self._clock()
        return session

    # ---- models in training

    def create_model(self, body: CreateModelBody) -> dict[str, Any]:
        """Make a model to train."""
        self._session(body.session_id)
        self._check_base(body.base_model)
        check_optimizer(body.optimizer_config)
        origin = self._origin(body.lora_config)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"

        def make() -> TrainedModel:
            return TrainedModel(origin)

        def answer() -> dict[str, Any]:
            return {"type": "create_model", "model_id": model_id}

        return self._make(body.session_id, model_id, make, answer)

    def _origin(self, lora: LoraBody | None) -> ModelOrigin:
        """Return what a new model is made of.  Raises Refused for what is not offered."""
        if lora is None or self.settings.full:
            return ModelOrigin(settings=self.base, seed=0)
        if lora.rank > self.settings.largest_rank:
            raise Refused(
                f"rank {lora.rank} is not offered here: at most {self.settings.largest_rank}, or"
                " what the server is started with (--lora-rank)"
            )
        targets = self._targets(lora)
        seed = secrets.randbelow(1 << 31) if lora.seed is None else lora.seed
        adapter = LoraSettings(rank=lora.rank, alpha=ALPHA, targets=targets)
        return ModelOrigin(settings=replace(self.base, lora=adapter), seed=seed)

    def _targets(self, lora: LoraBody) -> str | tuple[str, ...]:
        """Return the layers with an adapter, as settings name them.  Raises Refused for none."""
        if lora.train_attn and lora.train_mlp:
            return "all-linear"
        parts: list[str] = []
        if lora.train_attn:
            parts += ATTENTION
        if lora.train_mlp:
            parts += MLP
        names = [layer for layer in self._layers if any(part in layer for part in parts)]
        if not names:
            raise Refused(
                "no layer would be trained: adapters lie on attention and MLP layers, not on the"
                " output head alone"
            )
        return tuple(sorted({name.rpartition(".")[2] for name in names}))

    def _make(
        self,
        session_id: str,
        model_id: str,
        make: Callable[[], TrainedModel],
        answer: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """Promise a new model.  Raises Refused where there is no room for it."""
        with self._lock:
            if model_id in self._made:
                return {"request_id": self._made[model_id], "model_id": model_id}
            self._make_room()
            held = HeldModel(session_id, ModelTurns(self._promises, self._worker))
            self._models[model_id] = held

        def work() -> Answer:
            try:
                held.trained = make()
            except BaseException:
                with self._lock:
                    self._models.pop(model_id, None)
                raise
            return answer()

        promise = self._promises.make()
        self._made.note(model_id, promise.id)
        self._worker.begin(lambda: promise.fulfil(work))
        return {"request_id": promise.id, "model_id": model_id}

    def _make_room(self) -> None:
        """Drop the oldest model whose session has ended or is silent, if there are too many.

        Raises Refused if all are in use.
        """
        if len(self._models) < self.settings.models:
            return
        for model_id, held in self._models.items():
            session = self._sessions[held.session_id]
            if session.ended or self._clock() - session.heard > SILENT:
                log.info("%s makes room: its session is silent", model_id)
                del self._models[model_id]
                return
        raise Refused(
            f"{len(self._models)} models are in training, as many as the server holds: end a"
            " session (ServiceClient.close), or start the server with a larger --models"
        )

    def _check_base(self, name: str | None) -> None:
        """Raise Refused for the name of another model."""
        if name not in (None, self.name, self.settings.model):
            raise Refused(f"the model {name[:200]!r} is not here: this server has {self.name!r}")

    def _held(self, model_id: str) -> HeldModel:
        """Return a model.  Raises Refused where there is none."""
        with self._lock:
            held = self._models.get(model_id)
        if held is None:
            raise Refused(
                f"there is no model {model_id[:80]!r}: its session has ended, it made room for"
                " another, or the server was started anew; go on from a checkpoint",
                HTTPStatus.NOT_FOUND,
            )
        return held

    def get_info(self, model_id: str) -> dict[str, Any]:
        """Describe a model."""
        rank = self._held(model_id).model().origin.rank
        data = {"arch": self.family, "model_name": self.name, "tokenizer_id": self.name}
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": self.name,
            "model_data": data,
            "is_lora": rank is not None,
            "lora_rank": rank,
        }

    def forward_backward(self, data: bytes) -> dict[str, Any]:
        """Promise the loss of a batch, and its gradient."""
        request = read_batch(data)
        if request.number < 1:
            raise Refused(f"seq_id must be at least 1, got {request.number}")
        held = self._held(request.model_id)
        return self._in_turn(
            request.model_id, request.number, lambda: held.model().run_batch(request)
        )

    def optim_step(self, body: OptimStepBody) -> dict[str, Any]:
        """Promise a step of the optimizer."""
        adam, held = body.adam(), self._held(body.model_id)
        return self._in_turn(body.model_id, body.seq_id, lambda: held.model().step(adam))

    def save_weights(self, body: SaveBody) -> dict[str, Any]:
        """Promise a checkpoint with the optimizer's state."""
        place = CheckpointPlace(body.model_id, WEIGHTS, name_of(body.path))
        held = self._held(body.model_id)

        def work() -> Answer:
            self._save(held, place, body.user_metadata, overwrite=body.overwrite)
            return {"type": "save_weights", "path": place.path}

        return self._in_turn(body.model_id, body.seq_id, work)

    def _save(
        self,
        held: HeldModel,
        place: CheckpointPlace,
        metadata: dict[str, str] | None,
        *,
        overwrite: bool,
    ) -> None:
        folder = place.folder(self.settings.root)
        if folder.exists() and not overwrite:
            raise Refused(f"{place.path} is there already: choose another name, or overwrite it")
        held.model().save(folder, metadata or {}, optimizer=place.kind == WEIGHTS)

    def save_for_sampler(self, body: SaveForSamplerBody) -> dict[str, Any]:
        """Promise weights to sample from: under a name, or for one sampler."""
        body.check()
        held = self._held(body.model_id)
        place = None
        if body.path is not None:
            place = CheckpointPlace(body.model_id, SAMPLER, name_of(body.path))
        sampler_id = f"{held.session_id}:sample:{body.sampling_session_seq_id}"

        def work() -> Answer:
            if place is not None:
                self._save(held, place, body.user_metadata, overwrite=False)
                return {"type": "save_weights_for_sampler", "path": place.path}
            self.samplers.hold_snapshot(sampler_id, held.model().snapshot())
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._in_turn(body.model_id, body.seq_id, work)

    def load_weights(self, body: LoadBody) -> dict[str, Any]:
        """Promise the weights of a checkpoint: in a model that is there, or as a new one."""
        body.check()
        self._check_base(body.base_model)
        place = CheckpointPlace.read(body.path)

        def read() -> TrainedModel:
            path = place.newest(self.settings.root)
            return TrainedModel.load(path, self.base, optimizer=body.optimizer)

        if body.model_id is not None and body.seq_id is not None:
            held = self._held(body.model_id)

            def replace_weights() -> Answer:
                model = read()
                if model.origin.rank != held.model().origin.rank:
                    raise Refused(
                        f"{place.path} has an adapter of rank {model.origin.rank}, and the model"
                        f" one of rank {held.model().origin.rank}: make a new model of it"
                        " (create_training_client_from_state)"
                    )
                held.trained = model
                return {"type": "load_weights", "path": body.path, "model_id": body.model_id}

            return self._in_turn(body.model_id, body.seq_id, replace_weights)
        assert body.session_id is not None
        self._session(body.session_id)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"

        def answer() -> dict[str, Any]:
            return {"type": "load_weights", "path": body.path, "model_id": model_id}

        return self._make(body.session_id, model_id, read, answer)

    def leave_out(self, body: NumberedBody) -> None:
        """Note that a request of a model was refused: those behind it do not wait for it."""
        with self._lock:
            held = self._models.get(body.model_id or "")
        if held is not None and body.seq_id is not None:
            held.turns.skip(body.seq_id)

    # ---- sampling

    def create_sampler(self, body: CreateSamplerBody) -> dict[str, Any]:
        """Name a sampler: of the base model, or of a checkpoint."""
        self._session(body.session_id)
        self._check_base(body.base_model)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        self.samplers.create(sampler_id, body.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    # ---- promises

    def retrieve(self, request_id: str, seconds: float) -> Answer:
        """Wait so long for a result; an answer that has the SDK ask again if it is not there."""
        answer = self._promises.result(request_id, seconds)
        if answer is None:
            return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return answer

    def _in_turn(self, model_id: str, number: int, work: Callable[[], Answer]) -> dict[str, Any]:
        """Promise work on a model, when it is its turn."""
        request_id = self._held(model_id).turns.submit(number, work)
        return {"request_id": request_id, "model_id": model_id}
