"""A browser without a screen: Chromium, which takes orders of the DevTools protocol on two pipes.

Neither a driver nor a package is needed beside the browser. https://chromedevtools.github.io/devtools-protocol lists
the orders and the events.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

NAMED = "MEGAZERO_BROWSER"
"""The variable by which .ci/run names the browser that it has installed: a test that misses it fails then."""
NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-default-apps --disable-extensions --disable-dev-shm-usage "
    "--hide-scrollbars --remote-debugging-pipe"
).split()
PATIENCE = 60
"""Seconds for an answer: the machine may be busy."""
KEYS: Mapping[str, int] = {
    "Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39,
    "ArrowDown": 40, " ": 32,
}  # fmt: skip
"""Names of keys -> the codes that Chromium wants beside them."""


def browser_path() -> str | None:
    """The browser of this machine; None without one."""
    return os.environ.get(NAMED) or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One window of Chromium with a page. profile: an empty folder."""

    def __init__(self, path: str, profile: Path) -> None:
        assert os.access(path, os.X_OK), f"{path} is no browser that can be started"
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        # The browser reads from descriptor 3 and writes to 4; a shell gives these numbers to the ends of the pipes.
        start = f'exec "$0" "$@" 3<&{orders} 4>&{answers}'
        command = ["bash", "-c", start, path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            pass_fds=(orders, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(orders)
        os.close(answers)
        self._buffer, self._number = b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.order("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.order("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.order(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.order("Browser.close")  # ends its helpers too, which write into the profile
            self._process.wait(PATIENCE)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._orders)
        os.close(self._answers)

    def order(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give an order and return its answer. Events that arrive meanwhile are kept. Raises AssertionError."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._orders, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], PATIENCE)[0], f"the browser says nothing for {PATIENCE} s"
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1.0) -> None:
        """Show a page, and return when its script has run and two frames are drawn."""
        self.resize(width, height, scale)
        self.order(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.events.clear()
        self.order("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.documentElement.dataset.ready === 'yes' && document.readyState === 'complete'")
        self.frames()

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self.order(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            # While a page is being replaced, its context is gone.
            answer = self.order("Runtime.evaluate", expression=f"Boolean({condition})", returnByValue=True)
            if answer["result"].get("value") is True:
                return
            time.sleep(0.02)
        raise AssertionError(f"not true after {PATIENCE} s: {condition}; {self.complaints()}")

    def frames(self) -> None:
        """Wait until what is asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript, or of its promise. Raises AssertionError for an exception."""
        answer = self.order("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys: str, shift: bool = False) -> None:
        """Keys one after the other, as a person presses them."""
        for key in keys:
            of = {
                "key": key,
                "code": key,
                "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper())),
                "modifiers": 8 * shift,
            }
            text = "\r" if key == "Enter" else key if len(key) == 1 else ""
            self.order(
                "Input.dispatchKeyEvent",
                type="keyDown" if text else "rawKeyDown",
                **of,
                **({"text": text} if text else {}),
            )
            self.order("Input.dispatchKeyEvent", type="keyUp", **of)
        self.frames()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.order("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str, clicks: int = 1) -> None:
        """Click in the middle of an element, which is brought into sight before."""
        x, y, width, height = self.box(selector)
        self._click(x + width / 2, y + height / 2, clicks)

    def _click(self, x: float, y: float, clicks: int) -> None:
        self.mouse("mouseMoved", x, y)
        for number in range(1, clicks + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.mouse(kind, x, y, button="left", clickCount=number)
        self.frames()

    def drag(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """Press at one place and let go at another."""
        self.mouse("mouseMoved", x0, y0)
        self.mouse("mousePressed", x0, y0, button="left", buttons=1, clickCount=1)
        for share in (0.5, 1.0):
            self.mouse("mouseMoved", x0 + (x1 - x0) * share, y0 + (y1 - y0) * share, button="left", buttons=1)
        self.mouse("mouseReleased", x1, y1, button="left", clickCount=1)
        self.frames()

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """(left, top, width, height) of an element in the window, which is brought into sight before."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.frames()
        box = self.run(
            f"(({{left, top, width, height}}) => [left, top, width, height])({found}.getBoundingClientRect())"
        )
        return (float(box[0]), float(box[1]), float(box[2]), float(box[3]))

    def picture(self, whole: bool = False) -> bytes:
        """The window, or the whole page, as PNG."""
        return base64.b64decode(self.order("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def requests(self) -> list[str]:
        """Addresses that the page has asked for, itself aside, and without what stands in the page as `data:`."""
        sent = [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
        return sent[1:]

    def complaints(self) -> list[str]:
        """Exceptions, and warnings and errors of the console."""
        found = []
        for event in self.events:
            told = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
                found.append(str(told["args"]))
            elif event["method"] == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(str(told["entry"]))
        return found
