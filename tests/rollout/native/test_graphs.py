"""Decoding in shapes that stay: the plain version's tokens, and nothing in a step that a recording could not hold."""

import gc
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import fields

import numpy as np
import pytest
import torch
from all_pairs import all_pairs
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.config.settings import ModelSettings
from groupwise.errors import EngineError
from groupwise.ops.cpu import decoding, kernels
from groupwise.records import Finish, Sampling
from groupwise.rollout.episodes import Conversations
from groupwise.rollout.native import attention, graphs
from groupwise.rollout.native import engine as native
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.native.forward import SpecialisedForward
from groupwise.rollout.native.graphs import GPU_TOKENS_PER_SYNC, Buffers, GraphDecode, rounded_up
from groupwise.rollout.native.kv_cache import KVCache

FAMILIES = ["gpt2", "llama", "mistral", "qwen2", "qwen3"]


class Traced:
    """In the place of `graphs.Recorder` on a CPU: the operations of one run, replayed on the same tensors without any Python."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, device):
        return self

    def record(self, step):
        _, buffers = step.args
        tensors = [getattr(buffers, field.name) for field in fields(buffers)]
        before = [tensor.clone() for tensor in tensors]
        recording = make_fx(lambda: [step(), torch.zeros(())][1])()
        for tensor, old in zip(tensors, before, strict=True):  # a CUDA graph does not run while it is recorded
            tensor.copy_(old)
        self.recordings += 1

        def replay() -> None:
            self.replays += 1
            recording()

        return replay


@pytest.fixture
def plain(monkeypatch):
    """No compiled kernels, as on a GPU."""
    for module in (kernels, decoding):
        monkeypatch.setattr(module, "library", lambda: None)


@pytest.fixture
def traced(plain, monkeypatch):
    """The CPU decodes as a GPU does."""
    found = Traced()
    monkeypatch.setattr(graphs, "Recorder", found)
    return found


def sampled(policy, prompts, sampling, monkeypatch, *, recorded, limit=None, group_size=3, max_rows=64):
    class Engine(NativeEngine):
        def limit(self, prompt, index, sampling):
            return super().limit(prompt, index, sampling) if limit is None else limit(int(prompt.id[1:]), index)

    with monkeypatch.context() as patch:
        patch.setattr(native, "RECORDED", ("cpu",) if recorded else ())
        patch.setitem(native.TOKENS_PER_SYNC, "cpu", GPU_TOKENS_PER_SYNC if recorded else 1)
        groups = Engine(policy, max_rows=max_rows).generate(prompts, group_size=group_size, sampling=sampling, seed=3)
        return {rollout.prompt.id + str(rollout.index): rollout for group in groups for rollout in group}


def same(left, right):
    assert left.keys() == right.keys()
    for name, a in left.items():
        assert a.tokens.tolist() == right[name].tokens.tolist()
        assert a.finish is right[name].finish
        np.testing.assert_allclose(a.behavior_logp, right[name].behavior_logp, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "max_rows", "sampling"),
    all_pairs(FAMILIES, [64, 5], [Sampling(max_new_tokens=50, temperature=0.8), Sampling(max_new_tokens=20, temperature=0.0)]),
)
def test_what_is_replayed_draws_what_the_plain_version_draws(
    family, max_rows, sampling, policy_of, prompts_of, traced, monkeypatch
):
    options = {"sliding_window": 6} if family == "mistral" else {}
    policy, prompts = policy_of(family, dtype=torch.float32, context=128, sharpness=2.0, **options), prompts_of(9, 3, 14, 1, 9)
    found = sampled(policy, prompts, sampling, monkeypatch, recorded=True, max_rows=max_rows)
    same(found, sampled(policy, prompts, sampling, monkeypatch, recorded=False, max_rows=max_rows))
    assert traced.replays > traced.recordings > 0
    assert {rollout.finish for rollout in found.values()} >= ({Finish.EOS} if sampling.temperature else set())


@pytest.mark.slow
def test_capacities_grow_rows_leave_and_others_take_their_place(policy_of, prompts_of, traced, monkeypatch):
    policy, prompts = (
        policy_of("qwen2", dtype=torch.float32, context=512, vocabulary=700, sharpness=0.2),
        prompts_of(20, 7, 33, 12, 4, 90, 9),
    )
    lengths = np.random.default_rng(0).integers(1, 330, size=(7, 4))
    shapes = Counter()
    one = GraphDecode._one

    def counted(self, shape, buffers):
        shapes[shape] += 1
        one(self, shape, buffers)

    monkeypatch.setattr(GraphDecode, "_one", counted)
    monkeypatch.setattr(graphs, "chunk_rows", lambda *_, **__: 5)
    how = {"limit": lambda prompt, index: int(lengths[prompt, index]), "group_size": 4, "max_rows": 18}
    found = sampled(policy, prompts, Sampling(max_new_tokens=400), monkeypatch, recorded=True, **how)
    assert len({shape.own for shape in shapes}) > 4
    assert len({shape.rows for shape in shapes}) > 2
    assert len({shape.prompt for shape in shapes}) > 1
    assert len({shape.capacities for shape in shapes}) > 2
    # A shape is recorded at its second token, and once.
    assert traced.recordings == sum(count > 1 for count in shapes.values())
    assert traced.replays == shapes.total() - len(shapes)
    same(found, sampled(policy, prompts, Sampling(max_new_tokens=400), monkeypatch, recorded=False, **how))


def test_a_model_that_is_altered_between_groups_is_decoded_through_its_modules(policy_of, prompts_of, traced, monkeypatch):
    """Nothing is kept between these groups, so nobody has to read what the other way has written."""
    policy, prompts = policy_of("llama", dtype=torch.float32, sharpness=0.2, vocabulary=700), prompts_of(5, 9)
    sampling = Sampling(max_new_tokens=12)  # the rows of a group end together
    expected = sampled(policy, prompts, sampling, monkeypatch, recorded=False)
    monkeypatch.setattr(native, "RECORDED", ("cpu",))
    engine = NativeEngine(policy, max_rows=3)
    groups = engine.generate(prompts, group_size=3, sampling=sampling, seed=3)
    found = list(next(groups))
    assert traced.replays
    policy.model.model.layers[0].register_forward_hook(lambda *_: None)
    engine.set_version(1)
    found += next(groups)
    same({rollout.prompt.id + str(rollout.index): rollout for rollout in found}, expected)


def test_prompts_that_are_kept_for_waiting_rows_are_not_read_another_way(policy_of, prompts_of, traced, monkeypatch):
    policy, (prompt,) = policy_of("llama", dtype=torch.float32), prompts_of(5)
    monkeypatch.setattr(native, "RECORDED", ("cpu",))
    sampling = Sampling(max_new_tokens=1)
    run = native._Run(NativeEngine(policy, max_rows=1), [prompt], 3, sampling, 3, Conversations(policy, None, sampling, 3))
    with torch.inference_mode():
        run._prepare()
        run._admit()
        assert run.pasts
        assert not run.live
        policy.model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.raises(EngineError, match="altered"):
            run._prepare()


@pytest.mark.parametrize("family", FAMILIES)
def test_rooms_of_whole_eights_change_nothing_in_the_plain_version(family, policy_of, prompts_of, plain, monkeypatch):
    """What models that are not known, and sampling that truncates, decode by on a GPU."""
    options = {"sliding_window": 6} if family == "mistral" else {}
    policy, prompts = policy_of(family, dtype=torch.float32, context=128, sharpness=2.0, **options), prompts_of(9, 3, 14, 1, 9)
    sampling = Sampling(max_new_tokens=30, top_k=5)
    expected = sampled(policy, prompts, sampling, monkeypatch, recorded=False, max_rows=7)
    monkeypatch.setattr(attention, "ALIGNS", ("cpu",))
    same(sampled(policy, prompts, sampling, monkeypatch, recorded=False, max_rows=7), expected)


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_lower_precisions_are_as_near_to_the_plain_version_as_it_is_to_itself(
    precision, policy_of, prompts_of, scored, plain, monkeypatch
):
    """Without a recorder: what is left is the step itself, in shapes that stay."""
    setting = ModelSettings(device="cpu", dtype=precision)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    policy, prompts = policy_of("qwen3", dtype=dtype, setting=setting, context=128), prompts_of(9, 3, 14)
    wide = policy_of("qwen3", dtype=torch.float32, context=128)
    wide.model.load_state_dict({name: tensor.float() for name, tensor in policy.model.state_dict().items()})
    far = {}
    for recorded in (True, False):
        found = sampled(policy, prompts, Sampling(max_new_tokens=30), monkeypatch, recorded=recorded)
        far[recorded] = np.sqrt(
            np.mean(np.concatenate([rollout.behavior_logp - scored(wide, rollout) for rollout in found.values()]) ** 2)
        )
    assert 0.0 < far[True] < 1.2 * far[False]


@pytest.mark.slow
def test_stop_strings_and_tokens_behind_an_end(policy_of, prompts_of, traced, monkeypatch):
    policy, prompts = policy_of("llama", dtype=torch.float32, sharpness=2.0), prompts_of(5, 9, 2)
    sampling = Sampling(max_new_tokens=30, stop=("0", "3"))
    found = sampled(policy, prompts, sampling, monkeypatch, recorded=True, max_rows=4)
    same(found, sampled(policy, prompts, sampling, monkeypatch, recorded=False, max_rows=4))
    assert {Finish.STOP} < {rollout.finish for rollout in found.values()}


@pytest.mark.slow
def test_new_weights_are_recorded_anew(policy_of, prompts_of, traced, monkeypatch):
    """Weights that change between two groups are those of all tokens drawn from then on."""
    policy, prompts = policy_of("llama", dtype=torch.float32, sharpness=0.2, vocabulary=700, context=256), prompts_of(5, 9)
    monkeypatch.setattr(native, "RECORDED", ("cpu",))
    monkeypatch.setitem(native.TOKENS_PER_SYNC, "cpu", GPU_TOKENS_PER_SYNC)

    class Engine(NativeEngine):
        def limit(self, prompt, index, sampling):
            return 40 if prompt.id == "p0" else 120

    engine = Engine(policy, max_rows=8)
    groups = engine.generate(prompts, group_size=2, sampling=Sampling(max_new_tokens=200), seed=3)
    next(groups)
    before = traced.recordings
    with torch.no_grad():
        policy.model.lm_head.weight.zero_()
    engine.set_version(1)
    (last,) = list(groups)
    assert traced.recordings > before
    for rollout in last:
        np.testing.assert_allclose(rollout.behavior_logp[60:], -np.log(policy.vocabulary), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "sampling"),
    [
        ("qwen2", {}, Sampling(max_new_tokens=9)),
        ("mistral", {"sliding_window": 8}, Sampling(max_new_tokens=9, temperature=0.0)),
        ("qwen3", {}, Sampling(max_new_tokens=9, temperature=0.7)),
        ("gpt2", {}, Sampling(max_new_tokens=9)),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_a_step_on_a_gpu_waits_for_nothing(precision, family, options, sampling, policy_of):
    """With tensors that have shapes and types but hold no numbers: one that is read back raises, and nothing may come from the host
    or go there, which a recording could not hold either."""

    class Crossings(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: Counter[str] = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            self.found[str(func)] += any(tensor.device.type != "meta" for tensor in tensors)
            return out

    policy = policy_of(family, dtype=torch.float32, setting=ModelSettings(device="cpu", dtype=precision), **options)
    policy.model.to("meta")
    with torch.no_grad():
        forward = SpecialisedForward(policy, 64)
        prompts, own = KVCache(4, 16, most_tokens=16), KVCache(12, 64, most_tokens=64)
        for layer in range(len(forward.layers)):
            prompts.layer(layer, torch.empty(1, forward.shared, forward.width, dtype=forward.dtype, device="meta"))
        decode = GraphDecode(forward, sampling, prompts, own, torch.device("meta"), members=3, vocabulary=policy.vocabulary)
        decode.arrange([9, 16, 3, 4], [0, 0, 1, 1, 2, 3, 3, 3, 2, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        shape = decode._fit(20)
        buffers = Buffers.of(shape, 3, forward.shared, torch.device("meta"))
        with Crossings() as seen:
            decode._step(shape, buffers)
    assert not {name for name, crossings in seen.found.items() if crossings}
    assert seen.found.keys() >= {"aten._scaled_dot_product_efficient_attention.default", "aten.index_copy_.default"}


def on_a_gpu(policy, prompts, monkeypatch, *, recorded):
    policy.model.to("cuda")
    with monkeypatch.context() as patch:
        patch.setattr(native, "RECORDED", ("cuda",) if recorded else ())
        groups = NativeEngine(policy, max_rows=7).generate(prompts, group_size=3, sampling=Sampling(max_new_tokens=150), seed=3)
        return {rollout.prompt.id + str(rollout.index): rollout for group in groups for rollout in group}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recording_on_a_gpu_draws_what_its_step_draws(family, precision, policy_of, prompts_of, scored, monkeypatch):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    setting = ModelSettings(device="cpu", dtype=precision)
    policy, prompts = policy_of(family, dtype=dtype, setting=setting, context=256, sharpness=1.0), prompts_of(9, 3, 14, 1, 9)
    recordings = []
    record = graphs.Recorder.record
    monkeypatch.setattr(graphs.Recorder, "record", lambda self, step: recordings.append(record(self, step)) or recordings[-1])
    found = on_a_gpu(policy, prompts, monkeypatch, recorded=True)
    assert recordings
    assert None not in recordings
    if precision == "float32":
        same(found, on_a_gpu(policy, prompts, monkeypatch, recorded=False))
    policy.model.to("cpu")
    for rollout in found.values():
        bound = 1e-3 if precision == "float32" else 0.2
        np.testing.assert_allclose(rollout.behavior_logp, scored(policy, rollout), rtol=0, atol=bound)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_back_what_rollouts_took(policy_of, prompts_of, monkeypatch):
    policy, prompts = policy_of("qwen2", dtype=torch.float32, context=256, sharpness=1.0), prompts_of(9, 3, 14, 1, 9)
    reserved = []
    for _ in range(4):
        on_a_gpu(policy, prompts, monkeypatch, recorded=True)
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= reserved[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_capture_that_fails_on_a_gpu_leaves_everything_as_it_was(policy_of, prompts_of, monkeypatch):
    policy, prompts = policy_of("qwen2", dtype=torch.float32, context=256, sharpness=1.0), prompts_of(9, 3, 14, 1, 9)
    expected, stream = on_a_gpu(policy, prompts, monkeypatch, recorded=True), torch.cuda.current_stream()
    step = GraphDecode._step

    def waiting(self, shape, buffers):
        step(self, shape, buffers)
        buffers.turn_1.item()

    monkeypatch.setattr(GraphDecode, "_step", waiting)
    monkeypatch.setattr(graphs, "_FAILED", set())
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        same(on_a_gpu(policy, prompts, monkeypatch, recorded=True), expected)
    same(on_a_gpu(policy, prompts, monkeypatch, recorded=True), expected)
    torch.cuda.empty_cache()
    assert torch.cuda.current_stream() == stream
    torch.ones(3, device="cuda", requires_grad=True).sum().backward()


class Capture:
    """CUDA's part in recording: notes what it is asked, and fails like a capture that an operation has made impossible."""

    def __init__(self, monkeypatch, *, fails):
        self.asked, self.fails = [], fails
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: self.around(name))
        for name in ("Stream", "synchronize", "empty_cache", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, lambda name=name: self.asked.append(name) or name)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: self.asked.append("told"), raising=False)
        monkeypatch.setattr(graphs, "_FREE", {})
        monkeypatch.setattr(graphs, "_FAILED", set())

    @contextmanager
    def around(self, name):
        self.asked.append(f"{name} in")
        try:
            yield
        finally:
            self.asked.append(f"{name} out")

    def capture_begin(self, pool, capture_error_mode):
        assert (pool, capture_error_mode) == ("graph_pool_handle", "thread_local")
        self.asked.append("begin")

    def capture_end(self):
        self.asked.append("end")
        if self.fails:
            raise RuntimeError("capture failed due to a previous error")

    def replay(self):
        self.asked.append("replay")


