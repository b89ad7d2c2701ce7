"""Checks of inference that must succeed: outputs, versions, encodings, for one row and for many."""

from __future__ import annotations

from oip_conformance import judging
from oip_conformance.checks.sources import GRPC, OBSERVED, OIP
from oip_conformance.session import Session
from oip_conformance.suite import MUST, SHOULD, TRITON, Code, Failed, Skipped, check, must
from oip_conformance.wire import same


@check(
    "infer.answered",
    MUST,
    OIP,
    "ModelInfer answers with tensors of the metadata's datatypes and shapes, raw or typed, each filling its shape exactly.",
)
def answered(session: Session) -> None:
    for model in session.models:
        found = session.outputs(session.request(model), model)
        must(found, "an output at least", "none", model.name)


@check("infer.all-outputs", MUST, OIP, "Outputs not specified: all outputs produced by the model will be returned.")
def all_outputs(session: Session) -> None:
    for model in session.models:
        found = session.outputs(session.request(model), model)
        wanted = {spec.name for spec in model.outputs}
        must({*found} == wanted, f"the outputs {sorted(wanted)}", sorted(found), session.request(model))


@check(
    "infer.raw-outputs",
    TRITON,
    OBSERVED,
    "Answers come in raw_output_contents, one for each output: tritonclient reads no other.",
)
def raw_outputs(session: Session) -> None:
    response = session.infer(session.request())
    must(len(response.raw_output_contents) == len(response.outputs) > 0, "a raw content for each output", response)


@check("infer.version", MUST, OIP, "model_version: the version of the model used for inference.")
def version(session: Session) -> None:
    known = session.model.metadata.versions
    if not known:
        raise Skipped("the metadata names no versions")
    chosen = session.infer(session.request()).model_version
    must(chosen in known, f"one of {list(known)}", repr(chosen), "a request without a version")


@check("infer.each-version", MUST, OIP, "model_version of the request: the version of the model to use for inference.")
def each_version(session: Session) -> None:
    for model in session.models:
        for wanted in model.metadata.versions:
            used = session.infer(session.request(model, version=wanted)).model_version
            must(used == wanted, f"version {wanted} of {model.name!r}", repr(used))


@check("infer.id", MUST, OIP, "id: optional identifier for the request. If specified will be returned in the response.")
def request_id(session: Session) -> None:
    for sent in ("1", "a b/c\u2028é", "x" * 1000):
        received = session.infer(session.request(request_id=sent)).id
        must(received == sent, f"id {sent[:40]!r}", repr(received[:40]))


@check("infer.no-id", TRITON, OBSERVED, "A request without an id is answered without one.")
def no_id(session: Session) -> None:
    received = session.infer(session.request()).id
    must(not received, "no id", repr(received))


@check("infer.one-output", MUST, OIP, "outputs: the requested output tensors; no others are returned.")
def one_output(session: Session) -> None:
    model = max(session.models, key=lambda m: len(m.outputs))
    for spec in model.outputs:
        request = session.request(model, outputs=[spec.name])
        found = session.outputs(request, model)
        must([*found] == [spec.name], f"{spec.name!r} alone", sorted(found), request)


@check(
    "infer.some-outputs",
    MUST,
    OIP,
    "raw_output_contents are in the order of outputs, whichever were requested in whichever order.",
)
def some_outputs(session: Session) -> None:
    model = max(session.models, key=lambda m: len(m.outputs))
    if len(model.outputs) < 2:
        raise Skipped("no model here has two outputs")
    everything = session.outputs(session.request(model), model)
    names = [spec.name for spec in model.outputs][::-1]
    found = session.outputs(session.request(model, outputs=names), model)
    must({*found} == {*names}, f"the outputs {names}", sorted(found))
    for name, array in found.items():
        must(same(array, everything[name]), f"{name!r} as in the answer with all outputs", array, names)


