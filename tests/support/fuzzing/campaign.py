"""A campaign: make mutants by number, convert each in its own process, judge it, and count the outcomes."""

import contextlib
import gc
import importlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from madeonce import fill_torchs_tables, keep_what_libraries_made

from fuzzing import confined, judge
from fuzzing.canary import Canary
from fuzzing.mutate import Mutant, mutant
from fuzzing.seed import Seed, seeds

CONVERTED_SHARE = 0.1  # of weights files; the others are only read and fitted: exporting a module takes a second
_ASKS_FOR_INPUTS = "does not describe its model's inputs"
COMMON = ("--format", "onnx", "--no-report", "--no-search")


@dataclass
class Tally:
    """The outcomes of the mutants of one kind."""

    kind: str
    count: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # of CPU time, by outcome
    slowest: tuple[float, str] = (0.0, "")  # processor seconds
    largest: tuple[int, str] = (0, "")  # bytes

    def add(self, found: Mutant, end: confined.End, outcome: str, faults: list[str]) -> None:
        self.count += 1
        self.seconds[outcome] += end.processor
        self.ends[outcome if not faults else "FAULT"] += 1
        self.slowest = max(self.slowest, (end.processor, found.name))
        self.largest = max(self.largest, (end.memory, found.name))
        self.faults += [f"{found.name}: {fault}" for fault in faults]


def load(kind: str) -> tuple[Seed, ...]:
    """Return the seeds of ``kind``, and import what converting them needs: forked children then have these modules."""
    for name in (
        "bf16kit.converter.convert",
        "bf16kit.converter.restore",
        "bf16kit.converter.read.onnx_file",
        "bf16kit.runtime.ort.onnx",
        "onnxruntime",
    ):
        importlib.import_module(name)
    found = seeds(kind)
    if kind != "onnx":
        importlib.import_module("architectures")
    return found


def warm(found: tuple[Seed, ...], work: Path) -> list[str]:
    """Convert every unmodified seed and import the modules that the conversion imported. Return the faults.

    These conversions also run in a child process: threads that a library starts do not survive a fork.
    """
    faults = []
    for seed in found:
        end, problems, outcome = _attempt(Mutant(0, seed, "as it is"), work, full=True)
        faults += [f"seed {seed.name}: {problem}" for problem in problems]
        if outcome != "converted":
            faults.append(f"seed {seed.name}: {outcome}: {end.output[-400:]}")
        for name in (end.result or {}).get("modules", []):
            if name not in sys.modules:
                with contextlib.suppress(ImportError):  # some modules are created by others: no importer finds them
                    importlib.import_module(name)
        keep_what_libraries_made()  # otherwise every child would visit, and so copy, the half million objects of torch
        fill_torchs_tables()
        gc.freeze()  # these, too
    return faults


def run(kind: str, numbers: Iterable[int], work: Path, note: Callable[[Tally], None] = lambda tally: None) -> Tally:
    """Convert the mutants with these ``numbers``, one after another, and return their tally."""
    work.mkdir(parents=True, exist_ok=True)
    found, tally = load(kind), Tally(kind)
    canary = Canary(work)
    try:
        tally.faults += warm(found, work)
        canary.disturbed("")
        for number in numbers:
            one = mutant(found, number, str(canary.path))
            full = kind == "onnx" or Random(number).random() < CONVERTED_SHARE
            end, faults, outcome = _attempt(one, work, full=full)
            faults += canary.disturbed("case")
            tally.add(one, end, outcome, faults)
            note(tally)
    finally:
        canary.close()
    return tally


def _attempt(one: Mutant, work: Path, *, full: bool) -> tuple[confined.End, list[str], str]:
    with confined.directory(work, "case") as inside:
        (inside / "in").mkdir()
        (inside / "in" / "sub").mkdir()
        path = one.source.write(inside / "in")
        end = confined.call(lambda judging: convert(path, one.source, inside, judging, full=full), inside)
        outcome, faults = _judged(one, end)
        left = (
            sorted(found.name for found in (inside / "out").iterdir() if found.name != "tmp")
            if outcome != "converted"
            else []
        )
        if left and not end.signal:  # a killed process leaves its directory; the next run removes it
            faults.append(f"left {', '.join(left)} behind")
        return end, faults, outcome


