"""Checkpoints that are whole or are not there: written atomically, hashed, and verified before they
are read.

    RUN/checkpoints/000100/
      policy/          Hugging Face format, written by the caller
      trainer/         state.json (numbers and text) and tensors.safetensors (by name)
      trainer/shards/  instead of tensors.safetensors: parts of tensors, by several processes
      manifest.json    size and xxh3-128 of every file above
      COMPLETE         xxh3-128 of the manifest
    RUN/latest         name of the newest

`job.Job.tensors` and `job.Job.numbers` give what is in it, `job.Job.restore` reads both.  A change
that makes older checkpoints unreadable raises `FORMAT`.  No random state is saved: each random
number is a function of the seed and of a prompt, an epoch or a step
(`rollout.sampling.stream_keys`).

A checkpoint is written under a temporary name, synced to disk, read
back for its checksums and renamed; older ones go only after that. So a process may be killed at any
moment and the newest complete checkpoint is still there. Everything is verified before it is used;
no pickle is written, or read before that.

A policy that each process holds whole is written by the first process, at once; a sharded one by
all processes, in the background, while training continues.  For a sharded policy every process
copies its shard of the optimizer state, and its share of the policy's tensors, to host memory.  A
thread then writes both.  When all have done so, the first process seals and renames the checkpoint;
until then the one before is the newest.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from groupwise.distributed import comm, fsdp, layout, process_group, sharded_checkpoint
from groupwise.errors import CheckpointError, GroupwiseError, RunError, StorageError
from groupwise.models.saving import save_to_resume
from groupwise.models.sharded import own_parts, write_parts
from groupwise.runs.final_model import check_final
from groupwise.runs.folder import FINAL
from groupwise.runs.job import Job
from groupwise.runs.run_files import RunFiles
from groupwise.utils import files, threads
from groupwise.utils.files import expanded
from groupwise.utils.terminal import logger

log = logger("groupwise")

Found = TypeVar("Found")

CHECKPOINTS, LATEST, MANIFEST, COMPLETE = "checkpoints", "latest", "manifest.json", "COMPLETE"
STATE, TENSORS = "state.json", "tensors.safetensors"
FORMAT = 3
OLDER = 2
"""The format of 0.2: its policy is read, its state is not."""
HEADROOM = 16 << 20
"""Bytes that must stay free on the disk after a save."""


# ---------------------------------------------------------------- saving


Together: TypeAlias = Callable[[Callable[[], Any]], list[Any]]
"""Calls a function on every process that writes a checkpoint; returns all results, or raises what
went wrong on any.
"""


def save(
    folder: Path,
    step: int,
    *,
    policy_writer: Callable[[Path], None],
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    keep: int = 2,
    pinned: int | None = None,
    policy_bytes: int = 0,
) -> Path:
    """Write the checkpoint of a step into a run folder and return its path; saving a step twice
    does nothing.

    policy_writer: fills the (existing, empty) folder that it is given with the model, e.g. by
        `save_pretrained`.
    state: what JSON holds (keys are texts; NaN and infinities too), and bytes.
    tensors: by name, which `read_tensors` reads into others.
    keep: newest checkpoints that stay.   pinned: a step whose checkpoint stays beside them.
    policy_bytes: what the writer will write, if known, to refuse a full disk beforehand.
    Raises StorageError if the disk is full, read-only or gone (nothing half-written stays),
    CheckpointError for a state that cannot be kept.
    """
    tensors = {name: _apart(tensor) for name, tensor in (tensors or {}).items()}
    text = _encode(state)  # refused before anything is written
    tensor_bytes = sum(tensor.nbytes for tensor in tensors.values())
    temporary = begin(folder, step, policy_bytes + tensor_bytes)

    def write() -> None:
        assert temporary is not None
        policy_writer(temporary / "policy")
        (temporary / "trainer" / STATE).write_text(text, encoding="utf-8")
        save_file(tensors, temporary / "trainer" / TENSORS)

    if temporary is not None:
        complete(temporary, step, write, keep=keep, pinned=pinned)
    return path_of(folder, step)


def begin(folder: Path, step: int, needed: int) -> Path | None:
    """An empty folder with policy/ and trainer/ in it to write a checkpoint of `needed` bytes; None
    if it is there already.

    Raises StorageError.
    """
    final = path_of(folder, step)
    root = final.parent
    with _storage(root):
        root.mkdir(exist_ok=True)
        files.sweep(root)
        if final.is_dir():
            if not damage(final):
                return None
            files.remove(final)
        needed += HEADROOM
        free = shutil.disk_usage(root).free
        if free < needed:
            raise StorageError(
                f"disk full: the checkpoint of step {step} needs {needed / 1e6:.0f} MB, {root} has"
                f" {free / 1e6:.0f} MB"
            )
        temporary = files.new_folder(final)
        for part in ("policy", "trainer"):
            (temporary / part).mkdir()
    return temporary


def complete(
    temporary: Path,
    step: int,
    write: Callable[[], None],
    *,
    keep: int = 2,
    pinned: int | None = None,
    rank: int = 0,
    size: int = 1,
    together: Together = lambda work: [work()],
) -> None:
    """Fill the folder of a checkpoint that was begun by `write`, on every process, seal it, and
    give it its name.

    keep: newest checkpoints that stay; older ones are deleted after this one has its name, but for
        the one of the step `pinned`.
    rank, size: of the processes that call this; the first decides what is there, each takes its
        share of the checksums.
    Raises StorageError.
    """
    folder = temporary.parent.parent

    def name() -> None:
        if rank == 0:
            of_all: dict[str, Mapping[str, Any]] = {}
            for part in fingerprints:
                of_all |= part
            _seal(temporary, step, of_all)
            files.rename_into(temporary, path_of(folder, step))
            # For people and other programs: `latest()` does not trust it.
            files.write(folder / LATEST, f"{path_of(folder, step).name}\n".encode())
            _rotate(folder, step, keep, pinned)

    def names() -> list[str]:
        if rank:
            return []
        return [name for name, _ in _files(temporary)]

    try:
        with _storage(temporary.parent):
            together(write)
            listed = together(names)[0]
            fingerprints = together(
                lambda: {name: files.fingerprint(temporary / name) for name in listed[rank::size]}
            )
            together(name)
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _rotate(folder: Path, step: int, keep: int, pinned: int | None) -> None:
    """Delete what is older than the `keep` newest up to `step`, but for the one of the step
    `pinned`, and damaged ones of later steps.
    """
    kept = 0
    for path in _candidates(folder / CHECKPOINTS):
        if step_of(path) > step:
            if damage(path):
                files.remove(path)
        elif kept < max(keep, 1):
            kept += 1
        elif step_of(path) != pinned:
            files.remove(path)


def _encode(state: Mapping[str, Any]) -> str:
    """State as JSON, whose numbers come back to the bit but for the bits of a NaN, and tuples as
    lists.  Raises CheckpointError for what it cannot hold.
    """

    def encoded(value: object) -> dict[str, str]:
        if not isinstance(value, bytes):
            kind = type(value)
            raise CheckpointError(
                f"a checkpoint's state holds a {kind.__module__}.{kind.__qualname__}: make it"
                " numbers or text"
            )
        return {_BYTES: base64.b64encode(value).decode()}

    return json.dumps(state, default=encoded)


def _decoded(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES]) if value.keys() == {_BYTES} else value


_BYTES = "base64"


def _seal(folder: Path, step: int, fingerprints: Mapping[str, Mapping[str, Any]]) -> None:
    """Add manifest and COMPLETE and bring them to the disk."""
    manifest = {"format": FORMAT, "step": step, "files": dict(sorted(fingerprints.items()))}
    files.write(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    files.write(folder / COMPLETE, f"{files.digest(folder / MANIFEST)}\n".encode())
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            files.sync(path)


def _apart(tensor: Tensor) -> Tensor:
    """A tensor in host memory of its own: safetensors refuses shared memory."""
    host = tensor.detach().to("cpu").contiguous()
    return host.clone() if host.untyped_storage().nbytes() != host.nbytes else host


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file below a checkpoint but its seal, by relative name."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise CheckpointError(f"{path} is not a plain file")
        if path.is_file() and name not in (MANIFEST, COMPLETE):
            yield name, path


@contextmanager
def _storage(root: Path) -> Iterator[None]:
    """Says in our words what the operating system says of a disk, and what is left."""
    try:
        with files.storing(root, "a checkpoint"):
            yield
    except StorageError as error:
        older = _candidates(root)
        if not older or "intact" in str(error):
            raise
        intact = f"the older ones ({older[0].name} and before) are intact"
        raise StorageError(f"{error}; {intact}") from error


# ---------------------------------------------------------------- saving a job


class Saver:
    """Writes checkpoints of a job; all processes make the same calls."""

    def __init__(self, folder: Path, job: Job, keep: int) -> None:
        """keep: newest checkpoints that stay."""
        self.folder, self.job, self.keep = folder, job, keep
        self._writing: Future[None] | None = None
        self._saved = 0
        """The last step that was saved."""
        self.pinned: int | None = None
        """A step whose checkpoint stays, however old it is."""

    def save(self, step: int, state: Mapping[str, Any], *, alone: bool = False) -> None:
        """Save the job as it is now, with `state` beside it, once; returns when what is saved may
        change again.

        alone: other processes may be lost: nothing is exchanged with them, so a sharded policy
            cannot be saved.
        Raises StorageError on all processes, if not now then at the next call or in `wait`.
        """
        self.wait()
        if step == self._saved:
            return
        policy, tensors = self.job.policy, self.job.tensors()
        # Of an adapter what it was put on is not written.
        weights = sum(
            one.nbytes
            for one in policy.model.parameters()
            if policy.adapter is None or one.requires_grad
        )
        if policy.sharded:
            self._begin(step, _encode(state), tensors, weights)
            return
        write = partial(
            save,
            self.folder,
            step,
            policy_writer=partial(save_to_resume, policy),
            state=state,
            tensors=tensors,
            keep=self.keep,
            pinned=self.pinned,
            policy_bytes=weights,
        )
        if not alone:
            comm.from_first(write)
        elif comm.world().first:
            write()
        self._note(step, latest(self.folder) if alone else path_of(self.folder, step))

    def wait(self) -> None:
        """Return when everything is on the disk.  Raises StorageError or PeerError if it could not
        be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _begin(self, step: int, state: str, tensors: Mapping[str, Tensor], weights: int) -> None:
        """Copy what this process holds of a sharded job, and write it in the background."""
        here, policy = comm.world(), self.job.policy
        needed = weights + sum(tensor.nbytes for tensor in tensors.values())
        temporary = comm.from_first(lambda: begin(self.folder, step, needed))
        if temporary is None:
            return
        parts = own_parts(policy)
        staged = sharded_checkpoint.Staged(
            temporary / "trainer" / sharded_checkpoint.SHARDS, tensors
        )
        group = comm.open_aside()
        pinned = self.pinned

        def write() -> None:
            staged.write(group)
            write_parts(policy, temporary / "policy", parts)
            if here.first:
                (temporary / "trainer" / STATE).write_text(state, encoding="utf-8")

        def work() -> None:
            complete(
                temporary,
                step,
                write,
                keep=self.keep,
                pinned=pinned,
                rank=here.rank,
                size=here.size,
                together=_together,
            )
            self._note(step, path_of(self.folder, step))

        self._writing = threads.begin(work, "checkpoint")

    def _note(self, step: int, newest: Path | None) -> None:
        set_failure_hint(newest)
        self._saved = step


