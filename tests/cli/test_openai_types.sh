#!/usr/bin/env bash
# Every kind of reply, against the types of OpenAI's Python package, as its client would take it in, and more strictly: a
# field that the type doesn't have must be one of ours.
python=$(bash "$(dirname "$0")/openai_env.sh") || { echo "skipped: OpenAI's package can't be had"; exit 77; }
. "$(dirname "$0")/lib.sh"
[ -x "${OAI_SAMPLES:-}" ] || { echo "skipped: oai_samples is not built"; exit 77; }

"$OAI_SAMPLES" >"$tmp/samples" || fail "oai_samples"
"$python" - "$tmp/samples" <<'PY' || fail "replies that OpenAI's package does not take"
import json
import sys

import pydantic
from openai.pagination import SyncPage
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared.error_object import ErrorObject

types = {"ChatCompletion": ChatCompletion, "ChatCompletionChunk": ChatCompletionChunk, "Completion": Completion,
         "Model": Model, "SyncPage[Model]": SyncPage[Model], "error": ErrorObject}
# Ours, and those of other servers that clients know. A chunk of completions has no finish_reason before the last one.
ours = {"impress", "max_model_len", "reasoning_content"}
bad = n = 0


def extras(value, where):
    """Fields that the model did not declare, at any depth."""
    if isinstance(value, pydantic.BaseModel):
        for name in (value.model_extra or {}):
            yield f"{where}.{name}", name
        for name in type(value).model_fields:
            yield from extras(getattr(value, name), f"{where}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from extras(item, where)


for line in open(sys.argv[1]):
    kind, text = line.rstrip("\n").split("\t", 1)
    data = json.loads(text)
    n += 1
    try:
        if kind == "error":
            assert list(data) == ["error"]
            data = data["error"]
        if kind == "Completion":
            for choice in data["choices"]:
                if choice["finish_reason"] is None:
                    choice["finish_reason"] = "stop"
        value = types[kind].model_validate(data, strict=True)
        for where, name in extras(value, kind):
            if name not in ours:
                raise AssertionError(f"{where} is no field of it")
    except Exception as e:
        bad += 1
        print(kind, text, e, sep="\n", file=sys.stderr)
print(f"{n} replies, {bad} bad")
sys.exit(bad > 0 or n < 30)
PY
finish