def convert(path: Path, seed: Seed, inside: Path, judging: Callable[[], None], *, full: bool) -> dict[str, Any]:
    """In the confined process, run the command line on the mutant and compare the result with the mutant's tensors."""
    from bf16kit.converter.cli import run as command
    from bf16kit.converter.process import onnx_trial

    onnx_trial.SECONDS = confined.SECONDS // 2  # so that its child is stopped first
    arguments = seed.arguments if full else seed.arguments[: seed.arguments.index("--input")]
    target = inside / "out" / "m" / "1"
    before = set(sys.modules)
    code = command(["checkpoint", str(path), "--out", str(target), *COMMON, *arguments])
    faults: list[str] = []
    judging()
    output = (inside / "said").read_text(errors="replace")
    if code == 0:
        restored = inside / "out" / "fp32.safetensors"
        if command(["restore", str(target), "--out", str(restored)]) != 0:
            faults.append("published, and cannot be restored")
        else:
            faults += _guarded(lambda: judge.artifact_faults(restored, path, seed))
    elif not full and _ASKS_FOR_INPUTS in output:
        faults += _guarded(lambda: judge.same(_read(path), path, seed))
    return {"code": code, "faults": faults, "modules": sorted(set(sys.modules) - before)}


def _guarded(check: Callable[[], list[str]]) -> list[str]:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - the other reader rejects what the converter accepted
        return [f"was read, and another reader says {type(error).__name__}: {str(error)[:300]}"]


def _read(path: Path) -> Any:
    """Return the weights as the converter's own readers read them."""
    from bf16kit.converter.read import jax, safetensors_file, torch_file
    from bf16kit.converter.read.bareweights import is_lightning
    from bf16kit.converter.read.detect import Kind, recognise

    kind = recognise(path)
    if kind is Kind.FLAX:
        return {name: array for name, array in jax.read_flax(path).items() if _kept(name)}
    if kind is Kind.ORBAX:
        return jax.read_item(jax.locate(path, None, None), _kept, path.parent.parent / "out")[0]
    if kind is Kind.SAFETENSORS:
        return safetensors_file.read_file(path)
    if kind is Kind.SHARDED:
        return safetensors_file.read_sharded(path)[0]
    if kind is Kind.LIGHTNING and is_lightning(loaded := torch_file.load(path, kind, trust_code=False)):
        return torch_file.arrays(path, kind, loaded["state_dict"], trust_code=False)
    return torch_file.read_file(path, kind, trust_code=False)[0]


def _kept(name: str) -> bool:
    return not name.startswith("opt_state.")


def _judged(one: Mutant, end: confined.End) -> tuple[str, list[str]]:
    faults = [f"outside: {event}" for event in end.outside]
    if end.late:
        return "late", [
            *faults,
            f"took {end.processor:.1f} s of processor time, {end.wall:.1f} s in all: {end.output[-200:]!r}",
        ]
    if end.signal:
        return "crashed", [*faults, f"died of signal {end.signal}: {end.output[-500:]!r}"]
    if end.memory > confined.MEMORY:
        faults.append(f"took {end.memory >> 20} MiB")
    if "escaped" in end.result:
        return "escaped", [*faults, f"escaped: {end.result['escaped'][:400]}"]
    code, faults = end.result["code"], faults + end.result["faults"]
    if code == 0:
        return "converted", faults
    if _ASKS_FOR_INPUTS in end.output and "--input" in one.source.arguments:
        return "read and fitted", faults
    return f"refused ({code})", [*faults, *judge.message_faults(end.output, code, one.source)]