def _together(work: Callable[[], Found]) -> list[Found]:
    """Every process's result; a failure on one is raised on all."""
    results, wrong = [], None
    try:
        results = [work()]
    except Exception as error:  # whatever it is, the others wait to hear of it
        wrong = str(error)
        if not isinstance(error, (GroupwiseError, OSError)):
            wrong = f"{type(error).__name__}: {error}"
    outcomes = comm.gather([(results, wrong)], aside=True)
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise StorageError(
                f"process {rank} could not write its part of a checkpoint: {failure}"
            )
    return [one for ones, _ in outcomes for one in ones]


def set_failure_hint(newest: Path | None) -> None:
    """Note the newest checkpoint, which the message of a later failure names."""
    hint = "nothing was saved yet (save.every): the same command begins anew"
    if newest is not None:
        hint = f"the last checkpoint is {newest}; the same command continues from there"
    process_group.set_failure_hint(hint)


# ---------------------------------------------------------------- loading


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of a run folder that is whole, or None if none was ever saved.

    A damaged one is named in a warning and passed over.  Raises CheckpointError, with every reason,
    if there are only damaged ones."""
    reasons = []
    for path in _candidates(Path(folder) / CHECKPOINTS):
        wrong = damage(path)
        if not wrong:
            for reason in reasons:
                log.warning("%s; going on from %s", reason, path.name)
            return path
        reasons.append(f"checkpoint {path} is damaged: {wrong}")
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise CheckpointError(
            f"no checkpoint of {folder} is whole; restore one, or start anew with"
            f" fresh=True:\n{listed}"
        )
    return None


def _candidates(root: Path) -> list[Path]:
    """Checkpoints by step, newest first.  Times of files do not matter."""
    saved = [path for path in root.glob("*") if path.name.isdigit() and path.is_dir()]
    return sorted(saved, key=step_of, reverse=True)


def exists(folder: Path) -> bool:
    """True if a run folder holds a checkpoint, whole or not."""
    return bool(_candidates(Path(folder) / CHECKPOINTS))


def damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint, the bad file named; None if every byte is right."""
    path = Path(path)
    for name in (COMPLETE, MANIFEST):
        if not (path / name).is_file():
            return f"{name} is missing"
    if (path / COMPLETE).read_bytes() != f"{files.digest(path / MANIFEST)}\n".encode():
        return f"{MANIFEST} and {COMPLETE} do not belong together"
    try:
        manifest = RunFiles(path).json(MANIFEST)
        if manifest["format"] not in (OLDER, FORMAT):
            return f"its format is {manifest['format']}, this version reads {FORMAT}"
        expected = {}
        for name, entry in manifest["files"].items():
            expected[name] = {"size": entry["size"], "xxh3_128": entry["xxh3_128"]}
    except (RunError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is no manifest ({error})"
    try:
        present = dict(_files(path))
    except CheckpointError as error:
        return str(error)
    for name in sorted(expected.keys() | present.keys()):
        if name not in present:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} does not belong to it"
        wrong = files.altered(present[name], expected[name])
        if wrong:
            return f"{name} {wrong}"
    return None