ONCE = ["Stream", "graph_pool_handle", "empty_cache"]


def test_a_step_is_recorded_on_a_stream_of_its_own(monkeypatch):
    capture, recorder = Capture(monkeypatch, fails=False), graphs.Recorder(torch.device("cuda"))
    for _ in range(2):
        recorder.record(lambda: capture.asked.append("step"))()
    one = ["synchronize", "stream in", "begin", "step", "end", "stream out", "device out", "replay"]
    assert capture.asked == ["device in", *ONCE, *one, "device in", *one]
    # Who comes next takes the stream of one that is gone.
    del recorder
    capture.asked.clear()
    graphs.Recorder(torch.device("cuda")).record(lambda: None)
    assert capture.asked[:3] == ["device in", "graph_pool_handle", "empty_cache"]


def test_a_step_that_cannot_be_recorded_is_left_as_it_is_and_nothing_after_it_is_tried(monkeypatch):
    capture, recorder = Capture(monkeypatch, fails=True), graphs.Recorder(torch.device("cuda"))

    class Step:
        def __call__(self) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    step = Step()
    left = weakref.ref(step)
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="not permitted"):
            assert recorder.record(step) is None
        del step
        assert left() is None  # no cycle keeps what the step has on the device
    finally:
        gc.enable()
    seen = ["device in", *ONCE, "synchronize", "stream in", "begin", "end", "told", "stream out", "device out"]
    assert capture.asked == seen
    assert recorder.record(Step()) is None
    assert graphs.Recorder(torch.device("cuda")).record(Step()) is None
    assert capture.asked == seen


def test_sizes_are_few_and_waste_little():
    for least in (2, 8, 64):
        sizes = [rounded_up(count, least) for count in range(1, 5000)]
        assert all(count <= size < max(count + least, 1.25 * count + 1) for count, size in enumerate(sizes, 1))
        assert len(set(sizes)) < 4 * 13
