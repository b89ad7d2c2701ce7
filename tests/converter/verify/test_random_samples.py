"""Random samples, seeded, of the declared shapes, with no index outside its table; and more samples of given ones."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

import graphs
from bf16kit.artifact.entries import drawn_at_random
from bf16kit.converter.graph.indexing import index_bounds
from bf16kit.converter.read.sources import input_specs
from bf16kit.converter.source import Feeds, Oracle
from bf16kit.converter.verify.random_samples import COUNT, ROWS, SAMPLES, RunSource, generate, with_enough
from bf16kit.converter.verify.samples import Samples
from bf16kit.drift.budget import Budget
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec, check_feeds

LOGITS = (TensorSpec("y", "float32", ("batch", 5), "logits"),)
OTHER = (TensorSpec("y", "float32", ("batch", 5)),)
Inputs = dict[str, NDArray[np.generic]]


def read(model: onnx.ModelProto) -> ir.Model:
    return ir.from_proto(model)


def test_an_index_stays_within_the_table_it_reads() -> None:
    model = read(graphs.embedding(rows=5))
    feeds = generate(input_specs(model), model, None, seed=0).feeds
    ids = np.concatenate([feed["ids"].ravel() for feed in feeds])
    assert ids.min() >= 0
    assert ids.max() == 4


@pytest.mark.parametrize(
    ("nodes", "bound"),
    [
        ("i = Gather <axis = 1> (ids, one)", 50),
        ("a, i, b = Split <axis = 1, num_outputs = 3> (ids)", 50),
        ("i = Concat <axis = 1> (one, ids)", 50),
        ("i = Add (ids, starts)", 10),
        ("i = Sub (ids, one)", 51),
        ("i = Sub (one, ids)", None),
        ("i = Mul (ids, one)", None),
    ],
)
def test_an_index_is_followed_through_operators_that_pick_join_or_shift(nodes: str, bound: int | None) -> None:
    text = f"(int64[batch, 3] ids) => (float[batch, n, 4] y) {{ {nodes} y = Gather (table, i) }}"
    constants = {"one": np.array([1]), "starts": np.array([0, 20, 40])}
    proto = graphs.parsed(text, table=graphs.values(50, 4), **constants)
    assert index_bounds(read(proto).graph.inputs[0]) == ({bound} if bound else set())


def padding() -> ir.Model:
    """Return tokens [batch, seq] → rows of a table of 100; and whether each token equals 0, the padding."""
    return read(
        graphs.parsed(
            """(int64[batch, seq] ids) => (float[batch, seq, 16] y, bool[batch, seq] is_padding) {
                y = Gather (table, ids) is_padding = Equal (ids, pad)
            }""",
            table=graphs.values(100, 16),
            pad=np.array(0),
        )
    )


def test_a_padding_token_ends_some_rows_and_fills_none() -> None:
    model = padding()
    feeds = generate(input_specs(model), model, None, seed=0, run_source=_runs_when(lambda _: True)).feeds
    assert feeds[0]["ids"].all()
    assert all(feed["ids"][:, 0].all() for feed in feeds)
    assert sum((feed["ids"] == 0).any() for feed in feeds) > COUNT // 2
    assert max(feed["ids"].max() for feed in feeds) > 90


def _mask_feeds(run_source: RunSource, dtype: str = "int64") -> list[np.ndarray]:
    found = generate((TensorSpec("attention_mask", dtype, ("n", "length")),), None, None, 0, run_source)
    return [feed["attention_mask"] for feed in found.feeds]


@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_masks_end_in_zeros_after_the_first_sample(dtype: str) -> None:
    first, *others = _mask_feeds(_runs_when(lambda _: True), dtype)
    assert first.all()
    assert sum(not mask.all() for mask in others) > COUNT // 2
    for mask in others:
        assert mask[:, 0].all()
        assert (np.diff(mask.astype(int)) <= 0).all()


@pytest.mark.parametrize("fails", [True, False])
def test_a_sample_that_the_source_cannot_answer_padded_is_left_full(fails: bool) -> None:
    """The source fails on it, or gives NaN."""

    def run_source(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        for feed in feeds:
            short = bool((feed["attention_mask"].sum(axis=1) < 5).any())
            if short and fails:
                raise RuntimeFailure("too short")
            yield {"y": np.array([np.nan if short else 1.0])}

    masks = _mask_feeds(run_source)
    assert len(masks) == COUNT
    assert {bool(mask.all()) for mask in masks[1:]} == {True, False}
    assert min(int(mask.sum(axis=1).min()) for mask in masks) >= min(5, min(mask.shape[1] for mask in masks))


def test_the_same_seed_gives_the_same_samples_and_another_gives_others() -> None:
    model = read(graphs.mlp())
    first, again, other = (generate(input_specs(model), model, None, seed).feeds for seed in (0, 0, 1))
    assert len(first) == COUNT
    assert drawn_at_random(generate(input_specs(model), model, None, 0).origin)
    assert all(np.array_equal(a["x"], b["x"]) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0]["x"], other[0]["x"])


def test_every_dtype_gets_fitting_values_and_inputs_agree_on_free_dimensions() -> None:
    specs = (
        TensorSpec("x", "float32", ("n", "length", 3)),
        TensorSpec("y", "float16", ("n", "length")),
        TensorSpec("flag", "bool", ()),
        TensorSpec("attention_mask", "int64", ("n", "length")),
        TensorSpec("small", "uint8", ("n",)),
        TensorSpec("text", "string", ("n",)),
    )
    feeds = generate(specs, read(graphs.mlp()), None, seed=3).feeds
    assert len(feeds) == COUNT
    for feed in feeds:
        assert check_feeds(specs, feed)["n"] == ROWS
        assert feed["attention_mask"].all()
        assert np.isfinite(feed["x"]).all()


def test_an_integer_that_is_compared_with_constants_takes_one_of_them() -> None:
    proto = graphs.parsed(
        """(int64 rate) => (bool is_sixteen, bool[1] is_eight) {
            is_sixteen = Equal (rate, sixteen)
            eight = Constant <value = int64[1] {8000}> () is_eight = Equal (eight, rate)
        }""",
        sixteen=np.array(16_000),
    )
    feeds = generate(input_specs(read(proto)), read(proto), None, seed=0).feeds
    assert {int(feed["rate"]) for feed in feeds} == {8_000, 16_000}


def _runs_when(fits: Callable[[dict[str, np.ndarray]], bool]) -> RunSource:
    def run_source(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        for feed in feeds:
            if not fits(feed):
                raise RuntimeFailure("the wrong size\nin node 7")
            yield {}

    return run_source


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        (("n", 3, "h", "w"), lambda x: x.shape[2:] == (48, 192)),  # a line of printed text
        (("n", "h", "w", 3), lambda x: x.shape[1:3] == (224, 224)),
        (("n", 4), lambda x: len(x) == 1),  # keeps a state of one row
        (("n", "time"), lambda x: x.shape[1] == 576),  # a window of audio
    ],
)
def test_sizes_that_the_source_does_not_run_on_are_skipped(shape: tuple[int | str, ...], fits: object) -> None:
    specs = (TensorSpec("x", "float32", shape),)
    run_source = _runs_when(lambda feed: fits(feed["x"]))  # type: ignore[operator]
    found = generate(specs, read(graphs.mlp()), None, seed=0, run_source=run_source)
    assert {fits(feed["x"]) for feed in found.feeds} == {True}  # type: ignore[operator]


# --- more samples, made of the given ones where these are too few to judge slices and agreement by --------------------


def oracle(reject: int | None = None, nan: int | None = None, flat: int | None = None) -> Oracle:
    """Return an oracle that fails on feed ``reject``, gives NaN for feed ``nan``, another rank for feed ``flat``."""

    def outputs(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        for number, feed in enumerate(feeds):
            if number == reject:
                raise RuntimeFailure("out of range")
            rows = len(next(iter(feed.values())))
            shape = (rows,) if number == flat else (rows, 5)
            yield {"y": np.full(shape, np.nan if number == nan else 1.0, np.float32)}

    return Oracle(outputs, "a test")


def enough(feeds: Sequence[Inputs], outputs: Sequence[TensorSpec] = OTHER, how: Oracle | None = None) -> Samples:
    given = Samples(tuple(feeds), "the test")
    how = how or oracle()
    return with_enough(given, inputs_of(given), outputs, how(given.feeds[:1]), how, Budget(), 0)


def inputs_of(samples: Samples) -> list[TensorSpec]:
    first = samples.feeds[0]
    return [TensorSpec(name, array.dtype.name, ("n", *array.shape[1:])) for name, array in first.items()]


def floats(count: int, rows: int = 1) -> list[Inputs]:
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((rows, 4)).astype(np.float32)} for _ in range(count)]


def test_slices_need_a_few_samples_and_agreement_a_hundred_rows() -> None:
    """With fewer than 1 ÷ (1 − 0.99) rows, a single one that differs breaks the bound."""
    assert [len(enough(floats(n)).feeds) for n in (1, 5, 16, 40)] == [SAMPLES, SAMPLES, SAMPLES, 40]
    assert len(enough(floats(4, rows=8)).feeds) == 4
    assert len(enough(floats(3), LOGITS).feeds) == 100
    assert len(enough(floats(3, rows=8), LOGITS).feeds) == 13
    unbatched = (TensorSpec("y", "float32", (5,)),)  # each feed is one sample
    assert len(enough(floats(3, rows=8), unbatched).feeds) == SAMPLES


def test_a_single_sample_is_changed_a_little() -> None:
    (given,) = floats(1)
    for feed in enough([given]).feeds[1:]:
        assert 0 < np.linalg.norm(feed["x"] - given["x"]) < 0.6 * np.linalg.norm(given["x"])


def test_the_given_samples_stay_first_and_the_origin_says_what_was_made() -> None:
    given = floats(3)
    found = enough(given)
    assert found.given == tuple(given)
    assert [feed["x"].tolist() for feed in found.feeds] == [feed["x"].tolist() for feed in enough(given).feeds]
    assert found.made == SAMPLES - 3
    assert found.described == "the test, and 13 made of them by perturbation, because they are too few to judge by"
    assert enough(floats(16)).described == "the test"


def test_integers_stay_valid_indices_and_masks_stay() -> None:
    tokens, mask = np.array([[5, 900, 31, 7, 2]]), np.array([[1, 1, 1, 0, 0]])
    found = enough([{"ids": tokens, "mask": mask, "length": np.array([5])}])
    made = found.feeds[1:]
    assert all(np.isin(feed["ids"], tokens).all() for feed in made)
    assert any((feed["ids"] != tokens).any() for feed in made)
    assert all((feed["mask"] == mask).all() and feed["length"] == 5 for feed in made)


@pytest.mark.parametrize(
    ("how", "made"),
    [
        (oracle(nan=2), SAMPLES - 3),
        (oracle(nan=0), SAMPLES - 4),
        (oracle(flat=0), SAMPLES - 4),  # integers that are axes
        (oracle(reject=5), 10),
        (oracle(reject=0), 0),
    ],
)
def test_samples_that_the_source_rejects_are_replaced_once_by_smaller_steps(how: Oracle, made: int) -> None:
    given = Samples(tuple(floats(3)), "the test")
    assert with_enough(given, inputs_of(given), OTHER, oracle()(given.feeds), how, Budget(), 0).made == made
    assert with_enough(given, inputs_of(given), OTHER, [], how, Budget(), 0) is given  # it could not be run at all