def load(path: Path, *, verify: bool = True) -> dict[str, Any]:
    """The state of a checkpoint.  Raises CheckpointError if a byte is wrong, and for a checkpoint
    of 0.2.

    verify: False trusts that it was just found to be whole (`latest`).
    """
    if verify and (wrong := damage(path)):
        raise CheckpointError(f"checkpoint {path} is damaged: {wrong}")
    if RunFiles(path).json(MANIFEST)["format"] == OLDER:
        raise CheckpointError(
            f"{path} was written by Groupwise 0.2, whose runs this version does not continue:"
            f" continue it with 0.2, or start anew from its weights, model.path={path / 'policy'}"
            " name=..."
        )
    return json.loads(
        (Path(path) / "trainer" / STATE).read_text(encoding="utf-8"), object_hook=_decoded
    )


def read_tensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors from those of a checkpoint, by name; of a sharded tensor this process's shard.

    Of many processes each reads what it needs.  Raises CheckpointError if one is missing or has
    another shape.
    """
    if not into:
        return
    with safe_open(str(Path(path) / "trainer" / TENSORS), framework="pt") as file:
        names = set(file.keys())
        for name, tensor in into.items():
            shard = fsdp.own(tensor)
            if name not in names or list(tensor.shape) != file.get_slice(name).get_shape():
                raise CheckpointError(
                    f"{path} holds no {name} of shape {tuple(tensor.shape)}: it is of another model"
                )
            if shard is tensor:
                shard.copy_(file.get_tensor(name))
            elif shard.numel():
                shard.copy_(layout.part_of(file.get_slice(name).__getitem__, tensor))


def reader(path: Path) -> Callable[[Mapping[str, Tensor]], None]:
    """A function that fills tensors by name, sharded or not, from a verified checkpoint, however
    many processes wrote it.
    """
    folder = path / "trainer" / sharded_checkpoint.SHARDS
    if folder.is_dir():
        return lambda into: sharded_checkpoint.read(folder, into)
    return lambda into: read_tensors(path, into)


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in a run folder."""
    return Path(folder) / CHECKPOINTS / f"{step:06d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(Path(path).name)


