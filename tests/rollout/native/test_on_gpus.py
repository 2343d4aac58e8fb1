"""What a GPU decodes by, as far as a CPU can show it: several tokens before anybody looks, in places of whole eights."""

import contextlib
import gc
import itertools
import warnings
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.config.settings import LoraSettings, ModelSettings
from groupwise.errors import EngineError
from groupwise.models import lora, sharded
from groupwise.models.lora import model_without_layers
from groupwise.models.policy import without_adapter
from groupwise.models.reach import copy_reach
from groupwise.models.shape import Shape
from groupwise.ops import operations as ops
from groupwise.records import Finish, Sampling
from groupwise.rollout import gathered as gathered_engine
from groupwise.rollout import sampling as draws
from groupwise.rollout.native import decode, decode_attention, engine, kv_cache, scheduler
from groupwise.rollout.native.cuda import ahead, cuda_graphs, workspace
from groupwise.rollout.native.cuda.recorded_decode import RecordedDecode
from groupwise.rollout.native.decode_attention import DecodeSize, LiveRows
from groupwise.rollout.native.engine import ModuleForward, NativeEngine
from groupwise.rollout.native.forward import SpecialisedForward
from groupwise.rollout.native.kv_cache import KVCache
from groupwise.rollout.native.sequences import LiveSequences
from groupwise.runs.plan import Load, prepared_weights, process_memory

FAMILIES = ["gpt2", "llama", "mistral", "qwen2", "qwen3"]


def sampled(policy, prompts, sampling, *, max_rows=64):
    return drawn_by(NativeEngine(policy, max_rows=max_rows), prompts, sampling)


def drawn_by(sampler, prompts, sampling):
    groups = sampler.generate(prompts, group_size=3, sampling=sampling, seed=3)
    return {rollout.prompt.id + str(rollout.index): rollout for group in groups for rollout in group}


def same(left, right):
    assert left.keys() == right.keys()
    for name, a in left.items():
        assert a.tokens.tolist() == right[name].tokens.tolist()
        assert a.finish is right[name].finish
        np.testing.assert_allclose(a.behavior_logp, right[name].behavior_logp, rtol=0, atol=1e-4)
        assert [ids.tolist() for ids in a.support or ()] == [ids.tolist() for ids in right[name].support or ()]


@pytest.fixture
def plain(monkeypatch):
    """No compiled kernels, as on a GPU."""
    monkeypatch.setattr(ops, "_chosen", ops.Operations())


class ModuleEngine(NativeEngine):
    """The native engine, always through the modules."""

    def prepared(self, positions, memory=None):
        return ModuleForward(self.policy)


