"""A headless Chromium, driven through a pipe with the DevTools protocol: no package, only the browser."""

import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

BROWSER = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
# Chromium takes the ends of its two pipes as files 3 and 4.
_START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
_OPTIONS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions"
_OPTIONS += " --hide-scrollbars --remote-debugging-pipe"
_LONGEST_WAIT = 60.0
_NAMES = "PageUp PageDown End Home ArrowLeft ArrowUp ArrowRight ArrowDown"
_KEYS = {name: code for code, name in enumerate(_NAMES.split(), 33)}


class Chromium:
    """One browser with one page; a context manager.

    `errors` collects uncaught errors of the page and what it writes to the console.
    """

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs_in, self.pipe_in = os.pipe()
        self.pipe_out, theirs_out = os.pipe()
        high = [fcntl.fcntl(pipe, fcntl.F_DUPFD, 10) for pipe in (theirs_in, theirs_out)]
        command = [sys.executable, "-c", _START, *map(str, high), BROWSER, *_OPTIONS.split()]
        command += [f"--user-data-dir={self.profile.name}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=high, **quiet)
        for pipe in (theirs_in, theirs_out, *high):
            os.close(pipe)
        self.ids, self.buffer, self.session, self.errors, self.loaded = itertools.count(1), b"", None, [], 0

    def __enter__(self):
        try:
            [page] = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
            attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
            self.session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.pipe_in)
        os.close(self.pipe_out)
        self.profile.cleanup()

    def call(self, method, **params):
        """Return the result of a command of the protocol."""
        sent = {"id": next(self.ids), "method": method, "params": params}
        if self.session:
            sent["sessionId"] = self.session
        os.write(self.pipe_in, json.dumps(sent).encode() + b"\0")
        while (message := self._receive()).get("id") != sent["id"]:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def _receive(self):
        """Return the next message, and note what it says of the page."""
        while b"\0" not in self.buffer:
            if not select.select([self.pipe_out], [], [], _LONGEST_WAIT)[0]:
                raise TimeoutError("Chromium does not answer.")
            chunk = os.read(self.pipe_out, 1 << 16)
            if not chunk:
                raise RuntimeError("Chromium has ended.")
            self.buffer += chunk
        message, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(message)
        self.loaded += message.get("method") == "Page.loadEventFired"
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.errors.append(message["params"])
        return message

    def open(self, address, width=1280, height=900, scripts=True):
        """Open a page in a window of a size, and wait until it is loaded."""
        window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **window)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        for step in ("about:blank", address):  # an address that differs behind # only would load nothing
            before = self.loaded
            self.call("Page.navigate", url=step)
            while self.loaded == before:
                self._receive()

    def evaluate(self, expression):
        """Return the value of an expression of JavaScript in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def wait_for(self, expression):
        """Wait until an expression is true."""
        end = time.monotonic() + _LONGEST_WAIT
        while not (found := self.evaluate(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} stays {found!r}.")
            time.sleep(0.05)

    def press(self, key, shift=False):
        for kind in ("keyDown", "keyUp"):
            sent = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
            self.call("Input.dispatchKeyEvent", modifiers=8 * shift, **sent)

    def drag(self, start, by, finger=False):
        """Press the mouse, or put a finger, at a point of the window, move by a vector in steps, and release."""
        points = [{"x": start[0] + step * by[0], "y": start[1] + step * by[1]} for step in (0.0, 0.5, 1.0)]
        if finger:
            for kind, point in zip(("touchStart", "touchMove", "touchMove"), points, strict=True):
                self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[point])
            self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            return
        kinds = ("mousePressed", "mouseMoved", "mouseMoved", "mouseReleased")
        for kind, point in zip(kinds, [*points, points[-1]], strict=True):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **point)