@check(
    "infer.same-output-twice",
    TRITON,
    OBSERVED,
    "An output that is requested twice is returned once (or rejected as an invalid argument), never twice.",
)
def same_output_twice(session: Session) -> None:
    name = session.model.outputs[0].name
    request = session.request(outputs=[name, name])
    response = session.target.call(request)
    if response.ok:
        judging.outputs(session.model, request, response.message)
    else:
        must(response.code is Code.INVALID_ARGUMENT, "INVALID_ARGUMENT, if it is rejected", response, request)


@check(
    "infer.typed",
    MUST,
    OIP,
    "Data may be in the repeated field that matches the tensor's datatype: the answer is that of the same data raw.",
)
def typed(session: Session) -> None:
    model = next((m for m in session.models if not m.raw_only), None)
    if model is None:
        raise Skipped("every model here has an FP16 or BF16 input, which travel raw only")
    raw = session.outputs(session.request(model), model)
    found = session.outputs(session.request(model, typed=True), model)
    for name, array in found.items():
        must(same(array, raw[name]), f"{name!r} as for the raw data: {raw[name].ravel()[:4]}", array.ravel()[:4])


@check(
    "infer.batch",
    TRITON,
    OBSERVED,
    "With max_batch_size > 0, up to so many rows come in one request; each is answered as if alone.",
)
def batch(session: Session) -> None:
    model = session.batching()
    rows = min(model.max_batch_size, 8)
    alone = session.outputs(session.request(model), model)
    together = session.outputs(session.request(model, rows=rows), model)
    one = model.feeds(1)
    if any(not same(model.feeds(rows)[name].array[:1], tensor.array) for name, tensor in one.items()):
        raise Skipped("the first rows of the values given are not the same")
    for name, array in together.items():
        must(array.shape[:1] == (rows,), f"{rows} rows of {name!r}", list(array.shape))
        must(same(array[:1], alone[name]), f"row 0 of {name!r} as alone", array[:1].ravel()[:4])


@check(
    "infer.no-rows",
    TRITON,
    OBSERVED,
    "A size of 0 is answered with empty tensors, or rejected as an invalid argument.",
)
def no_rows(session: Session) -> None:
    batched = [m for m in session.models if m.max_batch_size > 0]
    open_ended = [m for m in session.models if all(s.shape and s.shape[0] == -1 for s in m.inputs)]
    if not (model := next(iter([*batched, *open_ended]), None)):
        raise Skipped("no model here takes a number of rows")
    feeds = {name: type(t)(t.datatype, t.array[:0]) for name, t in model.feeds(1).items()}
    request = session.request(model, feeds=feeds)
    request.raw_input_contents[:] = [b""] * len(feeds)
    response = session.target.call(request)
    if response.ok:
        judging.outputs(model, request, response.message)
    else:
        must(response.code is Code.INVALID_ARGUMENT, "INVALID_ARGUMENT, if it is rejected", response, request)


@check(
    "infer.optional-input",
    MUST,
    OIP,
    "An input that the configuration calls optional may be left out.",
    "model_configuration",
)
def optional_input(session: Session) -> None:
    for model in session.models:
        needed = {name: tensor for name, tensor in model.feeds().items() if name not in model.optional}
        if model.optional and needed:
            session.infer(session.request(model, feeds=needed))
            return
    raise Skipped("no model here has an optional input beside others")


@check(
    "infer.compressed",
    SHOULD,
    GRPC,
    "A message compressed with gzip is read; a server without it answers UNIMPLEMENTED.",
)
def compressed(session: Session) -> None:
    response = session.target.call(session.request(), gzip=True)
    must(response.ok or response.code is Code.UNIMPLEMENTED, "an answer", response, "a request compressed with gzip")


@check("infer.side-by-side", MUST, OIP, "Requests that are in flight together are each answered with their own id.")
def side_by_side(session: Session) -> None:
    waiting = [session.target.start(session.request(request_id=str(k))) for k in range(16)]
    for number, future in enumerate(waiting):
        response = session.target.finish(future)
        if not response.ok:
            raise Failed("16 requests to be answered", response, f"request {number} of 16")
        must(response.message.id == str(number), f"id {number}", response.message.id)