class Recorder(TorchDispatchMode):
    """What is computed inside, as a list of operations."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.is_mkldnn]
        made = [(i, x) for i, x in enumerate(tree_leaves(out)) if isinstance(x, Tensor)]
        made = [(i, x) for i, x in made if x.untyped_storage().data_ptr() not in inputs]
        self.operations.append((func, args, kwargs or {}, made))
        return out


class Record:
    """As a CUDA graph: operations are repeated on the same memory, and Python is not asked again."""

    def __init__(self, step, beside=None):
        with Recorder() as recorder:
            step()
        self.operations, self.repeated = recorder.operations, 0

    def replay(self):
        self.repeated += 1
        for func, args, kwargs, made in self.operations if self.repeated > 1 else ():  # what is recorded on a GPU is not computed
            found = tree_leaves(func(*args, **kwargs))
            for i, x in made:
                x.copy_(found[i])


def as_on_a_gpu(patch):
    patch.setattr(kv_cache, "ALIGNS", ("cpu",))
    patch.setattr(engine, "GPUS", ("cpu",))
    patch.setattr(cuda_graphs, "recorded", Record)
    patch.setattr(workspace, "most_bytes", lambda device: 1 << 30)
    patch.setitem(scheduler.TOKENS_PER_SYNC, "cpu", scheduler.TOKENS_PER_SYNC["cuda"])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=30, temperature=0.8),
        Sampling(max_new_tokens=30, top_k=5),
        Sampling(max_new_tokens=30, temperature=0.9, top_p=0.8, min_p=0.01),
        Sampling(max_new_tokens=20, temperature=0.0),
        Sampling(max_new_tokens=30, stop=("0", "3")),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpus_way_draws_what_a_cpus_draws(family, sampling, policy_of, prompts_of, plain, monkeypatch):
    options = {"sliding_window": 6} if family == "mistral" else {}
    policy, prompts = policy_of(family, dtype=torch.float32, context=128, sharpness=2.0, **options), prompts_of(9, 3, 14, 1, 9)
    expected = sampled(policy, prompts, sampling, max_rows=7)
    as_on_a_gpu(monkeypatch)
    records = []

    def recorded(step, beside):
        records.append(Record(step))
        return records[-1]

    monkeypatch.setattr(cuda_graphs, "recorded", recorded)
    found = sampled(policy, prompts, sampling, max_rows=7)
    same(found, expected)
    assert any(record.repeated > 1 for record in records)
    assert {rollout.finish for rollout in found.values()} >= ({Finish.STOP} if sampling.stop else set())


@pytest.fixture
def records(monkeypatch):
    """Decode as on a GPU; the records that are made."""
    as_on_a_gpu(monkeypatch)
    made = []

    def recorded(step, beside):
        made.append(Record(step))
        return made[-1]

    monkeypatch.setattr(cuda_graphs, "recorded", recorded)
    return made


@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_later_rollouts_draw_new_weights_from_the_first_ones_records(family, precision, policy_of, prompts_of, plain, records):
    setting = ModelSettings(device="cpu", dtype=precision)
    policy = replace(policy_of(family, dtype=torch.float32, setting=setting, context=128, sharpness=2.0), eos_ids=())
    prompts, sampling = prompts_of(9, 3, 14), Sampling(max_new_tokens=90, temperature=0.8)

    class Engine(NativeEngine):
        def limit(self, prompt, index, sampling):
            return 70 + 5 * index

    sampler = Engine(policy, max_rows=7)
    made = []
    for version in range(3):
        sampler.send_weights(version)
        found = drawn_by(sampler, prompts, sampling)
        made.append(len(records))
        same(found, drawn_by(Engine(policy, max_rows=7), prompts, sampling))
        del records[made[0] :]
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.1).add_(0.01)
    assert made[0] > 1
    assert made == made[:1] * 3


def test_the_next_tokens_are_launched_before_the_last_are_read(policy_of, prompts_of, plain, records, monkeypatch):
    """A GPU would wait while the host reads, ends rows and launches."""
    events = []
    for name, function in (("launch", ahead.LaunchedTokens.__init__), ("read", ahead.LaunchedTokens.read)):

        def heard(*given, name=name, function=function):
            events.append(name)
            return function(*given)

        monkeypatch.setattr(ahead.LaunchedTokens, "__init__" if name == "launch" else "read", heard)
    policy, prompts = policy_of("llama", dtype=torch.float32, context=128, sharpness=2.0), prompts_of(9, 3, 14)
    found = sampled(policy, prompts, Sampling(max_new_tokens=60))
    assert len({rollout.tokens.size for rollout in found.values()}) > 2, "rows end at different readings"
    reads = events.count("read")
    assert reads > 4 and events == ["launch", *["launch", "read"] * (reads - 1), "read"]


def test_tokens_launched_before_the_weights_changed_have_their_version(policy_of, prompts_of, plain, records, monkeypatch):
    policy, prompts = policy_of("llama", dtype=torch.float32, context=128, sharpness=1.0), prompts_of(9, 3, 14)
    sampler, drawn = NativeEngine(policy, max_rows=64), [0]
    launch = ahead.AheadScheduler._launch

    def counted(self):
        before = self.launched
        launch(self)
        if self.launched is not before:
            drawn.extend([sampler.version] * self.launched.count)

    monkeypatch.setattr(ahead.AheadScheduler, "_launch", counted)
    found = []
    for version, group in enumerate(sampler.generate(prompts, group_size=3, sampling=Sampling(max_new_tokens=60), seed=3), 1):
        found += group
        with torch.no_grad():
            policy.model.lm_head.weight.mul_(1.5)
        sampler.send_weights(version)
    assert max(int(rollout.version[-1]) for rollout in found) > 0
    for rollout in found:
        assert rollout.version.tolist() == drawn[: len(rollout)]


def adapted(policy):
    """The policy with an adapter that does something."""
    policy = lora.adapt(policy, LoraSettings(rank=3), base="x", seed=0)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return policy


def plain_policy(policy, *, merge):
    model = model_without_layers(policy.model, on=True, merge=merge)
    copy_reach(policy.model, model)
    return replace(policy, model=model, adapter=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_merged_into_what_a_gpu_decodes_with(family, policy_of, prompts_of, plain, records):
    policy = adapted(policy_of(family, dtype=torch.float32, context=128, sharpness=1.5))
    prompts, sampling = prompts_of(9, 3, 14), Sampling(max_new_tokens=30)
    sampler = NativeEngine(policy, max_rows=7)
    assert sampler.path == "specialised"
    made = []
    for version in range(3):
        sampler.send_weights(version)
        found = drawn_by(sampler, prompts, sampling)
        made.append(len(records))
        same(found, sampled(plain_policy(policy, merge=True), prompts, sampling, max_rows=7))
        same(found, drawn_by(ModuleEngine(policy, max_rows=7), prompts, sampling))
        del records[made[0] :]
        with torch.no_grad():
            for name in policy.adapter.trained:
                policy.model.get_parameter(name).mul_(1.2)
    assert made[0] > 0
    below = drawn_by(NativeEngine(without_adapter(policy), max_rows=7), prompts, sampling)
    same(below, sampled(plain_policy(policy, merge=False), prompts, sampling, max_rows=7))


def test_recorded_truncation_draws_again_where_candidates_were_too_few(policy_of, prompts_of, plain, monkeypatch):
    monkeypatch.setattr(draws, "CANDIDATES", 4)
    policy, prompts, sampling = (
        policy_of("llama", dtype=torch.float32, context=128, sharpness=1.5),
        prompts_of(9, 3, 14),
        Sampling(max_new_tokens=30, top_p=0.9),
    )
    expected = sampled(policy, prompts, sampling)
    again = []
    drawn_behind = decode.TokenDecode._drawn_behind

    def counted(self, hidden_RD, place_R, uniform_RT):
        again.append(len(hidden_RD))
        return drawn_behind(self, hidden_RD, place_R, uniform_RT)

    monkeypatch.setattr(decode.TokenDecode, "_drawn_behind", counted)
    as_on_a_gpu(monkeypatch)
    same(sampled(policy, prompts, sampling), expected)
    assert again


def test_a_gpu_that_cannot_record_draws_all_the_same(policy_of, prompts_of, plain, monkeypatch):
    policy, prompts = policy_of("llama", dtype=torch.float32, context=128, sharpness=2.0), prompts_of(9, 3, 14)
    expected = sampled(policy, prompts, Sampling(max_new_tokens=30))
    as_on_a_gpu(monkeypatch)

    def fails(step, beside):
        raise RuntimeError("no capture here")

    monkeypatch.setattr(cuda_graphs, "recorded", fails)
    with pytest.warns(UserWarning, match="without CUDA graphs, more slowly: no capture here"):
        same(sampled(policy, prompts, Sampling(max_new_tokens=30)), expected)


@pytest.mark.parametrize(("prompt", "rows", "length"), [(9, 8, 40), (30, 4, 64)])
def test_caches_that_stay_between_two_rollouts_are_those_of_the_plan(prompt, rows, length, policy_of, prompts_of, monkeypatch):
    """Each prompt and completion at its longest; caches come in blocks, so a tenth more may lie there.  Prepared weights beside
    them: tests/runs/test_plan.py.
    """
    policy = policy_of("llama", dtype=torch.float32, context=128, sharpness=2.0)
    as_on_a_gpu(monkeypatch)
    made = NativeEngine(policy, max_rows=rows)
    list(made.generate(prompts_of(prompt, prompt), group_size=rows // 2, sampling=Sampling(max_new_tokens=length), seed=0))
    shape = Shape.of_policy(policy)
    load = Load(
        prompts=2, group=rows // 2, prompt_tokens=prompt, completion_tokens=length, max_tokens_per_microbatch=512,
        rows=rows, prepared=prepared_weights(shape, cpu=False), cpu=False,
    )  # fmt: skip
    stays = made._gpu._workspace
    planned = process_memory(shape, load, prompts=2).kept - load.prepared
    assert planned <= stays.prompts.bytes + stays.own.bytes <= 1.1 * planned


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_memory_beyond_what_may_stay_is_free_once_rollouts_are_there(device, policy_of, prompts_of, plain, monkeypatch):
    """Training needs it next, and new weights are prepared when the old ones are gone: nobody waits for a garbage collection."""
    policy, prompts = policy_of("llama", dtype=torch.float32, context=128, sharpness=2.0), prompts_of(9, 3, 14)
    if device == "gpu":
        as_on_a_gpu(monkeypatch)

        def fails(step, beside):
            raise RuntimeError("no capture here")  # what repeats a step here would hold it; a CUDA graph does not

        monkeypatch.setattr(cuda_graphs, "recorded", fails)
        monkeypatch.setattr(workspace, "most_bytes", lambda device: 0)
    used = []

    class Store(KVCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            used.append(weakref.ref(self))

    class Engine(NativeEngine):
        def prepared(self, positions, memory):
            forward = super().prepared(positions, memory)
            used.append(weakref.ref(forward))
            return forward

    monkeypatch.setattr(scheduler, "KVCache", Store)
    sampler = Engine(policy, max_rows=4)
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(action="ignore"):
            groups = sampler.generate(prompts, group_size=3, sampling=Sampling(max_new_tokens=30), seed=3)
            next(groups)
            first = used[-1]
            sampler.send_weights(1)
            next(groups)
            assert first() is None and len(used) == 4
            list(groups)
        assert not [one for one in used if one() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_weights_that_were_gathered_for_a_call_are_gone_after_it(device, policy_of, prompts_of, plain, monkeypatch):
    """Also those under an adapter, which is merged into a model that shares them: the update needs their memory."""
    policy = adapted(policy_of("llama", dtype=torch.float32, context=128))
    if device == "gpu":
        as_on_a_gpu(monkeypatch)

        def fails(step, beside):
            raise RuntimeError("no capture here")  # what repeats a step here would hold them; a CUDA graph does not

        monkeypatch.setattr(cuda_graphs, "recorded", fails)
    there = []

    @contextlib.contextmanager
    def gathered(policy):
        every = sharded._places(policy.model).values()
        for places in every:
            module, key = places[0]
            full = torch.nn.Parameter(module._parameters[key].detach().clone(), requires_grad=False)
            there.append(StorageWeakRef(full.untyped_storage()))
            for module, key in places:
                module._parameters[key] = full
        del full
        yield policy
        for places in every:
            for module, key in places:
                module._parameters[key] = sharded._empty(module._parameters[key])

    monkeypatch.setattr(gathered_engine, "gathered", gathered)
    sampler = gathered_engine.GatheredEngine(policy, partial(NativeEngine, max_rows=4))
    assert sampler.inner.path == "specialised"
    gc.disable()
    try:
        with warnings.catch_warnings(action="ignore"):
            list(sampler.generate(prompts_of(9, 3), group_size=3, sampling=Sampling(max_new_tokens=5), seed=3))
        assert there and all(storage.expired() for storage in there)
    finally:
        gc.enable()


@pytest.mark.parametrize("before", [False, True])
def test_a_process_without_prompts_keeps_what_it_has(before, policy_of, prompts_of, plain, records):
    """Of more processes than prompts some have none, and make no caches."""
    sampler, sampling = NativeEngine(policy_of("llama", dtype=torch.float32, context=128), max_rows=4), Sampling(max_new_tokens=5)
    if before:
        drawn_by(sampler, prompts_of(9, 3), sampling)
    made = len(records)
    assert drawn_by(sampler, [], sampling) == {}
    assert len(drawn_by(sampler, prompts_of(9, 3), sampling)) == 6
    assert len(records) == made if before else made == 0


def test_states_of_recurrent_layers_do_not_stay(policy_of, prompts_of, plain, monkeypatch):
    """The next call makes them anew, and they are larger than keys and values."""
    as_on_a_gpu(monkeypatch)
    sampler = NativeEngine(policy_of("qwen3_5_text", dtype=torch.float32, context=128), max_rows=4)
    states = []
    keep = kv_cache.KVCache.state

    def kept(self, place, like):
        state = keep(self, place, like)
        states.append(weakref.ref(state))
        return state

    monkeypatch.setattr(kv_cache.KVCache, "state", kept)
    drawn_by(sampler, prompts_of(9, 3), Sampling(max_new_tokens=5))
    assert sampler._gpu._workspace is not None
    assert states and not [state for state in states if state() is not None]


def test_a_model_that_is_altered_between_groups_is_decoded_through_its_modules(policy_of, prompts_of, plain, monkeypatch):
    """Nothing is kept between these groups, so nobody has to read what the other way has written."""
    policy, prompts = policy_of("llama", dtype=torch.float32, sharpness=0.2, vocabulary=700), prompts_of(5, 9)
    sampling = Sampling(max_new_tokens=12)  # the rows of a group end together
    expected = sampled(policy, prompts, sampling)
    as_on_a_gpu(monkeypatch)
    sampler = NativeEngine(policy, max_rows=3)
    groups = sampler.generate(prompts, group_size=3, sampling=sampling, seed=3)
    found = list(next(groups))
    policy.model.model.layers[0].register_forward_hook(lambda *_: None)
    sampler.send_weights(1)
    found += next(groups)
    same({rollout.prompt.id + str(rollout.index): rollout for rollout in found}, expected)


def test_prompts_that_are_kept_for_waiting_rows_are_not_read_another_way(policy_of, prompts_of, plain):
    policy, (prompt,) = policy_of("llama", dtype=torch.float32), prompts_of(5)
    sampling = Sampling(max_new_tokens=1)
    run = scheduler.Scheduler(NativeEngine(policy, max_rows=1), [prompt], 3, sampling, 3)
    with torch.inference_mode():
        run._prepare()
        run._admit()
        assert run.prompts.prefixes
        assert not run.rows.live
        policy.model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.raises(EngineError, match="altered"):
            run._prepare()


def test_weights_that_change_between_two_groups_draw_all_tokens_from_then_on(policy_of, prompts_of, plain, monkeypatch):
    policy, prompts = policy_of("llama", dtype=torch.float32, sharpness=0.2, vocabulary=700, context=256), prompts_of(5, 9)
    as_on_a_gpu(monkeypatch)

    class Engine(NativeEngine):
        def limit(self, prompt, index, sampling):
            return 20 if prompt.id == "p0" else 60

    sampler = Engine(policy, max_rows=8)
    groups = sampler.generate(prompts, group_size=2, sampling=Sampling(max_new_tokens=200), seed=3)
    next(groups)
    with torch.no_grad():
        policy.model.lm_head.weight.zero_()
    sampler.send_weights(1)
    (last,) = list(groups)
    for rollout in last:
        np.testing.assert_allclose(rollout.behavior_logp[30:], -np.log(policy.vocabulary), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "sampling"),
    [
        ("qwen2", {}, Sampling(max_new_tokens=9)),
        ("mistral", {"sliding_window": 8}, Sampling(max_new_tokens=9, temperature=0.0)),
        ("qwen3", {}, Sampling(max_new_tokens=9, temperature=0.7)),
        ("gpt2", {}, Sampling(max_new_tokens=9)),
        ("llama", {}, Sampling(max_new_tokens=9, top_k=3, top_p=0.9, min_p=0.1)),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_a_token_on_a_gpu_waits_for_nothing(precision, family, options, sampling, policy_of, monkeypatch):
    """With tensors that have shapes and types but hold no numbers: one that is read back raises, and nothing may come from the host
    or go there."""

    class Crossings(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: Counter[str] = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            self.found[str(func)] += any(tensor.device.type != "meta" for tensor in tensors)
            return out

    monkeypatch.setattr(kv_cache, "ALIGNS", ("meta",))
    monkeypatch.setattr(cuda_graphs, "recorded", lambda step, beside: SimpleNamespace(replay=step))
    policy = policy_of(family, dtype=torch.float32, setting=ModelSettings(device="cpu", dtype=precision), **options)
    policy.model.to("meta")
    device, rows = torch.device("meta"), 10
    with torch.no_grad():
        forward = SpecialisedForward(policy, 64)
        prompts, own = KVCache(4, 16, most_tokens=16), KVCache(12, 64, most_tokens=64)
        for layer in range(len(forward.layers)):
            prompts.layer(layer, torch.empty(1, forward.shared, forward.width, dtype=forward.dtype, device="meta"))
        graphs = cuda_graphs.CudaGraphs(prompts, own, device)
        drawing = RecordedDecode(forward, sampling, graphs, vocabulary=policy.vocabulary)
        drawing.arrange(LiveRows([9, 16, 3, 4], [0, 0, 1, 1, 2, 3, 3, 3, 2, 2], list(range(rows))))
        newest_R, uniform_RT = torch.empty(rows, dtype=torch.int64, device="meta"), torch.empty(rows, 64, device="meta").double()
        (first,) = drawing.draw_recorded(newest_R, uniform_RT, 1)  # who is where is written once for an arrangement
        assert drawing.graphs.draws
        with Crossings() as seen:
            drawing.draw_recorded(first.token_R, uniform_RT, 7)
    assert not {name for name, crossings in seen.found.items() if crossings}
    assert seen.found.keys() >= {"aten._scaled_dot_product_efficient_attention.default"}


class Sent(TorchDispatchMode):
    """Which copies between the host and the device are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if len({tensor.device for tensor in tensors}) > 1:
            flags = [x for x in args if isinstance(x, bool)]
            self.waited.append(not (kwargs or {}).get("non_blocking", any(flags)))
        return out


