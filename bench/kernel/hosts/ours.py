"""A profile of our artifact, loaded through the kit as the server loads it; ``path`` names one of the kernel's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from bench.kernel.hosts import Absent, Feeds, Prepare, Run, Subject
from bench.kernel.sides import THREADS
from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import ArtifactError, ConfigError
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.kernel import VARIABLE


def open_side(options: Mapping[str, str], subject: Subject) -> Prepare:
    """Absent where this processor does not run the path, or the artifact has no such profile."""
    profile, path = options["profile"], options["path"]
    artifact = Artifact.open(subject.artifact, verify=False)
    os.environ.pop(VARIABLE, None)
    if path:
        os.environ[VARIABLE] = path
    if profile not in artifact.manifest.profiles:
        raise Absent(f"bf16-convert made no profile {profile} of {subject.name}")
    try:
        runtime = load(artifact, profile, threads=THREADS)
    except (ConfigError, ArtifactError) as error:
        raise Absent(str(error)) from error
    if not runtime.info.kernel:
        raise Absent(runtime.info.note or "no node of this graph runs on the kernel")

    def prepare(feeds: Feeds, _: float) -> Run:
        return lambda: runtime.run(feeds)

    return prepare
