#!/usr/bin/env python3
"""The part of llama-server that `impress bench peer-llama-server` talks to, without a model: for testing the talk."""
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = options["--slot-save-path"]
slot = []


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, value):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, {"status": "ok"})

    def do_POST(self):
        global slot
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/slots/0?action=erase":
            slot = []
            self.answer(200, {"n_erased": 0})
        elif self.path == "/slots/0?action=save":
            with open(folder + body["filename"], "w", encoding="utf-8") as f:
                json.dump(slot, f)
            self.answer(200, {"n_saved": len(slot)})
        elif self.path == "/slots/0?action=restore":
            with open(folder + body["filename"], encoding="utf-8") as f:
                slot = json.load(f)
            size = os.path.getsize(folder + body["filename"])
            if os.environ.get("FAKE_FAILS"):
                self.answer(400, {"error": {"message": "no such slot"}})
            else:
                self.answer(200, {"n_restored": len(slot), "n_read": size, "timings": {"restore_ms": 0.001}})
        elif self.path == "/completion":
            prompt = body["prompt"]
            known = 0
            while known < min(len(slot), len(prompt) - 1) and slot[known] == prompt[known]:
                known += 1
            slot = prompt
            self.answer(200, {"content": "x", "tokens": [7][:body["n_predict"]],
                              "timings": {"prompt_n": len(prompt) - known, "prompt_ms": 0.001}})
        else:
            self.answer(404, {})

    def log_message(self, *_):
        pass


sys.exit(HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever())