def test_rows_that_end_are_told_to_a_gpu_without_waiting_for_it():
    """It computes the tokens that were launched meanwhile."""
    device = torch.device("meta")
    size = DecodeSize(rows=4, prompts=2, members=2, prompt_tokens=16, tokens=64)
    attend = decode_attention.Decode(KVCache(2, 16, most_tokens=16), KVCache(4, 64, most_tokens=64), device, size)
    rows = LiveSequences(KVCache(4, 64, most_tokens=64))
    rows.live = [SimpleNamespace(own=own) for own in (3, 4, 5)]
    rows.store.live, rows.token_R, rows.uniform_RT = 3, torch.empty(3, device=device).long(), torch.empty(3, 9, device=device)
    with Sent() as copies:
        attend.arrange(LiveRows([9, 16], [0, 0, 1], [2, 3, 4]))
        rows.remove([1], 8)
        attend.arrange(LiveRows([9, 16], [0, 1], [2, 4]))
    assert copies.waited == [False] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_not_waited_for_where_rows_end(policy_of, prompts_of, monkeypatch):
    remove, removed = ahead.AheadScheduler._remove, []

    def watched(self, ended):
        torch.cuda.set_sync_debug_mode("error")
        try:
            remove(self, ended)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        removed.append(ended)

    monkeypatch.setattr(ahead.AheadScheduler, "_remove", watched)
    policy = policy_of("llama", dtype=torch.float32, context=128, sharpness=2.0)
    policy.model.to("cuda")
    sampled(policy, prompts_of(9, 3, 14), Sampling(max_new_tokens=60))
    assert len(removed) > 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("family", "precision"), list(itertools.product(FAMILIES, ["float32", "bfloat16", "autocast"])))
def test_a_gpu_draws_what_it_scores(family, precision, policy_of, prompts_of, scored):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    setting = ModelSettings(device="cpu", dtype=precision)
    policy, prompts = policy_of(family, dtype=dtype, setting=setting, context=256, sharpness=1.0), prompts_of(9, 3, 14, 1, 9)
    policy.model.to("cuda")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = sampled(policy, prompts, Sampling(max_new_tokens=150), max_rows=7)
    assert not [warning for warning in told if "CUDA graphs" in str(warning.message)]
    policy.model.to("cpu")
    for rollout in found.values():
        bound = 1e-3 if precision == "float32" else 0.2
        np.testing.assert_allclose(rollout.behavior_logp, scored(policy, rollout), rtol=0, atol=bound)
