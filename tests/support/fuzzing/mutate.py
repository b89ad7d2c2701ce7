"""Make a mutant from a number: choose a seed and edit one of its files. The same number gives the same mutant."""

from dataclasses import dataclass, replace
from random import Random

from fuzzing import bytewise, jax_edits, onnx_edits, safetensors_edits, torch_edits
from fuzzing.seed import Seed


@dataclass(frozen=True)
class Mutant:
    """A damaged source, its number, and the name of its edits."""

    number: int
    source: Seed
    done: str

    @property
    def name(self) -> str:
        return f"{self.source.kind} {self.number} ({self.source.name}: {self.done})"


def mutant(seeds: tuple[Seed, ...], number: int, canary: str) -> Mutant:
    """Return the mutant with this number. ``canary`` is an absolute path to which some mutants refer."""
    random = Random(f"{seeds[0].kind} {number}")
    seed = random.choice(seeds)
    if random.random() < 0.03 and len(seed.files) > 1:
        return _linked(number, seed, random, canary)
    whole = seed.main not in seed.files  # a directory
    name = random.choice(list(seed.files)) if random.random() < 0.3 or whole else seed.main
    if random.random() < 0.25:
        edit = random.choice(bytewise.EDITS)
        return Mutant(number, seed.with_file(name, edit(seed.files[name], random)), edit.__name__)
    done, content = _structured(name, seed.files[name], random, canary)
    if random.random() < 0.05:
        edit = random.choice(bytewise.EDITS)
        done, content = f"{done}+{edit.__name__}", edit(content, random)
    return Mutant(number, seed.with_file(name, content), done)


def _structured(name: str, content: bytes, random: Random, canary: str) -> tuple[str, bytes]:
    if name.endswith(".onnx"):
        return onnx_edits.edit(content, random, canary)
    if name.endswith(".safetensors"):
        return safetensors_edits.edit(content, random)
    if name.endswith(".msgpack"):
        return jax_edits.edit_flax(content, random)
    if name.endswith(("_METADATA", ".zarray", "zarr.json")):
        return jax_edits.edit_json(content, random)
    if name.endswith(".json"):
        return safetensors_edits.edit_index(content, random, canary)
    if name.endswith(".pt"):
        return torch_edits.edit(content, random)
    edit = random.choice(bytewise.EDITS)
    return edit.__name__, edit(content, random)


def _linked(number: int, seed: Seed, random: Random, canary: str) -> Mutant:
    """Replace a file beside the main one with a link: out of the directory, to itself, to a device, or to nothing."""
    name = random.choice([name for name in seed.files if name != seed.main])
    inward = ("/dev/zero", name, "nowhere", seed.main, ".")
    outward = (canary, "../secret", "/etc/hostname", "/proc/self/mem")
    # links of shards may lead out of their directory: the cache of the Hugging Face hub consists of such links
    target = random.choice(outward + inward if seed.kind in ("onnx", "orbax") else inward)
    done = f"link to {'the canary' if target == canary else target}"
    return Mutant(number, replace(seed, links={name: target}), done)
