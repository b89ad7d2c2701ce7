"""A headless Chromium, controlled over its debugging pipe: how a page looks, what it requests, and what it logs."""

import base64
import fcntl
import json
import os
import selectors
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 60  # a busy machine takes a while to start a browser


def find() -> str | None:
    """Return the path of the first browser on PATH, or None."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


# Returns the lowest contrast between any text and its background (WCAG 2.2, 1.4.3), and that text.
_CONTRAST = """
(() => {
  const parsed = text => { const n = text.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
  const light = rgb => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const s = rgb[i] / 255; return sum + weight * (s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4); }, 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const found = parsed(getComputedStyle(element).backgroundColor);
      if (found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  let worst = [99, ""];
  for (const element of document.querySelectorAll("body *")) {
    if (["title", "desc"].includes(element.tagName)) continue;
    if (![...element.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
    const style = getComputedStyle(element);
    const front = light(parsed(element instanceof SVGElement ? style.fill : style.color));
    const back = light(behind(element));
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (ratio < worst[0]) worst = [ratio, element.textContent.slice(0, 80)];
  }
  return worst;
})()
"""


@dataclass
class Page:
    """What a page did while it loaded: its requests, without the one for the page itself, and its console messages,
    exceptions and log entries."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


class Browser:
    """One browser with one tab. Use as a context manager: the browser ends when the block is left."""

    def __init__(self, binary: str, profile: Path) -> None:
        theirs, ours = os.pipe(), os.pipe()
        self._reading, self._writing = ours[0], theirs[1]
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs[0], ours[1])]  # not 3 or 4, which Chromium uses
        for fd in (theirs[0], ours[1]):
            os.close(fd)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += ["--disable-dev-shm-usage"]  # /dev/shm is small in containers
        options += ["--remote-debugging-pipe", "--disable-background-networking", f"--user-data-dir={profile}"]
        joined = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", joined, "bash", binary, *options, "about:blank"],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in ends:
            os.close(fd)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reading, selectors.EVENT_READ)
        self._buffer = b""
        self._sent = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(_SECONDS)
        self._selector.close()
        for fd in (self._reading, self._writing):
            os.close(fd)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol and return its result."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def emulate_display(self, scheme: Literal["light", "dark"], width: int) -> None:
        """Set the colour scheme that the reader prefers, and the window's width in pixels."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, path: Path | str) -> Page:
        """Load the file at ``path``, or the page at an address, wait until it is complete, and return what it did."""
        address = path if isinstance(path, str) else path.as_uri()
        self._events.clear()
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next())
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page = Page()
        for event in self._events:
            if event.get("method") == "Network.requestWillBeSent":
                page.requests.append(event["params"]["request"]["url"])
            elif event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                page.complaints.append(json.dumps(event["params"]))
        page.requests.remove(address)
        return page

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def least_contrast(self) -> tuple[float, str]:
        """Return the lowest contrast between any text and its background, and that text."""
        ratio, text = self.evaluate(_CONTRAST)
        return ratio, text

    def press(self, key: Literal["Tab", "Enter"]) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13}
        more = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=codes[key], **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=codes[key])

    def accessibility_nodes(self) -> list[tuple[str, str]]:
        """Return what a screen reader gets of the page, in order: roles and names."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG, including the part below the edge of the window."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def pdf(self) -> bytes:
        """Return the page as it is printed, as a PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            data = os.read(self._reading, 1 << 16) if ready else b""
            assert data, f"the browser said nothing for {_SECONDS} s, or ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
