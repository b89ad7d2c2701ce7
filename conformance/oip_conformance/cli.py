"""The command ``oip-conformance``. Exit codes: 0 conforms, 1 does not, 2 could not be checked."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path

from oip_conformance import compare, reports
from oip_conformance.checks import CHECKS
from oip_conformance.models import UsageError, discover, parse_input, preference
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.reports import Result
from oip_conformance.runner import run, select_checks, server_label
from oip_conformance.session import Options, Session, restricted_extensions
from oip_conformance.target import Target, connect


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite against a server; return the exit code."""
    args = _parser().parse_args(arguments)
    if args.list:
        sys.stdout.write("".join(f"{c.id}  [{c.level.value}]  {c.rule} ({c.source})\n" for c in CHECKS))
        return 0
    try:
        if args.compare:
            sys.stdout.write(compare.tables(args.compare))
            return 0
        if not args.address:
            raise UsageError("say which server: HOST:PORT")
        results, server = _run_checks(args)
        _write_reports(args, results, server)
    except (UsageError, OSError) as error:
        sys.stderr.write(f"oip-conformance: {error}\n")
        return 2
    return 1 if reports.failed(results) else 0


def _run_checks(args: argparse.Namespace) -> tuple[list[Result], str]:
    metadata = [(key.lower(), value) for key, _, value in (text.partition("=") for text in args.metadata)]
    authority = None if args.tls is None else Path(args.tls).read_bytes() if args.tls else b""
    with connect(args.address, authority) as channel:
        target = Target(channel, args.timeout, metadata)
        if not target.wait(args.patience):
            raise UsageError(f"no gRPC server answers at {args.address}")
        session = _session(args, target)
        checks = select_checks(CHECKS, args.check, args.skip)
        if not checks:
            raise UsageError("no check has such an id; --list lists them")
        return run(session, checks), server_label(session)


def _session(args: argparse.Namespace, target: Target) -> Session:
    models = discover(target, args.model, dict(parse_input(text) for text in args.input))
    metadata = target.call(pb.ServerMetadataRequest())
    declared = metadata.message.extensions if metadata.ok else ()
    options = Options(
        args.control, args.same_host or _local(args.address), args.dangerous, args.patience, args.region_prefix
    )
    usable = [m for m in sorted(models, key=preference) if _responds(target, Session(target, m, models, frozenset()))]
    if not usable:
        session = Session(target, models[0], models, frozenset())
        refused = target.call(session.request())
        raise UsageError(
            f"no model answers to inputs made up from its metadata ({models[0].name}: {refused});"
            " say what one wants with --input NAME=SHAPE/VALUES"
        )
    main_model = usable[0] if not args.model else next(m for m in models if m in usable)
    extensions = frozenset([*declared, *args.assume])
    return Session(
        target, main_model, usable, extensions, options, restricted_extensions(target, main_model.name, extensions)
    )


def _responds(target: Target, session: Session) -> bool:
    return target.call(session.request()).ok


def _write_reports(args: argparse.Namespace, results: list[Result], server: str) -> None:
    if args.junit:
        Path(args.junit).write_bytes(reports.junit(results, server))
    if args.table:
        Path(args.table).write_text(reports.table(results, server))
    if args.json:
        sys.stdout.write(reports.as_json(results, server))
    else:
        sys.stdout.write(f"{server}\n{reports.lines(results, all_of_them=args.verbose)}\n")


def _local(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]") or address
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or address.startswith("unix:")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oip-conformance",
        description="Checks a server against the Open Inference Protocol v2 over gRPC, as Triton implements it.",
        epilog="Exit codes: 0 conforms, 1 breaks a rule of level MUST or TRITON, 2 could not be checked.",
    )
    add = parser.add_argument

    def repeated(option: str, value: str, about: str) -> None:
        add(option, action="append", default=[], metavar=value, help=about)

    def seconds(option: str, about: str) -> None:
        add(option, type=float, default=10.0, metavar="SECONDS", help=f"{about} (%(default)s)")

    add("address", nargs="?", default="", metavar="HOST:PORT", help="of the server's gRPC port")
    repeated("--model", "NAME", "a model to check (repeat for more); without it every model that is ready")
    repeated("--input", "NAME=SHAPE[/VALUES]", "what an input needs: ids=1,8/101,2023 or x=1,16/0..1")
    add("--control", default="", metavar="NAME", help="a model that may be unloaded and loaded again")
    repeated("--assume", "EXTENSION", "check an extension that the server does not declare")
    add("--dangerous", action="store_true", help="send, last of all, what has crashed servers")
    add("--same-host", action="store_true", help="the server can open this machine's /dev/shm (known for loopback)")
    add("--region-prefix", default="conformance_", metavar="TEXT", help="of the keys of shared memory (%(default)s)")
    repeated("--metadata", "KEY=VALUE", "to send with each call, e.g. authorization=Bearer …")
    add("--tls", nargs="?", const="", metavar="CA.pem", help="use TLS; this authority signed the server's certificate")
    repeated("--check", "ID", "run only these checks (* matches)")
    repeated("--skip", "ID", "leave out these checks (* matches)")
    seconds("--timeout", "for each call")
    seconds("--patience", "for a connection, and for effects that follow a response")
    add("--junit", default="", metavar="FILE", help="write JUnit's XML")
    add("--table", default="", metavar="FILE", help="write a table in Markdown")
    add("--json", action="store_true", help="print everything as JSON")
    add("--verbose", "-v", action="store_true", help="also print the checks that passed or were skipped")
    add("--list", action="store_true", help="print every check and its rule, and end")
    add("--compare", nargs="+", metavar="NAME=FILE", help="print tables of several servers' --json, and end")
    return parser
