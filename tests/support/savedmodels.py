"""Programs that replace the Python with TensorFlow, for tests of what the converter makes of its replies."""

import stat
import sys
from collections.abc import Mapping
from pathlib import Path

_PROGRAM = """#!{python}
import json, os, sys, time
if "-c" in sys.argv:
    print(json.dumps({versions}))
    sys.exit()
REQUEST = json.loads(sys.argv[2])
def reply(**what):
    sys.stdout.write(json.dumps(what) + "\\n")
    sys.stdout.flush()
{code}
"""
VERSIONS: Mapping[str, str] = {"tensorflow-cpu": "2.21.0", "tf2onnx": "1.17.0"}


def stand_in(path: Path, code: str, versions: Mapping[str, str] = VERSIONS) -> Path:
    """Write a program that replaces the Python with TensorFlow: it reports ``versions`` and runs ``code``."""
    path.write_text(_PROGRAM.format(python=sys.executable, versions=dict(versions), code=code))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# Code that replies like TensorFlow's process, with an ONNX file and variables that exist already. {twist} may change
# the outputs.
TRANSLATES = """
import shutil, numpy as np, onnxruntime as ort
shutil.copy({onnx!r}, "model.onnx")
session = ort.InferenceSession({onnx!r})
names = [[edge.name for edge in edges] for edges in (session.get_inputs(), session.get_outputs())]
with np.load({variables!r}) as stored:
    for index, name in enumerate(stored):
        np.save(f"{{index}}.npy", stored[name])
    variables = [[name, stored[name].dtype.name] for name in stored]
reply(versions={{"tensorflow": "2.21.0", "tf2onnx": "1.17.0"}}, signature="serving_default", inputs=names[0],
      outputs=names[1], renamed={{}}, variables=variables)
for line in sys.stdin:
    with np.load("feeds.npz") as feeds:
        given = {{name: feeds[f"arr_{{index}}"] for index, name in enumerate(json.loads(line))}}
    np.savez("answers.npz", *(value{twist} for value in session.run(None, given)))
    reply()
"""
