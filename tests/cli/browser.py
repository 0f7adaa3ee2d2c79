"""A headless Chromium, driven over its debugging pipe. Standard library only."""
import atexit
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find():
    return os.environ.get("IMPRESS_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    def __init__(self, width=1200, height=900):
        self.home = tempfile.mkdtemp(dir=os.environ.get("tmp"))
        to_read, self.out = os.pipe()
        self.into, to_write = os.pipe()

        def place():  # the browser reads from 3 and writes to 4
            a, b = os.dup(to_read), os.dup(to_write)
            os.dup2(a, 3)
            os.dup2(b, 4)
            os.close(a) if a > 4 else None
            os.close(b) if b > 4 else None

        argv = [find(), "--headless", "--remote-debugging-pipe", "--user-data-dir=" + self.home, "--no-first-run",
                "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb",
                "--disable-background-networking", "--window-size=%d,%d" % (width, height)]
        if os.geteuid() == 0:
            argv.append("--no-sandbox")  # it needs a user of its own
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        preexec_fn=place, close_fds=False, start_new_session=True)
        os.close(to_read)
        os.close(to_write)
        atexit.register(self.close)
        self.events, self.replies, self.number, self.session = [], {}, 0, None
        self.news = threading.Condition()
        threading.Thread(target=self.listen, daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def listen(self):
        rest = b""
        while True:
            try:
                got = os.read(self.into, 1 << 20)
            except OSError:
                got = b""
            if not got:
                break
            *messages, rest = (rest + got).split(b"\0")
            with self.news:
                for m in map(json.loads, messages):
                    if "id" in m:
                        self.replies[m["id"]] = m
                    else:
                        self.events.append(m)
                self.news.notify_all()

    def call(self, method, timeout=60, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        with self.news:
            if not self.news.wait_for(lambda: message["id"] in self.replies, timeout):
                raise TimeoutError(method)
            reply = self.replies.pop(message["id"])
        if "error" in reply:
            raise RuntimeError("%s: %s" % (method, reply["error"]))
        return reply["result"]

    def go(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'", "the page")

    def eval(self, expression):
        r = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in r:
            raise RuntimeError(expression + ": " + json.dumps(r["exceptionDetails"])[:600])
        return r["result"].get("value")

    def wait(self, expression, what, seconds=60):
        until = time.time() + seconds
        while time.time() < until:
            try:
                if self.eval(expression):
                    return True
            except RuntimeError as e:  # a page on its way in
                if time.time() > until - 1:
                    raise e
            time.sleep(0.1)
        return False

    def key(self, key, text=None):
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38,
                 "ArrowRight": 39, "ArrowDown": 40}
        text = text or {"Enter": "\r", " ": " "}.get(key)
        code = codes.get(key, 0)
        down = dict(type="keyDown" if text else "rawKeyDown", key=key, code="Space" if key == " " else key,
                    windowsVirtualKeyCode=code, nativeVirtualKeyCode=code)
        if text:
            down["text"] = text
        self.call("Input.dispatchKeyEvent", **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=down["code"], windowsVirtualKeyCode=code)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def media(self, scheme="light", motion="no-preference"):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme},
                                                          {"name": "prefers-reduced-motion", "value": motion}])

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def shot(self, path):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)["data"]
        with open(path, "wb") as f:
            f.write(base64.b64decode(data))

    def errors(self):
        """What a console would show in red, and exceptions."""
        out = []
        for e in list(self.events):
            p = e.get("params", {})
            if e["method"] == "Runtime.exceptionThrown":
                out.append(json.dumps(p["exceptionDetails"])[:400])
            elif e["method"] == "Log.entryAdded" and p["entry"]["level"] in ("error", "warning"):
                out.append(p["entry"].get("text", "") + " " + p["entry"].get("url", ""))
            elif e["method"] == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning", "assert"):
                out.append(json.dumps(p["args"])[:400])
        return out

    def urls(self):
        return [e["params"]["request"]["url"] for e in list(self.events) if e["method"] == "Network.requestWillBeSent"]

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its helpers write into its folder, too
            self.process.wait()
        for _ in range(50):
            shutil.rmtree(self.home, ignore_errors=True)
            if not os.path.exists(self.home):
                break
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(0 if find() else 77)