def policy_folder(path: Path | str) -> Path:
    """The Hugging Face folder meant by a path: such a folder itself, a checkpoint, or a run (its
    final model, else its newest).

    Of a run of several stages the stage that was written last is meant.  What a run wrote is
    compared with its checksums.
    Raises CheckpointError with what was found instead, RunError for a model that is damaged.
    """
    path = expanded(path)
    if not path.is_dir():
        raise CheckpointError(f"no such folder: {path}")
    for folder in (path, path / "policy", path / "final"):
        if (folder / "config.json").is_file():
            if folder.name == FINAL:
                check_final(folder)
            elif (folder.parent / COMPLETE).exists() and (wrong := damage(folder.parent)):
                raise CheckpointError(f"checkpoint {folder.parent} is damaged: {wrong}")
            return folder
    newest = latest(path)
    if newest is not None:
        return newest / "policy"
    stages = sorted(path.glob("*/metrics.jsonl"), key=lambda log: log.stat().st_mtime)
    if stages:
        return policy_folder(stages[-1].parent)
    if (path / "metrics.jsonl").is_file():
        raise CheckpointError(
            f"{path} is a run that has saved no model yet: the command that began it continues it,"
            " to its first checkpoint (save.every) or to its end"
        )
    inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{path} is neither a model folder, a checkpoint nor a run with one: it holds {inside}"
    )
