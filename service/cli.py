"""``bf16-serve``: the command line. Heavy modules are imported only after the arguments have been checked.

Without a command it serves. Commands take the server's options after their name: ``bf16-serve check --repository …``.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bf16kit import __version__
from bf16kit.messages.commandline import HintingGroup
from bf16kit.messages.errors import Bf16kitError

if TYPE_CHECKING:
    from bf16kit.service.config.loops import Ending

_LAST_SECONDS = 2.0  # for threads that are ending when the server has stopped

#: The commands: the module of each, and its line in --help.
_COMMANDS = {
    "bench": ("bench", "Measure MODEL without a network, and suggest its settings."),
    "check": ("check", "Check whether a server with these options would serve."),
    "evidence": ("clients", "Fetch the evidence for MODEL's newest drift breach."),
    "health": ("clients", "Ask this machine's server whether it is ready."),
    "list": ("list", "List models and versions, and which would be served."),
}
EXIT_UNCLEAN = 1  # requests were still in flight when drain_seconds ended
EXIT_USAGE = 2


@contextmanager
def _naming_keys() -> Iterator[None]:
    """Say where to set a key of server.yaml or serving.yaml that is given as a flag and has none."""
    try:
        yield
    except click.NoSuchOption as error:
        from bf16kit.service.config.serverconfig import ENV_PREFIX, ServerConfig
        from bf16kit.service.models.serving import Serving

        key = error.option_name.lstrip("-").replace("-", "_")
        if key in ServerConfig.model_fields:
            where = f"{ENV_PREFIX}{key.upper()} in the environment, or {key} in the server.yaml of --config"
        elif key in Serving.model_fields:
            where = f"{key} in REPOSITORY/MODEL/serving.yaml, for each model"
        else:
            raise
        raise click.UsageError(f"{error.option_name} is not a flag: set {where}", error.ctx) from None


class _Commands(HintingGroup):
    """Imports a command's module when it is called, so that `--help` and `health` are quick."""

    hint = "To serve, give --repository DIRECTORY and no command."

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = import_module(f"bf16kit.service.commands.{_COMMANDS[name][0]}")
        command: click.Command = getattr(module, "list_models" if name == "list" else name)
        if name == "check":  # it takes all options of the server
            command.params.extend(each for each in self.params if each not in command.params)
        return command

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        with _naming_keys():
            return super().parse_args(context, args)

    def invoke(self, context: click.Context) -> Any:
        with _naming_keys():
            return super().invoke(context)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND]",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--repository", metavar="DIRECTORY", help="Directory of <model>/<version>/ artifacts.")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--grpc-port", type=int, help="Port of the inference protocol; 0 = any.  [default: 8001]")
@click.option("--http-port", type=int, help="Port of /metrics, /livez, /readyz and the status page.  [default: 8002]")
@click.option(
    "--http-inference",
    is_flag=True,
    default=None,
    help="Answer inference requests on the HTTP port too (REST); needs one worker.  [default: off]",
)
@click.option("--device", help="auto, cpu, or cuda:N.  [default: auto]")
@click.option("--workers", type=int, help="Worker processes that share the gRPC port.  [default: 1]")
@click.option(
    "--model-control",
    type=click.Choice(["none", "poll", "explicit"]),
    help="none: load at start only; poll: follow the repository; explicit: clients load and unload.  [default: none]",
)
@click.option("--load-model", multiple=True, metavar="NAME", help="Load at start, if control is explicit; * = all.")
@click.option("--tls-certificate", metavar="FILE", help="PEM certificate (chain) of both ports; needs --tls-key.")
@click.option("--tls-key", metavar="FILE", help="PEM private key of --tls-certificate.")
@click.option("--tls-client-ca", metavar="FILE", help="Require client certificates signed by this authority.")
@click.option("--token-file", metavar="FILE", help="Lines of 'token scope[,scope]'; scopes: infer, read, manage.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="One line (text) or one JSON object per event.")
@click.option(
    "--evidence",
    is_flag=True,
    default=None,
    help="Keep a live sample of the newest breach in memory, for `bf16-serve evidence`.  [default: off]",
)
@click.option(
    "--lame-duck-seconds",
    type=float,
    help="After SIGTERM, keep serving this long but report not ready.  [default: 0]",
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    envvar="BF16KIT_CONFIG",
    help="server.yaml: any flag as a key (grpc_port: 8001), and more: see docs/configuration.md.",
)
@click.version_option(__version__, prog_name="bf16-serve")
@click.pass_context
def main(context: click.Context, /, file: Path | None, **flags: object) -> None:
    """Serve bf16 artifacts over gRPC (Open Inference Protocol v2), with Prometheus metrics.

    Every flag is also an environment variable: BF16KIT_GRPC_PORT and so on. A flag beats the environment, which beats
    server.yaml, which beats the default. SIGTERM drains and ends the server; a second one ends it at once.
    Exit code 1: some requests were not answered in time.
    """
    if context.invoked_subcommand is not None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal whose encoding lacks ÷ or – must not cause an error
            sys.stdout.reconfigure(errors="backslashreplace")
        _refuse_misplaced(context)
        return
    try:
        ending = _serve(file, flags)
    except Bf16kitError as error:
        click.echo(f"bf16-serve: {error}", err=True)
        sys.exit(EXIT_USAGE)
    if not (ending.threads_ended and _others_ended()):
        # A thread is still in native code. A normal exit of the interpreter would crash it if it loads or runs a model,
        # and would wait for ever for one of gRPC's that does not end.
        logging.shutdown()
        os._exit(0 if ending.completed else EXIT_UNCLEAN)


def _others_ended() -> bool:
    """Wait a moment for the threads that the interpreter would wait for; return whether they ended."""
    until = time.monotonic() + _LAST_SECONDS
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                logging.getLogger(__name__).warning("the server ends while its thread %s still runs", thread.name)
                return False
    return True


def _refuse_misplaced(context: click.Context) -> None:
    """Reject options before the command's name: click gives them to the server, and the command would not see them.

    Raises click.UsageError naming the option.
    """
    for parameter in main.params:
        if parameter.name and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{parameter.opts[0]} is given before the command; put it after {context.invoked_subcommand}"
            )


def _serve(file: Path | None, flags: dict[str, object]) -> Ending:
    from bf16kit.runtime.ort import kernel
    from bf16kit.service.config.logs import configure
    from bf16kit.service.config.loops import Stop
    from bf16kit.service.config.resources import announce, bound_heap, fit_to_memory, raise_open_file_limit
    from bf16kit.service.config.serverconfig import load_config, unknown_variables
    from bf16kit.system import controlgroup

    bound_heap()  # before any thread starts: each thread chooses its malloc arena once
    stop = Stop()
    stop.on_signals()  # before the slow imports, so that a signal during them is not lost
    memory = controlgroup.memory()
    config = fit_to_memory(load_config(flags, file), memory)
    raise_open_file_limit()
    kernel.configured_kernel()  # report a wrong BF16KIT_KERNEL_PATH now, not when the first model loads
    configure(config.log_level, config.log_format)
    announce(config, memory)
    if ignored := unknown_variables(os.environ):
        logging.getLogger(__name__).warning("%s", ignored)
    if config.workers > 1:
        from bf16kit.service.workers.supervisor import supervise as serve
    else:  # gRPC and the runtimes, which a supervisor does not need
        from bf16kit.service.server import serve_single_process as serve
    return serve(config, stop)
